"""Plain directories: what transformers saves we read, what we write the safetensors library and transformers read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import linears, logits, random_qtensor, weight
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import formats.containers.shards as shards
from formats.containers import CONTAINERS, open_checkpoint
from formats.errors import DataError, ResourceError, UsageError
from formats.grids import parse_grid

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "gpt2", "mixtral", "qwen3_moe")


def copy_model(source: Path, out: Path, **options: Any) -> Path:
    """Rewrite a directory through our reader and writer, tensors in reverse order."""
    out.mkdir(parents=True, exist_ok=True)
    with open_checkpoint(source) as model:
        writer = CONTAINERS["safetensors"]().open_writer(out, model, {}, options)
        for name in reversed(model.names()):
            writer.write(name, model.read(name))
        writer.close()
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_survives_a_rewrite(tiny_model: Callable[..., Path], tmp_path: Path, family: str) -> None:
    source = tiny_model(family)
    out = copy_model(source, tmp_path / "out", shard_size=60_000)
    assert len(list(out.glob("*.safetensors"))) > 1
    assert torch.equal(logits(out), logits(source))
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(out.glob("*.safetensors")):
        stored |= load_file(file)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    original = load_file(source / "model.safetensors")
    assert stored.keys() == original.keys()
    assert all(torch.equal(stored[name], original[name]) for name in stored)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / file).read_bytes() == (source / file).read_bytes()


def test_names_shapes_and_dtypes(tiny_model: Callable[..., Path]) -> None:
    with open_checkpoint(tiny_model("llama")) as model:
        assert model.container == "safetensors" and model.arch.name == "llama"
        assert "lm_head.weight" in model.names()
        assert model.shape("model.layers.0.mlp.down_proj.weight") == (64, 128)
        assert model.stored_as("model.norm.weight") == "float32"
        assert "quantization_config" not in model.config


def test_tied_head_is_not_listed_even_when_stored(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3"), out)
    tensors = load_file(out / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    with open_checkpoint(out) as model:
        assert "lm_head.weight" not in model.names()


def test_a_bare_backbone_gets_the_names_of_the_causal_model(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """gpt2 on the hub is saved as "h.0.attn..", with its causal mask as a tensor."""
    source = tiny_model("gpt2")
    out = tmp_path / "model"
    shutil.copytree(source, out)
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(source / "model.safetensors").items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    with open_checkpoint(out) as model, open_checkpoint(source) as original:
        assert sorted(model.names()) == sorted(original.names())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(tiny_model: Callable[..., Path], tmp_path: Path, dtype: str) -> None:
    out = copy_model(tiny_model("llama"), tmp_path / "out", dtype=dtype)
    with open_checkpoint(out) as model, open_checkpoint(tiny_model("llama")) as source:
        assert model.config["dtype"] == dtype
        for name in model.names():
            assert model.stored_as(name) == dtype
            assert torch.equal(model.read(name), source.read(name).to(getattr(torch, dtype)))  # type: ignore[union-attr]


def test_quantised_tensors_are_written_as_their_values(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with open_checkpoint(tiny_model("gpt2")) as model:  # Conv1D: a QTensor is [out, in], the file holds [in, out]
        name = linears(model)[0]
        q = random_qtensor(parse_grid("int4-g32"), weight(model, name))
        writer = CONTAINERS["safetensors"]().open_writer(tmp_path, model, {name: q.grid}, {})
        for other in model.names():
            writer.write(other, q if other == name else model.read(other))
        writer.close()
    assert torch.equal(load_file(tmp_path / "model.safetensors")[name], q.dequantize().T)


def test_written_bytes_do_not_depend_on_the_order(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with open_checkpoint(tiny_model("llama")) as model:
        for i, order in enumerate((model.names(), model.names()[::-1])):
            (tmp_path / str(i)).mkdir()
            writer = CONTAINERS["safetensors"]().open_writer(tmp_path / str(i), model, {}, {})
            for name in order:
                writer.write(name, model.read(name))
            writer.close()
    assert (tmp_path / "0/model.safetensors").read_bytes() == (tmp_path / "1/model.safetensors").read_bytes()


def test_mixed_dtypes_stay_aligned(tmp_path: Path) -> None:
    """Odd half-precision tensors before float ones: the format forbids gaps, and torch forbids misaligned views."""
    tensors = {
        "a": torch.randn(3).half(),
        "b": torch.randn(5),
        "c": torch.ones(1, dtype=torch.int8),
        "d": torch.randn(0),
    }
    writer = shards.ShardWriter(tmp_path, [{n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}])
    for name, tensor in tensors.items():
        writer.store(name, tensor)
    writer.close()
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[n], t) for n, t in tensors.items())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def spoil(source: Path, out: Path) -> Path:
    copy_model(source, out, shard_size=60_000)
    return out


def test_bad_directories_are_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = spoil(tiny_model("llama"), tmp_path / "truncated")
    shard = sorted(model.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(DataError, match=rf"{shard.name}: damaged or truncated"):
        open_checkpoint(model)
    shard.unlink()
    with pytest.raises(DataError, match=rf"{shard.name}: shard is missing"):
        open_checkpoint(model)

    model = spoil(tiny_model("llama"), tmp_path / "foreign")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "bloom"}))
    with pytest.raises(DataError, match='architecture "bloom" is not supported\n.*supported: .*llama'):
        open_checkpoint(model)
    (model / "config.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="config.json: not valid JSON"):
        open_checkpoint(model)

    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="config.json: file is missing"):
        open_checkpoint(tmp_path / "empty")
    (tmp_path / "empty/config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(DataError, match="no safetensors weights"):
        open_checkpoint(tmp_path / "empty")
    with pytest.raises(DataError, match="neither a model directory"):
        open_checkpoint(tmp_path / "empty/config.json")
    with pytest.raises(DataError, match="no such file"):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("evil", ["../../secret.safetensors", "/etc/passwd", 7])
def test_an_index_cannot_leave_its_directory(tiny_model: Callable[..., Path], tmp_path: Path, evil: Any) -> None:
    model = spoil(tiny_model("llama"), tmp_path / "model")
    index = model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = evil
    index.write_text(json.dumps(content))
    with pytest.raises(DataError, match="is not a file name"):
        open_checkpoint(model)


def test_an_index_that_names_the_wrong_shard(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = spoil(tiny_model("llama"), tmp_path / "model")
    index = model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = content["weight_map"]
    names["model.norm.weight"] = next(file for file in names.values() if file != names["model.norm.weight"])
    index.write_text(json.dumps(content))
    with pytest.raises(DataError, match='"model.norm.weight" is not in the file'):
        open_checkpoint(model)


def test_a_full_disk_is_told_before_writing(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards.os, "posix_fallocate", full)
    with pytest.raises(ResourceError, match="cannot reserve .* MiB"):
        copy_model(tiny_model("llama"), tmp_path / "out")


def test_values_beyond_float16_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with open_checkpoint(tiny_model("llama")) as model:
        writer = CONTAINERS["safetensors"]().open_writer(tmp_path, model, {}, {"dtype": "float16"})
        with pytest.raises(DataError, match='"model.norm.weight" has values beyond float16'):
            writer.write("model.norm.weight", torch.full((64,), 1e6))
        with pytest.raises(UsageError, match='unknown dtype "float8"'):
            CONTAINERS["safetensors"]().open_writer(tmp_path, model, {}, {"dtype": "float8"})
