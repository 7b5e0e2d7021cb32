"""Every rule of every engine: a plan that breaks it and its neighbour that does not."""

from typing import Any

import pytest

from formats.arch import arch_of
from formats.errors import UsageError
from formats.grids import parse_grid
from formats.targets import problems

LLAMA: dict[str, Any] = dict(
    model_type="llama",
    hidden_size=1024,
    intermediate_size=2816,
    num_attention_heads=16,
    num_key_value_heads=4,
    vocab_size=32000,
)
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4}
GEMMA = LLAMA | {"model_type": "gemma3_text", "head_dim": 64}
GPT2: dict[str, Any] = dict(model_type="gpt2", n_embd=768, n_head=12, vocab_size=50257)
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def plan(spec: str, config: dict[str, Any] = LLAMA, **others: str) -> dict[str, Any]:
    """A grid for every linear of two blocks; others: leaf name -> another grid, "none" for none."""
    moe = config["model_type"] == "mixtral"
    mlp = [f"block_sparse_moe.experts.{e}.{w}" for e in range(4) for w in ("w1", "w2", "w3")] if moe else list(MLP)
    grids = {}
    for i in range(2):
        for linear in [*LINEARS, *mlp]:
            chosen = others.get(linear.rpartition(".")[2], spec)
            if chosen != "none":
                grids[f"model.layers.{i}.{linear}.weight"] = parse_grid(chosen)
    return grids


def check(target: str, container: str, grids: dict[str, Any], config: dict[str, Any] = LLAMA, parallel: int = 1) -> str:
    return "\n".join(problems(target, container, grids, arch_of(config), config, parallel))


@pytest.mark.parametrize(
    ("target", "container", "spec"),
    [
        ("vllm", "gptq", "int4-g128-sym"),
        ("vllm", "gptq", "int3-g128"),
        ("vllm", "awq", "int4-g128"),
        ("vllm", "compressed-tensors", "int4-g64"),
        ("vllm", "compressed-tensors", "int8-channel-sym"),
        ("sglang", "compressed-tensors", "int4-g128-sym"),
        ("transformers", "compressed-tensors", "int4-g64-sym"),
        ("transformers", "gptq", "int2-g64"),
        ("llama.cpp", "gguf", "q4_0"),
    ],
)
def test_sound_plans(target: str, container: str, spec: str) -> None:
    assert check(target, container, plan(spec)) == ""


def test_containers() -> None:
    assert check("llama.cpp", "gptq", plan("int4-g64")) == "llama.cpp container: reads gguf, not gptq"
    with pytest.raises(UsageError, match='unknown target "mlx"'):
        check("mlx", "gptq", {})


@pytest.mark.parametrize("container", ["gptq", "compressed-tensors"])
@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_fused_groups_share_a_grid(target: str, container: str) -> None:
    text = check(target, container, plan("int4-g64-sym", v_proj="int8-g64-sym"))
    assert f"{target} fused: model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj" in text
    assert "must share a grid, not int4-g64-sym, int4-g64-sym, int8-g64-sym" in text
    assert "not int4-g64-sym, float" in check(target, container, plan("int4-g64-sym", up_proj="none"))
    assert check(target, container, plan("int4-g64-sym", down_proj="int8-g64-sym", o_proj="none")) == ""
    assert check("transformers", container, plan("int4-g64-sym", v_proj="int8-g64-sym")) == ""


def test_the_containers_own_rules() -> None:
    text = check("vllm", "compressed-tensors", plan("int3-g64"))
    assert (
        "vllm storable: compressed-tensors cannot store int3-g64 (model.layers.0.self_attn.q_proj and 13 more)" in text
    )
    assert "AWQ stores one grid per model" in check("vllm", "awq", plan("int4-g64", down_proj="int4-g32"))
    grids = {"transformer.h.0.attn.c_attn.weight": parse_grid("int4-g64-sym")}
    assert "know no Conv1D" in check("vllm", "compressed-tensors", grids, GPT2)
    assert check("vllm", "gptq", grids, GPT2) == ""


def test_tensor_parallelism() -> None:
    """down_proj has 2816 = 22 * 128 inputs: halves hold whole groups of 128, quarters do not."""
    grids = plan("int4-g128-sym")
    assert check("vllm", "gptq", grids, parallel=2) == ""
    text = check("vllm", "gptq", grids, parallel=4)
    assert "vllm packing: in_features per device must be a multiple of the group size of int4-g128-sym" in text
    assert "model.layers.0.mlp.down_proj and 1 more" in text
    assert check("vllm", "gptq", plan("int4-g64-sym"), parallel=4) == ""
    assert "16 attention heads are not divisible by tensor_parallel 3" in check("vllm", "gptq", grids, parallel=3)


def test_shapes_of_kernels() -> None:
    narrow = LLAMA | {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    text = check("vllm", "compressed-tensors", plan("int4-g64"), narrow)
    assert "Marlin needs in_features % 128 = 0" in text and "q_proj" in text
    assert check("vllm", "compressed-tensors", plan("int4-g64-sym"), narrow) == ""  # another kernel takes these
    odd = LLAMA | {"intermediate_size": 2812}
    assert "do not fill 32-bit words" in check("vllm", "gptq", plan("int4-g64-sym", down_proj="none"), odd)
    ragged = check("vllm", "gptq", plan("int4-g128-sym"), narrow)
    assert "multiple of the group size of int4-g128-sym" in ragged
    assert check("transformers", "gptq", plan("int4-g128-sym"), narrow) == ""
    assert "Marlin knows groups of 32, 64, 128" in check("vllm", "compressed-tensors", plan("int4-g256-sym"))
    assert "no kernel for 8 bits with zero points" in check("vllm", "compressed-tensors", plan("int8-g64"))


def test_experts() -> None:
    assert check("vllm", "gptq", plan("int4-g64-sym", MIXTRAL), MIXTRAL) == ""
    text = check("vllm", "gptq", plan("int3-g64", MIXTRAL), MIXTRAL)
    assert "vllm experts: int3-g64 is for dense models only" in text
    text = check("vllm", "gptq", plan("int4-g64-sym", MIXTRAL, w2="int8-g64-sym"), MIXTRAL)
    assert "experts of model.layers.0.block_sparse_moe must share one grid, not int4-g64-sym, int8-g64-sym" in text
    text = check("vllm", "compressed-tensors", plan("int4-g64", MIXTRAL), MIXTRAL)
    assert "zero points, which compressed-tensors experts may not have" in text


def test_float16_overflow() -> None:
    assert "runs in a float16 kernel, which gemma3 overflows" in check("vllm", "gptq", plan("int4-g64", GEMMA), GEMMA)
    assert check("vllm", "gptq", plan("int4-g64-sym", GEMMA), GEMMA) == ""


def test_transformers() -> None:
    text = check("transformers", "compressed-tensors", plan("int4-g64"))
    assert "CompressedTensorsConfig(dequantize=True)" in text
    text = check("transformers", "compressed-tensors", plan("int4-g64", v_proj="int8-g64"))
    assert "asymmetric weights cannot be loaded in mixtures" in text
    assert "gptqmodel has no kernel for the group size of int4-g48" in check("transformers", "gptq", plan("int4-g48"))
