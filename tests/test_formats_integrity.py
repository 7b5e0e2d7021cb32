"""Hashes find what changed; no damaged file makes a reader crash, hang, take memory or answer wrongly in silence."""

import json
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantised import write_quantised
from safetensors.torch import load_file, save_file

from formats.containers import open_checkpoint
from formats.errors import BitwrightError, DataError
from formats.integrity import verify, write_manifest_hashes

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def quantised(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantised")
    with open_checkpoint(tiny_model("llama", layers=1)) as source:
        write_quantised(source, out, "gptq", "int4-g32")
    (out / "manifest.json").write_text('{"seed": 7}')
    write_manifest_hashes(out)
    return out


@pytest.fixture
def model(quantised: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(quantised, tmp_path / "model"))


def test_an_untouched_directory_verifies(model: Path) -> None:
    assert verify(model) == []
    manifest = json.loads((model / "manifest.json").read_text())
    assert manifest["seed"] == 7
    tensor = manifest["hashes"]["tensors"][WEIGHTS]["model.norm.weight"]
    assert tensor["dtype"] == "float16" and tensor["shape"] == [64] and len(tensor["sha256"]) == 64


def test_one_flipped_bit_names_the_tensor(model: Path) -> None:
    data = bytearray((model / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (model / WEIGHTS).write_bytes(data)
    changed, tensor = verify(model)
    assert changed.startswith(f"{WEIGHTS}: changed")
    assert tensor.startswith(f'{WEIGHTS}: tensor "') and tensor.endswith("bytes differ")


def test_changed_shapes_dtypes_and_names(model: Path) -> None:
    t = load_file(model / WEIGHTS)
    t["model.norm.weight"] = t["model.norm.weight"].reshape(8, 8)
    t["lm_head.weight"] = t["lm_head.weight"].float()
    t["extra"] = t.pop("model.layers.0.input_layernorm.weight")
    save_file(t, model / WEIGHTS)
    report = "\n".join(verify(model))
    assert 'tensor "model.norm.weight": shape is [8, 8], not [64]' in report
    assert 'tensor "lm_head.weight": dtype is float32, not float16' in report
    assert 'tensor "extra" is not in the manifest' in report
    assert 'tensor "model.layers.0.input_layernorm.weight" is missing' in report


def test_missing_added_and_unreadable_files(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "notes.txt").write_text("hello")
    (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:1000])
    report = verify(model)
    assert "tokenizer.json: missing" in report and "notes.txt: not in the manifest" in report
    assert any("unreadable, damaged or truncated" in line for line in report)
    (model / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="the manifest has no hashes"):
        verify(model)


def read_everything(directory: Path) -> None:
    with open_checkpoint(directory) as model:
        for name in model.names():
            model.read(name)


def survives(directory: Path) -> None:
    """Opening and reading ends in success or in an error meant for the user, soon and in little memory."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read_everything(directory)
    except BitwrightError as error:
        assert str(error)
    assert time.perf_counter() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB; the files have under 200


@pytest.mark.parametrize("container", ["safetensors", "gptq", "awq", "compressed-tensors"])
def test_mutated_bytes(tiny_model: Callable[..., Path], tmp_path: Path, container: str) -> None:
    """Flip, cut, insert and repeat bytes of the headers, the config and the index."""
    with open_checkpoint(tiny_model("llama", layers=1)) as source:
        write_quantised(source, tmp_path, container, "int4-g32", shard_size=80_000)
    generator = random.Random(0)
    files = ["config.json", "model.safetensors.index.json", *(p.name for p in tmp_path.glob("*.safetensors"))]
    for _ in range(60):
        file = tmp_path / generator.choice(files)
        original = file.read_bytes()
        data = bytearray(original)
        header = min(len(data), 6000)
        for _ in range(generator.choice((1, 1, 2, 8))):
            at = generator.randrange(min(header, len(data)))
            kind = generator.randrange(4)
            if kind == 0:
                data[at] ^= 1 << generator.randrange(8)
            elif kind == 1:
                del data[at : at + generator.randrange(1, 40)]
            elif kind == 2:
                data[at:at] = bytes(generator.randrange(256) for _ in range(generator.randrange(1, 9)))
            else:
                data[at : at + 1] = generator.choice((b"9", b"0", b"-", b"]", b"}", b'"', b"\xff"))
        file.write_bytes(data)
        survives(tmp_path)
        file.write_bytes(original)
    read_everything(tmp_path)


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "I32", "U8", "F8_E8M0", "X", 3]),
        "shape": st.lists(st.integers(-2, 1 << 62) | st.integers(0, 8), max_size=5),
        "data_offsets": st.lists(st.integers(-1, 1 << 63) | st.integers(0, 64), max_size=3),
    }
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.dictionaries(st.sampled_from(["model.norm.weight", "a.qweight", "", "lm_head.weight"]), ENTRY),
    length=st.none() | st.integers(0, (1 << 64) - 1),
    body=st.binary(max_size=64),
)
def test_arbitrary_headers(tmp_path: Path, header: dict[str, object], length: int | None, body: bytes) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / WEIGHTS).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    survives(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(["gptq", "awq", "compressed-tensors"]),
    key=st.sampled_from(["bits", "group_size", "sym", "dynamic", "checkpoint_format", "version", "format"]),
    value=JSON,
)
def test_arbitrary_quantization_configs(quantised: Path, tmp_path: Path, method: str, key: str, value: object) -> None:
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] |= {"quant_method": method, key: value}
    if not (tmp_path / WEIGHTS).exists():
        (tmp_path / WEIGHTS).symlink_to(quantised / WEIGHTS)
    (tmp_path / "config.json").write_text(json.dumps(config))
    survives(tmp_path)


def test_no_pickle(tmp_path: Path) -> None:
    """A directory with nothing but pickled weights is not opened."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"pickled \.bin weights are not read"):
        open_checkpoint(tmp_path)
