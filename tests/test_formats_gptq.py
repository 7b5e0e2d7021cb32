"""GPTQ directories field by field: a slow unpacker written from the format's description, and the traps."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import decoded, linears, logits, random_qtensor, read_back, same, write_model, write_quantised
from safetensors.torch import load_file, save_file

from formats.containers import CONTAINERS, open_checkpoint
from formats.errors import DataError, UsageError
from formats.grids import parse_grid
from formats.qtensor import QTensor

LAYER = "model.layers.0.self_attn.q_proj"


def quantization_config(out: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((out / "config.json").read_text())["quantization_config"]
    return config


def slow_value(t: dict[str, torch.Tensor], module: str, bits: int, v1: bool, row: int, column: int) -> float:
    """One weight by Python integers: qweight runs along in, qzeros along out, both least significant bit first."""

    def field(words: list[int], i: int) -> int:
        stream = sum((w & 0xFFFFFFFF) << 32 * j for j, w in enumerate(words))
        return stream >> i * bits & ((1 << bits) - 1)

    group = int(t[f"{module}.g_idx"][column])
    code = field(t[f"{module}.qweight"][:, row].tolist(), column)
    zero = field(t[f"{module}.qzeros"][group].tolist(), row) + v1
    return float(t[f"{module}.scales"][group, row]) * (code - zero)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    "spec", ["int2-g16", "int3-g32", "int4-g32-sym", "int8-g64", "int4-channel", "int8-channel-sym"]
)
def test_fields(tiny_model: Callable[..., Path], tmp_path: Path, spec: str, act_order: bool) -> None:
    with open_checkpoint(tiny_model("llama")) as source:
        writes = write_quantised(source, tmp_path, "gptq", spec, act_order)
    read_back(tmp_path, writes)
    grid = parse_grid(spec)
    groups = 64 // (grid.block or 64)
    bits = int(spec[3])
    t = load_file(tmp_path / "model.safetensors")
    assert t[f"{LAYER}.qweight"].dtype == torch.int32 and t[f"{LAYER}.qweight"].shape == (64 * bits // 32, 64)
    assert t[f"{LAYER}.qzeros"].dtype == torch.int32 and t[f"{LAYER}.qzeros"].shape == (groups, 64 * bits // 32)
    assert t[f"{LAYER}.scales"].dtype == torch.float16 and t[f"{LAYER}.scales"].shape == (groups, 64)
    assert t[f"{LAYER}.g_idx"].dtype == torch.int32 and t[f"{LAYER}.g_idx"].shape == (64,)
    config = quantization_config(tmp_path)
    symmetric = spec.endswith("sym")
    assert config["checkpoint_format"] == ("gptq" if symmetric else "gptq_v2")
    assert (config["bits"], config["group_size"], config["sym"]) == (bits, grid.block or -1, symmetric)
    assert config["desc_act"] == (act_order and grid.block is not None)
    assert config["lm_head"] is False and config["dynamic"] == {}
    values = writes[f"{LAYER}.weight"].dequantize()
    for row, column in ((0, 0), (1, 5), (7, 10), (31, 21), (63, 63)):
        assert values[row, column] == slow_value(t, LAYER, bits, symmetric, row, column)


def test_v1_where_every_zero_point_allows_it(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Asked for v1, a model with a zero point of 0 is routed to v2; symmetric zeros are 0x77777777."""
    with open_checkpoint(tiny_model("llama")) as source:
        for i, (spec, zero, stored) in enumerate(
            (("int4-g32", 1, "gptq"), ("int4-g32", 0, "gptq_v2"), ("int3-g32", 1, "gptq"), ("int3-g32", 0, "gptq_v2"))
        ):
            q = {n: random_qtensor(parse_grid(spec), source.read(n)) for n in linears(source)}  # type: ignore[arg-type]
            for value in q.values():
                value.params["zero"].clamp_(min=1)
            q[f"{LAYER}.weight"].params["zero"][3, 1] = zero
            out = tmp_path / str(i)
            write_model(source, out, "gptq", q, checkpoint_format="gptq")
            assert quantization_config(out)["checkpoint_format"] == stored
            read_back(out, q)
            t = load_file(out / "model.safetensors")
            for row in (2, 3, 4):
                value = q[f"{LAYER}.weight"].dequantize()[row, 40]
                assert value == slow_value(t, LAYER, int(spec[3]), stored == "gptq", row, 40)
        write_quantised(source, tmp_path / "sym", "gptq", "int4-g32-sym")
        assert (load_file(tmp_path / "sym/model.safetensors")[f"{LAYER}.qzeros"] == 0x77777777).all()
        with pytest.raises(UsageError, match="unknown checkpoint_format"):
            CONTAINERS["gptq"]().open_writer(tmp_path, source, {}, {"checkpoint_format": "marlin"})


def test_a_borrow_of_v1_is_undone(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Foreign v1 files subtract one per field of a 32-bit word even from 0; readers add it back per word."""
    with open_checkpoint(tiny_model("llama")) as source:
        writes = {n: random_qtensor(parse_grid("int4-g32"), source.read(n)) for n in linears(source)}  # type: ignore
        writes[f"{LAYER}.weight"].params["zero"][::3] = 0
        write_model(source, tmp_path, "gptq", writes)
    t = load_file(tmp_path / "model.safetensors")
    for name in t:
        if name.endswith(".qzeros"):
            t[name] = t[name] - 0x11111111
    save_file(t, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq"
    (tmp_path / "config.json").write_text(json.dumps(config))
    read_back(tmp_path, writes)


def test_symmetric_v2_files_labelled_v1(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with open_checkpoint(tiny_model("llama")) as source:
        writes = write_quantised(source, tmp_path, "gptq", "int4-g32-sym", checkpoint_format="gptq_v2")
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"gptq_v2"', '"gptq"'))
    read_back(tmp_path, writes)


def test_per_layer_overrides_and_skips(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """`dynamic` patterns: the first match wins, and they match vLLM's fused names, too."""

    def choose(name: str) -> str | None:
        if "layers.1.mlp.down_proj" in name:
            return None
        return "int8-channel-sym" if "layers.0.self_attn" in name and "o_proj" not in name else "int4-g32"

    with open_checkpoint(tiny_model("llama", layers=3)) as source:
        writes = write_quantised(source, tmp_path, "gptq", choose)
    read_back(tmp_path, writes)
    config = quantization_config(tmp_path)
    assert (config["bits"], config["group_size"], config["sym"]) == (4, 32, False)
    overrides = {pattern: value for pattern, value in config["dynamic"].items() if pattern.startswith("+:")}
    skips = [pattern for pattern in config["dynamic"] if pattern.startswith("-:")]
    assert list(overrides.values()) == [{"bits": 8, "group_size": -1, "sym": True}]
    (pattern,) = overrides
    for module in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
        assert re.match(pattern[2:], f"model.layers.0.self_attn.{module}")
        assert not re.match(pattern[2:], f"model.layers.1.self_attn.{module}")
    assert [bool(re.match(skips[0][2:], f"model.layers.{i}.mlp.down_proj")) for i in (0, 1, 11)] == [False, True, False]
    with open_checkpoint(tmp_path) as model:
        assert model.stored_as("model.layers.1.mlp.down_proj.weight") == "float16"


@pytest.mark.parametrize(("hidden", "spec"), [(576, "int4-g128"), (192, "int4-g128"), (192, "int8-g128-sym")])
def test_ragged_last_group(tiny_model: Callable[..., Path], tmp_path: Path, hidden: int, spec: str) -> None:
    with open_checkpoint(tiny_model("llama", hidden=hidden, layers=1)) as source:
        writes = write_quantised(source, tmp_path, "gptq", spec, act_order=hidden == 192)
    assert load_file(tmp_path / "model.safetensors")[f"{LAYER}.scales"].shape[0] == -(-hidden // 128)
    read_back(tmp_path, writes)


def test_outputs_not_divisible_by_eight(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with open_checkpoint(tiny_model("llama", intermediate_size=76)) as source:
        writes = write_quantised(source, tmp_path, "gptq", "int4-channel")
        with pytest.raises(UsageError, match="packs 3-bit codes 32 at a time"):
            CONTAINERS["gptq"]().substitute("x", (76, 64), parse_grid("int3-g32"))
        with pytest.raises(UsageError, match="GPTQ cannot store int5-g32"):
            CONTAINERS["gptq"]().substitute("x", (64, 64), parse_grid("int5-g32"))
    t = load_file(tmp_path / "model.safetensors")
    assert t["model.layers.0.mlp.up_proj.qzeros"].shape == (1, 10)
    assert t["model.layers.0.mlp.down_proj.qweight"].shape == (10, 64)
    read_back(tmp_path, writes)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma3_text", "mixtral"])
def test_families(tiny_model: Callable[..., Path], tmp_path: Path, family: str) -> None:
    """Biases stay, Conv1D turns to [out, in], tied heads stay tied, experts are stored one by one, in two shards."""
    with open_checkpoint(tiny_model(family)) as source:
        writes = write_quantised(source, tmp_path / "q", "gptq", "int4-g32", shard_size=50_000)
    assert len(list((tmp_path / "q").glob("*.safetensors"))) > 1
    read_back(tmp_path / "q", writes)
    with open_checkpoint(tmp_path / "q") as model, open_checkpoint(tiny_model(family)) as source:
        assert sorted(model.names()) == sorted(source.names())
        assert all(model.shape(name) == source.shape(name) for name in source.names())
        dtype = "bfloat16" if family == "gemma3_text" else "float16"  # whose activations overflow float16
        assert model.config["dtype"] == dtype
        assert {model.stored_as(name) for name in model.names() if name not in writes} == {dtype}
    difference = (logits(decoded(tmp_path / "q", tmp_path / "d")) - logits(tiny_model(family))).abs().max()
    assert 0 < difference < 1.5


def test_a_tied_head_may_get_its_own_codes(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with open_checkpoint(tiny_model("qwen3")) as source:
        assert "lm_head.weight" not in source.names()
        embedding = source.read("model.embed_tokens.weight")
        assert isinstance(embedding, torch.Tensor)
        head = random_qtensor(parse_grid("int8-g32-sym"), embedding)
        write_model(source, tmp_path, "gptq", {"lm_head.weight": head})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config["quantization_config"]["lm_head"] is True
    read_back(tmp_path, {"lm_head.weight": head})


def corrupt(out: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    t = load_file(out / "model.safetensors")
    change(t)
    save_file(t, out / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        ("g_idx", torch.full((64,), 9, dtype=torch.int32), "does not fill groups"),
        ("g_idx", torch.zeros(48, dtype=torch.int32), "needs"),
        ("scales", torch.full((2, 64), torch.inf).half(), "is not finite"),
        ("scales", torch.ones(3, 64).half(), r"is torch.float16 \[3, 64\]"),
        ("qzeros", torch.zeros(2, 8, dtype=torch.int32), "has zero points"),
        ("qzeros", None, "is missing"),
        ("qweight", torch.zeros(8, 64, dtype=torch.int64), "torch.int64"),
        ("qweight", torch.zeros(0, 64, dtype=torch.int32), r"has shape \[0, 64\]"),
    ],
)
def test_damaged_tensors(
    tiny_model: Callable[..., Path], tmp_path: Path, suffix: str, value: torch.Tensor | None, message: str
) -> None:
    with open_checkpoint(tiny_model("llama")) as source:
        write_quantised(source, tmp_path, "gptq", "int4-g32-sym")

    def change(t: dict[str, torch.Tensor]) -> None:
        del t[f"{LAYER}.{suffix}"]
        if value is not None:
            t[f"{LAYER}.{suffix}"] = value

    corrupt(tmp_path, change)
    with pytest.raises(DataError, match=message):
        open_checkpoint(tmp_path).read(f"{LAYER}.weight")


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 10**9},
        {"bits": "four"},
        {"group_size": 0},
        {"group_size": [1]},
        {"dynamic": 5},
        {"dynamic": {"+:(": {"bits": 8}}},
        {"dynamic": {"+:(a|a|model.*)*$": {"bits": 8}, "+:((x*)*)*z": {}}},
        {"dynamic": {"+:.*q_proj": {"bits": 8}}},
        {"checkpoint_format": "marlin"},
        {"quant_method": "hqq"},
        {"sym": True},
    ],
)
def test_nonsense_configs(tiny_model: Callable[..., Path], tmp_path: Path, change: dict[str, Any]) -> None:
    with open_checkpoint(tiny_model("llama")) as source:
        write_quantised(source, tmp_path, "gptq", "int4-g32")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"].update(change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError):
        open_checkpoint(tmp_path).read(f"{LAYER}.weight")


def test_files_without_g_idx(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with open_checkpoint(tiny_model("llama")) as source:
        writes = write_quantised(source, tmp_path, "gptq", "int4-g32")
    corrupt(tmp_path, lambda t: [t.pop(name) for name in list(t) if name.endswith("g_idx")])  # type: ignore[arg-type]
    read_back(tmp_path, writes)


def test_scales_that_are_not_exact_in_float16(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Foreign bf16 scales are read as they are, and refused where they would be rounded."""
    with open_checkpoint(tiny_model("llama")) as source:
        writes = write_quantised(source, tmp_path, "gptq", "int4-g32")
        corrupt(tmp_path, lambda t: t.update({f"{LAYER}.scales": torch.full((2, 64), 1e-6).bfloat16()}))
        with open_checkpoint(tmp_path) as model:
            q = model.read(f"{LAYER}.weight")
            assert isinstance(q, QTensor) and q.params["scale"].dtype == torch.bfloat16
            assert not same(q, writes[f"{LAYER}.weight"])
        (tmp_path / "again").mkdir()
        writer = CONTAINERS["gptq"]().open_writer(tmp_path / "again", source, {f"{LAYER}.weight": q.grid}, {})
        with pytest.raises(DataError, match="not exact in float16"):
            writer.write(f"{LAYER}.weight", q)
