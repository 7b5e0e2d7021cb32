"""Model families as data, against transformers' modules and gguf-py's tensor names."""

import re
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from conftest import FAMILIES
from safetensors import safe_open

from formats.arch import ARCHITECTURES, MODEL_TYPES, arch_of
from formats.containers.gguf import gguf_name, hf_name
from formats.errors import DataError


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gguf_names_are_llama_cpps(name: str) -> None:
    arch = ARCHITECTURES[name]
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch.gguf_name)
    names = gguf.get_tensor_name_map(kind, 3)
    for hf, ours in arch.tensor_names.items():
        merged = hf.format(i=2, e="E").replace(".E.", ".")  # the converter's name for stacked experts
        if name == "mixtral":
            merged = merged.replace("model.layers.2.block_sparse_moe.experts", "layers.2.feed_forward.experts")
        assert names.get_name(merged) == ours.format(i=2), hf


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_tensor_of_a_checkpoint_has_a_place_and_a_way_back(
    model_type: str, tiny_model: Callable[..., Path]
) -> None:
    arch = ARCHITECTURES[MODEL_TYPES[model_type]]
    with safe_open(tiny_model(model_type) / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    for name in stored:
        ours, expert = gguf_name(arch, name)
        back = hf_name(arch, ours)
        assert back is not None and back.replace("{e}", str(expert)) == name
    linears = {f"{linear}.weight" for i in range(2) for linear in arch.linears(i, experts=4)}
    assert linears <= stored
    matrices = {n for n in stored if re.search(r"\.\d+\..*(proj|w[123]|c_attn|c_proj|c_fc)\.weight$", n)}
    assert linears == matrices
    for group in (*arch.fused, *(targets for _, targets in arch.scale_pairs)):
        assert {f"{arch.block.format(i=0)}.{m.format(e=0)}.weight" for m in group} <= stored


def test_unknown_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(DataError, match="qwen3_moe"):
        arch_of({"model_type": "mamba"})
    assert arch_of({"model_type": "mistral"}).name == "llama"


def test_a_tensor_without_a_place_is_named() -> None:
    with pytest.raises(DataError, match="rotary_emb"):
        gguf_name(ARCHITECTURES["llama"], "model.layers.0.self_attn.rotary_emb.inv_freq")
