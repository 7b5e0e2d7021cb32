"""Hugging Face config <-> GGUF hyperparameters, with the keys that llama.cpp's converter writes.

Deliberate differences from that converter: a Mistral's sliding window is kept (the converter drops it; engines ignore
the key for llama), vocabulary padding is kept for Gemma, and models whose config asks for something llama.cpp would
silently compute otherwise are refused.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import gguf
import torch
from torch import Tensor

from formats.arch import ARCHITECTURES, Arch
from formats.containers.gguf_file import Field, TensorInfo
from formats.errors import DataError

_SIZES = (  # GGUF key below the architecture's name, Hugging Face attribute
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
)
_OPTIONAL = (
    ("attention.key_length", "head_dim"),
    ("attention.sliding_window", "sliding_window"),
    ("expert_count", "num_local_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("final_logit_softcapping", "final_logit_softcapping"),
)
_GPT2_SIZES = (
    ("block_count", "n_layer"),
    ("context_length", "n_positions"),
    ("embedding_length", "n_embd"),
    ("feed_forward_length", "n_inner"),
    ("attention.head_count", "n_head"),
    ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
)
_YARN = (
    ("yarn_ext_factor", "extrapolation_factor"),
    ("yarn_attn_factor", "attention_factor"),
    ("yarn_beta_fast", "beta_fast"),
    ("yarn_beta_slow", "beta_slow"),
)
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
GEMMA_PATTERN = 6  # llama.cpp knows only this: every sixth layer of Gemma 3 attends to everything
GEMMA_27B_LAYERS = 62  # the one Gemma 3 whose attention scale is not from the head width
SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # Hugging Face's and GGUF's names


def hf_config(config: Mapping[str, Any]) -> Any:
    """transformers' config object: defaults filled in, rotary parameters in today's form."""
    from transformers import AutoConfig

    kept = {k: v for k, v in config.items() if k != "quantization_config"}
    return AutoConfig.for_model(**deepcopy(kept))  # it writes into nested dicts


def add_hyperparameters(header: gguf.GGUFWriter, config: Mapping[str, Any], arch: Arch) -> None:
    """Write a config's `arch.*` keys. DataError for settings that GGUF engines would ignore."""
    hf = hf_config(config)
    _refuse_inexpressible(hf, arch)

    def add(key: str, value: float | str) -> None:
        kinds = {int: header.add_uint32, float: header.add_float32, str: header.add_string}
        kinds[type(value)](f"{header.arch}.{key}", value)  # type: ignore[operator]

    for key, attribute in _GPT2_SIZES if arch.name == "gpt2" else _SIZES:
        value = getattr(hf, attribute)
        add(key, 4 * hf.n_embd if value is None else value)
    for key, attribute in _OPTIONAL:
        value = getattr(hf, attribute, None)
        if value is not None:
            add(key, value)
            if attribute == "head_dim":
                add("attention.value_length", value)
    if header.arch == "llama":
        add("vocab_size", hf.vocab_size)
        add("rope.dimension_count", head_dim(hf))
    if arch.name != "gpt2":
        _add_rope(add, hf)


def _add_rope(add: Any, hf: Any) -> None:
    rope = hf.rope_parameters.get("full_attention", hf.rope_parameters)
    add("rope.freq_base", float(rope["rope_theta"]))
    if "sliding_attention" in hf.rope_parameters:
        add("rope.freq_base_swa", float(hf.rope_parameters["sliding_attention"]["rope_theta"]))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        add("rope.scaling.type", kind)
        add("rope.scaling.factor", float(rope["factor"]))
    if kind == "yarn":
        add("rope.scaling.original_context_length", int(rope["original_max_position_embeddings"]))
        for key, name in _YARN:
            if rope.get(name) is not None:
                add(f"rope.scaling.{key}", float(rope[name]))


def head_dim(hf: Any) -> int:
    """Width of an attention head."""
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def _refuse_inexpressible(hf: Any, arch: Arch) -> None:
    """What llama.cpp hard-codes for a family must be what the config says."""
    layers = range(hf.num_hidden_layers)
    wrong: dict[str, bool] = {}
    if arch.name == "gemma3":
        kinds = ["full_attention" if (i + 1) % GEMMA_PATTERN == 0 else "sliding_attention" for i in layers]
        scalar = head_dim(hf)
        if hf.num_hidden_layers == GEMMA_27B_LAYERS:
            scalar = hf.hidden_size // hf.num_attention_heads
        wrong = {
            "layer_types": hf.layer_types != kinds,
            "query_pre_attn_scalar": hf.query_pre_attn_scalar != scalar,
            "attn_logit_softcapping": hf.attn_logit_softcapping is not None,
        }
    elif arch.name == "gpt2":
        wrong = {
            "scale_attn_by_inverse_layer_idx": hf.scale_attn_by_inverse_layer_idx,
            "scale_attn_weights": not hf.scale_attn_weights,
        }
    elif arch.name == "qwen3_moe":
        wrong = {
            "norm_topk_prob": not hf.norm_topk_prob,
            "mlp_only_layers": bool(hf.mlp_only_layers),
            "decoder_sparse_step": hf.decoder_sparse_step != 1,
        }
    if arch.name != "gpt2":
        rope = hf.rope_parameters.get("full_attention", hf.rope_parameters)
        wrong["rope_type"] = rope.get("rope_type", "default") not in ("default", "linear", "yarn", "llama3")
        expected = "gelu_pytorch_tanh" if arch.name == "gemma3" else "silu"
        wrong["hidden_act"] = (getattr(hf, "hidden_activation", None) or hf.hidden_act) != expected
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise DataError(
                f"llama.cpp would not honour {key}={getattr(hf, key, None)!r} of this {arch.name} model",
                where="config.json",
                how_to_fix="write another format than gguf",
            )


def rope_factors(config: Mapping[str, Any], arch: Arch) -> Tensor | None:
    """Llama 3's frequency divisors, float32 [head_dim / 2] (GGUF's rope_freqs.weight); None for other models."""
    if arch.gguf_name != "llama":
        return None
    hf = hf_config(config)
    rope = hf.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    return _llama3_factors(
        head_dim(hf),
        rope["rope_theta"],
        rope["factor"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )


def _wavelengths(dim: int, theta: float) -> Tensor:
    return 2 * torch.pi * theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _llama3_factors(dim: int, theta: float, factor: float, low: float, high: float, context: int) -> Tensor:
    """1 for short wavelengths, `factor` for long ones, a blend of the frequencies in between."""
    smooth = ((context / _wavelengths(dim, theta) - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()


def _fit_llama3(factors: Tensor, theta: float) -> dict[str, Any]:
    """The inverse of `_llama3_factors`. Within the blend `smooth` is linear in the frequency: a line through it gives
    context / (high - low) and low / (high - low); one of the three is free, and Meta's models set low to 1."""
    dim, factor = 2 * len(factors), round(float(factors.max()), 4)
    guess = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    smooth = ((1 / factors.double() - 1 / factor) / (1 - 1 / factor)) if factor > 1 else factors.double()
    blend = (smooth > 1e-4) & (smooth < 1 - 1e-4)
    if blend.sum() >= 2:
        x = 1 / _wavelengths(dim, theta)[blend]
        line = torch.linalg.lstsq(torch.stack([x, torch.ones_like(x)], 1), smooth[blend, None]).solution
        slope, low = float(line[0]), -float(line[1])
        guess["high_freq_factor"] = round((1 + low) / low, 3)
        guess["original_max_position_embeddings"] = round(slope / low)
    found = _llama3_factors(
        dim,
        theta,
        factor,
        guess["low_freq_factor"],
        guess["high_freq_factor"],
        int(guess["original_max_position_embeddings"]),
    )
    if not torch.allclose(found, factors, rtol=1e-3):
        raise DataError("rope_freqs.weight follows no Llama 3 rule", how_to_fix="start from the original checkpoint")
    return {"rope_type": "llama3", "factor": factor, **guess}


class Hyperparameters:
    """Checked access to the `arch.*` fields of a file."""

    def __init__(self, fields: Mapping[str, Field], where: str) -> None:
        self.fields, self.where = fields, where
        architecture = fields.get("general.architecture")
        if architecture is None or not isinstance(architecture.value, str):
            raise DataError("the file names no architecture", where=where)
        self.architecture: str = architecture.value

    def get(self, key: str, default: Any = None) -> Any:
        """A number or string of the architecture; float32 values come back as they were typed (1e-05)."""
        field = self.fields.get(f"{self.architecture}.{key}")
        if field is None:
            return default
        if isinstance(field.value, list):
            raise DataError(f'"{key}" differs from layer to layer, which is not supported', where=self.where)
        return float(f"{field.value:.7g}") if isinstance(field.value, float) else field.value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 31:
            raise DataError(f'"{self.architecture}.{key}" is {value!r}', where=self.where)
        return value

    def arch(self) -> Arch:
        """The family: Mixtral calls itself llama, with experts."""
        experts = bool(self.get("expert_count"))
        for name in ARCHITECTURES:
            arch: Arch = ARCHITECTURES[name]
            if arch.gguf_name == self.architecture and (arch.experts is not None) == experts:
                return arch
        known = sorted({ARCHITECTURES[name].gguf_name for name in ARCHITECTURES})
        raise DataError(
            f'architecture "{self.architecture}" is not supported',
            where=self.where,
            how_to_fix=f"supported: {', '.join(known)}",
        )


def read_config(
    parameters: Hyperparameters, arch: Arch, tensors: Mapping[str, TensorInfo], factors: Tensor | None
) -> dict[str, Any]:
    """The Hugging Face config of a GGUF model. factors: the file's rope_freqs.weight."""
    p, name = parameters, arch.model_types[0]
    if name == "llama" and p.get("attention.sliding_window"):
        name = "mistral"
    config: dict[str, Any] = {"architectures": [_CLASSES[name]], "model_type": name}
    for key, attribute in _GPT2_SIZES if arch.name == "gpt2" else _SIZES:
        default = p.get("attention.head_count") if key == "attention.head_count_kv" else None
        config[attribute] = p.get(key, default) if default else p.need(key)
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise DataError("token_embd.weight is missing", where=p.where)
    blocks = {int(m[1]) for tensor in tensors if (m := re.match(r"blk\.(\d+)\.", tensor))}
    count = p.need("block_count")
    if len(blocks) != count or max(blocks) != count - 1 or embedding.shape[-1] != p.need("embedding_length"):
        raise DataError("the tensors do not match block_count and embedding_length", where=p.where)
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    for key, gguf_name in SPECIAL.items():
        field = p.fields.get(f"tokenizer.ggml.{gguf_name}_token_id")
        if field is not None and key != "unk":
            config[f"{key}_token_id"] = field.value
    if arch.name != "gpt2":
        _read_attention(config, p, arch, tensors, factors)
    return config


def _read_attention(
    config: dict[str, Any], p: Hyperparameters, arch: Arch, tensors: Mapping[str, TensorInfo], factors: Tensor | None
) -> None:
    for key, attribute in _OPTIONAL:
        if (value := p.get(key)) is not None:
            config[attribute] = value
    config.setdefault("head_dim", p.get("rope.dimension_count", config["hidden_size"] // config["num_attention_heads"]))
    config["rope_theta"] = float(p.get("rope.freq_base", 10000.0))
    kind = p.get("rope.scaling.type", "none")
    if factors is not None:
        config["rope_scaling"] = _fit_llama3(factors, config["rope_theta"])
    elif kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": p.need("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = p.need("rope.scaling.original_context_length")
            scaling |= {n: v for k, n in _YARN if (v := p.get(f"rope.scaling.{k}")) is not None}
        config["rope_scaling"] = scaling
    elif kind != "none":
        raise DataError(f'rotary scaling "{kind}" is not supported', where=p.where)
    if arch.name in ("llama", "mixtral", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if arch.name == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if arch.name == "gemma3":
        wide = config["num_hidden_layers"] == GEMMA_27B_LAYERS
        width = config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
        config |= {"rope_local_base_freq": float(p.get("rope.freq_base_swa", 10000.0)), "query_pre_attn_scalar": width}
    if arch.name == "qwen3_moe":
        config |= {"num_experts": config.pop("num_local_experts"), "norm_topk_prob": True}
