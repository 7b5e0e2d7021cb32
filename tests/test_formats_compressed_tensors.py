"""compressed-tensors directories, judged by the compressed-tensors library and by transformers loading them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import decoded, logits, read_back, write_quantised
from safetensors.torch import load_file, save_file

from formats.containers import CONTAINERS, open_checkpoint
from formats.errors import DataError, UsageError
from formats.grids import parse_grid

compressed_tensors = pytest.importorskip("compressed_tensors")
LAYER = "model.layers.0.self_attn.q_proj"


def config_of(out: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((out / "config.json").read_text())
    return config


def mixed(symmetric: str) -> Callable[[str], str | None]:
    def choose(name: str) -> str | None:
        if "layers.0.mlp.down_proj" in name:
            return None
        return f"int8-channel{symmetric}" if "layers.1.self_attn" in name else f"int4-g32{symmetric}"

    return choose


@pytest.mark.parametrize(
    "spec", ["int4-g32", "int4-g64-sym", "int4-channel", "int8-g32", "int8-channel-sym", "mixed", "mixed-sym"]
)
def test_the_library_decompresses_to_our_values(tiny_model: Callable[..., Path], tmp_path: Path, spec: str) -> None:
    """Each module through the library's own config matching and decompressor, in float32."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_targets

    choose = mixed(spec.removeprefix("mixed")) if spec.startswith("mixed") else spec
    with open_checkpoint(tiny_model("llama", layers=3)) as source:
        writes = write_quantised(source, tmp_path, "compressed-tensors", choose)
    read_back(tmp_path, writes)
    stored = load_file(tmp_path / "model.safetensors")
    config = QuantizationConfig.model_validate(config_of(tmp_path)["quantization_config"])
    targets = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}
    for name, q in writes.items():
        module = name.removesuffix(".weight")
        state = {s.removeprefix(f"{module}."): t for s, t in stored.items() if s.startswith(f"{module}.")}
        assert state["weight_scale"].dtype == torch.float16 and state["weight_shape"].tolist() == list(q.shape)
        state["weight_scale"] = state["weight_scale"].float()
        matched = match_targets(module, torch.nn.Linear(1, 1), targets)
        scheme = targets[matched[0]]
        decompressor = BaseCompressor.get_value_from_registry(config.format)
        assert torch.equal(decompressor.decompress(state, scheme)["weight"], q.dequantize())
    ignored = {"lm_head"} | ({"model.layers.0.mlp.down_proj"} if spec.startswith("mixed") else set())
    assert set(config.ignore or []) == ignored


def in_transformers(directory: Path, dequantize: bool = False) -> torch.Tensor:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options).eval()
    for parameter in model.parameters():
        if parameter.dtype == torch.float16:  # experts are left in it, which would round the activations, too
            parameter.data = parameter.data.float()
    tokens = torch.arange(3, 51).reshape(2, 24) * 7 % model.config.vocab_size
    with torch.no_grad():
        return model(tokens).logits  # type: ignore[no-any-return]


def report(what: str, a: torch.Tensor, b: torch.Tensor) -> float:
    difference = float((a - b).abs().max())
    print(f"{what}: max abs difference of logits {difference:.2e}")
    return difference


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("spec", ["int4-g32-sym", "mixed-sym"])
def test_transformers_loads_symmetric_models(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, spec: str
) -> None:
    choose = mixed("-sym") if spec == "mixed-sym" else spec
    with open_checkpoint(tiny_model(family)) as source:
        write_quantised(source, tmp_path / "q", "compressed-tensors", choose, shard_size=60_000)
    reference = logits(decoded(tmp_path / "q", tmp_path / "d"))
    assert report(f"{family} {spec}", in_transformers(tmp_path / "q"), reference) < 1e-5


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_transformers_loads_experts(tiny_model: Callable[..., Path], tmp_path: Path, family: str) -> None:
    """It multiplies their codes and scales in the scales' own dtype: weights are rounded to float16."""
    with open_checkpoint(tiny_model(family)) as source:
        write_quantised(source, tmp_path / "q", "compressed-tensors", "int4-g32-sym")
    reference = logits(decoded(tmp_path / "q", tmp_path / "d", rounded=".experts."))
    assert report(f"{family} int4-g32-sym", in_transformers(tmp_path / "q"), reference) < 1e-5


def test_transformers_loads_asymmetric_models_dequantised(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Release 0.20.1 of the library does not expect packed zero points unless told to dequantise on load, where it
    rounds weights to float16. (vLLM reads them as they are.)"""
    with open_checkpoint(tiny_model("llama")) as source:
        write_quantised(source, tmp_path / "q", "compressed-tensors", "int4-g32")
    reference = logits(decoded(tmp_path / "q", tmp_path / "d", rounded=""))
    assert report("asymmetric", in_transformers(tmp_path / "q", dequantize=True), reference) < 1e-5


def test_int8_weights_and_activations(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """int-quantized: the weights are ours; activations are rounded per token, which moves the logits."""
    options = {"activations": "int8"}
    with open_checkpoint(tiny_model("llama")) as source:
        writes = write_quantised(source, tmp_path / "q", "compressed-tensors", "int8-channel-sym", **options)
        for spec in ("int8-g32-sym", "int4-channel-sym", "int8-channel"):
            with pytest.raises(UsageError, match=f"int8-channel-sym weights, not with {spec}"):
                write_quantised(source, tmp_path / "x", "compressed-tensors", spec, **options)
        with pytest.raises(UsageError, match='unknown activations "fp8"'):
            write_quantised(source, tmp_path / "x", "compressed-tensors", "int8-channel-sym", activations="fp8")
    read_back(tmp_path / "q", writes)
    quantization = config_of(tmp_path / "q")["quantization_config"]
    group = quantization["config_groups"]["group_0"]
    assert quantization["format"] == "int-quantized"
    assert group["input_activations"]["dynamic"] is True and group["input_activations"]["strategy"] == "token"
    stored = load_file(tmp_path / "q/model.safetensors")
    assert stored[f"{LAYER}.weight"].dtype == torch.int8 and stored[f"{LAYER}.weight_scale"].shape == (64, 1)
    q = writes[f"{LAYER}.weight"]
    assert torch.equal(stored[f"{LAYER}.weight"].float() * stored[f"{LAYER}.weight_scale"].float(), q.dequantize())
    reference = logits(decoded(tmp_path / "q", tmp_path / "d"))
    assert report("int8 activations", in_transformers(tmp_path / "q"), reference) < 0.2


def test_groups_that_do_not_divide(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    store = CONTAINERS["compressed-tensors"]()
    assert store.substitute("x", (576, 576), parse_grid("int4-g128")) == parse_grid("int4-g64")
    assert store.substitute("x", (64, 192), parse_grid("int8-g128-sym")) == parse_grid("int8-g64-sym")
    with pytest.raises(UsageError, match="groups of 32 do not divide 100"):
        store.substitute("x", (64, 100), parse_grid("int4-g32"))
    with pytest.raises(UsageError, match="cannot store int3-g32"):
        store.substitute("x", (64, 64), parse_grid("int3-g32"))
    with open_checkpoint(tiny_model("llama", hidden=192, layers=1, intermediate_size=76)) as source:
        writes = write_quantised(source, tmp_path, "compressed-tensors", lambda n: None if "down" in n else "int4-g128")
    read_back(tmp_path, writes)  # up_proj has 76 outputs: its zero points do not fill their last word
    with open_checkpoint(tiny_model("gpt2")) as source, pytest.raises(UsageError, match="know no Conv1D"):
        store.open_writer(tmp_path, source, {}, {})
    with open_checkpoint(tiny_model("llama")) as source, pytest.raises(UsageError, match="cannot store a column order"):
        write_quantised(source, tmp_path / "x", "compressed-tensors", "int4-g32", act_order=True)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "nvfp4-pack-quantized"},
        {"config_groups": {}},
        {"config_groups": {"group_0": {"targets": ["re:(("], "weights": {}}}},
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": None}}},
        {"config_groups": {"group_0": {"targets": 3}}},
        {"config_groups": {"g": {"targets": ["Linear"], "weights": {"type": "float", "strategy": "channel"}}}},
        {"config_groups": {"g": {"targets": ["Linear"], "weights": {"strategy": "group", "num_bits": 1 << 60}}}},
    ],
)
def test_nonsense_configs(tiny_model: Callable[..., Path], tmp_path: Path, change: dict[str, Any]) -> None:
    with open_checkpoint(tiny_model("llama")) as source:
        write_quantised(source, tmp_path, "compressed-tensors", "int4-g32")
    config = config_of(tmp_path)
    config["quantization_config"].update(change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("shape", [[1 << 40, 1 << 40], [-1, 64], [64, 0], [64, 56], [1 << 62, 64]])
def test_absurd_shapes(tiny_model: Callable[..., Path], tmp_path: Path, shape: list[int]) -> None:
    with open_checkpoint(tiny_model("llama")) as source:
        write_quantised(source, tmp_path, "compressed-tensors", "int4-g32-sym")
    t = load_file(tmp_path / "model.safetensors")
    t[f"{LAYER}.weight_shape"] = torch.tensor(shape)
    save_file(t, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError):
        open_checkpoint(tmp_path).read(f"{LAYER}.weight")
