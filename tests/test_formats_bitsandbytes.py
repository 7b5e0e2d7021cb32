"""bitsandbytes' nf4 directories field by field, against a slow decoder that follows the format's description."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantised import decoded, logits, read_back, write_quantised
from safetensors.torch import load_file, save_file

from formats.containers import CONTAINERS, open_checkpoint
from formats.errors import DataError, UsageError
from formats.grids import parse_grid

LAYER = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def model(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    with open_checkpoint(tiny_model("llama", hidden=256, layers=1)) as source:
        read_back(tmp_path, write_quantised(source, tmp_path, "bitsandbytes", "nf4"))
    return tmp_path


def test_fields(model: Path) -> None:
    t = load_file(model / "model.safetensors")
    state = json.loads(bytes(t[f"{LAYER}.quant_state.bitsandbytes__nf4"].tolist()))
    assert state["shape"] == [256, 512] and state["blocksize"] == 64 and state["dtype"] == "float16"
    with open_checkpoint(model) as checkpoint:
        values = checkpoint.read(LAYER).dequantize()  # type: ignore[union-attr]
    for row, column in ((0, 0), (3, 65), (40, 511), (255, 100)):
        flat = row * 512 + column
        code = t[LAYER].flatten()[flat // 2].item() >> (0 if flat % 2 else 4) & 15
        block = flat // 64
        absmax = t[f"{LAYER}.nested_quant_map"][t[f"{LAYER}.absmax"][block].item()]
        absmax = absmax * t[f"{LAYER}.nested_absmax"][block // 256] + state["nested_offset"]
        assert values[row, column] == absmax * t[f"{LAYER}.quant_map"][code]


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma3_text"])
def test_families(tiny_model: Callable[..., Path], tmp_path: Path, family: str) -> None:
    with open_checkpoint(tiny_model(family)) as source:
        writes = write_quantised(source, tmp_path / "q", "bitsandbytes", lambda n: None if ".0." in n else "nf4")
    read_back(tmp_path / "q", writes)
    config = json.loads((tmp_path / "q/config.json").read_text())["quantization_config"]
    assert "lm_head" in config["llm_int8_skip_modules"]
    assert config["bnb_4bit_compute_dtype"] == ("bfloat16" if family == "gemma3_text" else "float16")
    assert (logits(decoded(tmp_path / "q", tmp_path / "d")) - logits(tiny_model(family))).abs().max() < 1


def test_what_it_cannot_store() -> None:
    store = CONTAINERS["bitsandbytes"]()
    with pytest.raises(UsageError, match="stores nf4, not int4-g64"):
        store.substitute("x", (64, 64), parse_grid("int4-g64"))
    with pytest.raises(UsageError, match="100 input features are not whole blocks"):
        store.substitute("x", (64, 100), parse_grid("nf4"))


@pytest.mark.parametrize(
    "change",
    [
        {"quant_type": "fp4"},
        {"blocksize": 128},
        {"nested_blocksize": None},
        {"shape": [1 << 40, 64]},
        {"shape": [256]},
        {"shape": [256, 500]},
        {"nested_offset": "x"},
    ],
)
def test_damaged_states(model: Path, change: dict[str, object]) -> None:
    t = load_file(model / "model.safetensors")
    name = f"{LAYER}.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(t[name].tolist())) | change
    t[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(t, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError):
        open_checkpoint(model).read(LAYER)


def test_other_tables_are_refused(model: Path) -> None:
    t = load_file(model / "model.safetensors")
    t[f"{LAYER}.quant_map"] = t[f"{LAYER}.quant_map"].flip(0)
    save_file(t, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="is not the usual table"):
        open_checkpoint(model).read(LAYER)
