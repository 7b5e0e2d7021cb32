"""AWQ gemm directories field by field, and what the layout cannot hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import decoded, logits, read_back, same, write_model, write_quantised
from safetensors.torch import load_file, save_file

from formats.containers import CONTAINERS, open_checkpoint
from formats.errors import DataError, UsageError
from formats.grids import parse_grid
from formats.qtensor import QTensor

LAYER = "model.layers.0.self_attn.q_proj"
SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # of columns 0 to 7 in a word, from AutoAWQ's description of its gemm kernel


def config_of(out: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((out / "config.json").read_text())
    return config


@pytest.mark.parametrize("spec", ["int4-g32", "int4-g64-sym", "int4-channel"])
def test_fields(tiny_model: Callable[..., Path], tmp_path: Path, spec: str) -> None:
    with open_checkpoint(tiny_model("llama")) as source:
        writes = write_quantised(source, tmp_path, "awq", spec)
    read_back(tmp_path, writes)
    t = load_file(tmp_path / "model.safetensors")
    groups = 64 // (parse_grid(spec).block or 64)
    qweight, qzeros, scales = (t[f"{LAYER}.{suffix}"] for suffix in ("qweight", "qzeros", "scales"))
    assert qweight.dtype == qzeros.dtype == torch.int32 and scales.dtype == torch.float16
    assert (qweight.shape, qzeros.shape, scales.shape) == ((64, 8), (groups, 8), (groups, 64))
    values = writes[f"{LAYER}.weight"].dequantize()
    for out, column in ((0, 0), (1, 3), (9, 40), (63, 63)):
        group = column * groups // 64
        code = qweight[column, out // 8].item() >> SHIFTS[out % 8] & 15
        zero = qzeros[group, out // 8].item() >> SHIFTS[out % 8] & 15
        assert values[out, column] == scales[group, out].float() * (code - zero)
    quantization = config_of(tmp_path)["quantization_config"]
    assert quantization["version"] == "gemm" and quantization["zero_point"] is True and quantization["bits"] == 4
    assert quantization["group_size"] == (parse_grid(spec).block or -1)
    assert quantization["modules_to_not_convert"] == ["lm_head"]


def test_skipped_layers_are_listed(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with open_checkpoint(tiny_model("qwen2")) as source:
        writes = write_quantised(source, tmp_path / "q", "awq", lambda n: None if "0.mlp.down" in n else "int4-g32")
    read_back(tmp_path / "q", writes)
    skipped = config_of(tmp_path / "q")["quantization_config"]["modules_to_not_convert"]
    assert sorted(skipped) == ["lm_head", "model.layers.0.mlp.down_proj"]
    assert (logits(decoded(tmp_path / "q", tmp_path / "d")) - logits(tiny_model("qwen2"))).abs().max() < 1


def test_what_awq_cannot_store(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    store = CONTAINERS["awq"]()
    assert store.substitute("x", (64, 576), parse_grid("int4-g128")) == parse_grid("int4-g64")
    assert store.substitute("x", (64, 576), parse_grid("int4-channel")) == parse_grid("int4-channel")
    for shape, spec, message in (
        ((64, 64), "int8-g32", "AWQ cannot store int8-g32"),
        ((64, 64), "q4_0", "AWQ cannot store q4_0"),
        ((76, 64), "int4-g32", "76 are not divisible by 8"),
        ((64, 100), "int4-g32", "groups of 32 do not divide 100"),
    ):
        with pytest.raises(UsageError, match=message):
            store.substitute("x", shape, parse_grid(spec))
    with open_checkpoint(tiny_model("llama")) as source:
        with pytest.raises(UsageError, match="one grid per model, not int4-g32, int4-g64"):
            write_quantised(source, tmp_path, "awq", lambda n: "int4-g64" if "mlp" in n else "int4-g32")
        with pytest.raises(UsageError, match="cannot store a column order"):
            write_quantised(source, tmp_path, "awq", "int4-g32", act_order=True)


@pytest.mark.parametrize("change", [{"version": "gemv"}, {"bits": 3}, {"group_size": 24}, {"sym": True}])
def test_other_versions_are_refused(tiny_model: Callable[..., Path], tmp_path: Path, change: dict[str, Any]) -> None:
    with open_checkpoint(tiny_model("llama")) as source:
        write_quantised(source, tmp_path, "awq", "int4-g32")
    config = config_of(tmp_path)
    config["quantization_config"].update(change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError):
        open_checkpoint(tmp_path).read(f"{LAYER}.weight")


def test_damaged_tensors(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with open_checkpoint(tiny_model("llama")) as source:
        write_quantised(source, tmp_path, "awq", "int4-g32")
    t = load_file(tmp_path / "model.safetensors")
    t[f"{LAYER}.scales"] = torch.ones(2, 56).half()
    save_file(t, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"scales.* is torch.float16 \[2, 56\], but int4-g32 of \[64, 64\] needs"):
        open_checkpoint(tmp_path)


def test_the_same_codes_move_between_containers(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """GPTQ -> compressed-tensors -> AWQ -> GPTQ on one 4-bit grid: nothing changes."""
    with open_checkpoint(tiny_model("llama")) as source:
        first = write_quantised(source, tmp_path / "gptq", "gptq", "int4-g32")
    previous = "gptq"
    for container in ("compressed-tensors", "awq", "gptq"):
        with open_checkpoint(tmp_path / previous) as model:
            moved = {n: q for n in model.names() if isinstance(q := model.read(n), QTensor)}
            previous = f"{previous}-{container}"
            write_model(model, tmp_path / previous, container, moved)
    with open_checkpoint(tmp_path / previous) as model:
        assert all(same(model.read(name), q) for name, q in first.items())  # type: ignore[arg-type]
    original, last = (load_file(tmp_path / name / "model.safetensors") for name in ("gptq", previous))
    assert original.keys() == last.keys() and all(torch.equal(last[name], t) for name, t in original.items())
