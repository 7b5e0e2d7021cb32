"""Reads model files by their published layouts, sharing no code with the product: gguf-py and numpy only."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

Named = Iterator[tuple[str, torch.Tensor]]

GGUF_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_NORMS = {"llama": {"ffn_norm": "post_attention_layernorm"}}
GGUF_NORMS["qwen2"] = GGUF_NORMS["qwen3"] = GGUF_NORMS["llama"]
GGUF_NORMS["gemma3"] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def decode(path: Path, config: Any) -> Named:
    """All tensors of a model file or directory in float32, under Hugging Face names. config: the reference's."""
    return decode_gguf(path, config) if path.is_file() else decode_directory(path)


def stored_bytes(path: Path) -> int:
    """Bytes of tensor data, without headers, tokenizers and padding."""
    if path.is_file():
        return sum(int(t.n_bytes) for t in gguf.GGUFReader(path).tensors)
    total = 0
    for file in sorted(path.glob("*.safetensors")):
        with open(file, "rb") as raw:
            header = json.loads(raw.read(int.from_bytes(raw.read(8), "little")))
        total += sum(t["data_offsets"][1] - t["data_offsets"][0] for n, t in header.items() if n != "__metadata__")
    return total


def decode_gguf(path: Path, config: Any) -> Named:
    reader = gguf.GGUFReader(path)
    arch = str(reader.fields["general.architecture"].contents())
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        w = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)
        *block, stem, kind = tensor.name.split(".")
        if block[:1] == ["blk"]:
            name = f"model.layers.{block[1]}.{(GGUF_TENSORS | GGUF_NORMS[arch])[stem]}.{kind}"
        elif tensor.name == "rope_freqs.weight":
            continue
        else:
            name = f"{GGUF_TOP[stem]}.{kind}"
        if arch == "llama" and stem in ("attn_q", "attn_k"):  # interleaved rotary pairs -> two halves
            heads = config.num_attention_heads if stem == "attn_q" else config.num_key_value_heads
            w = w.reshape(heads, w.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)
        if arch == "gemma3" and stem.endswith("norm"):
            w = w - 1
        yield name, torch.from_numpy(np.ascontiguousarray(w))


def decode_directory(path: Path) -> Named:
    quantization = json.loads((path / "config.json").read_text()).get("quantization_config", {})
    files = {}
    for file in sorted(path.glob("*.safetensors")):
        handle = safe_open(file, "pt")
        files.update(dict.fromkeys(handle.keys(), handle))
    method = quantization.get("quant_method")
    layer, suffixes = {
        None: (None, ()),
        "gptq": (gptq_matrix, ("qweight", "qzeros", "scales", "g_idx")),
        "awq": (awq_matrix, ("qweight", "qzeros", "scales")),
        "compressed-tensors": (
            compressed_matrix,
            ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight"),
        ),
    }[method]
    modules: dict[str, dict[str, np.ndarray]] = {}
    for name, handle in files.items():
        module, _, kind = name.rpartition(".")
        quantised = layer is not None and (f"{module}.{suffixes[0]}" in files or f"{module}.weight_scale" in files)
        if quantised and kind in suffixes:
            tensor = handle.get_tensor(name)
            numeric = tensor.float() if tensor.is_floating_point() else tensor
            modules.setdefault(module, {})[kind] = numeric.numpy()
        elif not kind.endswith(("_scale", "_zero_point")):
            yield name, handle.get_tensor(name).float()
    for module, parts in modules.items():
        w = layer(parts, quantization)
        yield f"{module}.weight", torch.from_numpy(np.ascontiguousarray(w, dtype=np.float32))


def unpack_stream(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """int32 [n_words, m] -> [count, m]: codes of `bits` bits, one after another along dim 0, lowest bit first."""
    stream = (words.view(np.uint32)[:, None, :] >> np.arange(32, dtype=np.uint32)[None, :, None]) & 1
    stream = stream.reshape(-1, words.shape[1])[: count * bits].reshape(count, bits, -1)
    return (stream << np.arange(bits, dtype=np.uint32)[None, :, None]).sum(1).astype(np.int64)


def gptq_matrix(parts: dict[str, np.ndarray], quantization: dict[str, Any]) -> np.ndarray:
    bits = quantization["bits"]
    groups, out = parts["scales"].shape
    g_idx = parts["g_idx"]
    codes = unpack_stream(parts["qweight"], bits, len(g_idx))  # [in, out]
    zeros = unpack_stream(np.ascontiguousarray(parts["qzeros"].T), bits, out).T  # [groups, out]
    if quantization.get("checkpoint_format", "gptq") == "gptq":  # version 1 stores zero - 1
        zeros = (zeros + 1) & ((1 << bits) - 1)
    return (parts["scales"][g_idx] * (codes - zeros[g_idx])).T


def awq_matrix(parts: dict[str, np.ndarray], quantization: dict[str, Any]) -> np.ndarray:
    order = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # where column j of eight lies in its word

    def unpack(words: np.ndarray) -> np.ndarray:
        nibbles = (words.view(np.uint32)[:, :, None] >> (4 * order.astype(np.uint32))) & 15
        return nibbles.reshape(words.shape[0], -1).astype(np.int64)

    group = quantization.get("group_size", quantization.get("q_group_size"))
    codes, zeros = unpack(parts["qweight"]), unpack(parts["qzeros"])
    rows = np.arange(codes.shape[0]) // group
    return (parts["scales"][rows] * (codes - zeros[rows])).T


def compressed_matrix(parts: dict[str, np.ndarray], quantization: dict[str, Any]) -> np.ndarray:
    scale = parts["weight_scale"]
    scale = scale.reshape(len(scale), -1)
    if "weight" in parts:  # int-quantized: plain int8
        codes = parts["weight"].astype(np.int64)
        zeros = parts.get("weight_zero_point", np.zeros_like(scale)).reshape(scale.shape)
    else:
        out, n = (int(x) for x in parts["weight_shape"])
        bits = next(b for b in (4, 8) if -(-n * b // 32) == parts["weight_packed"].shape[1])
        codes = unpack_stream(np.ascontiguousarray(parts["weight_packed"].T), bits, n).T - (1 << bits - 1)
        zeros = np.zeros(scale.shape)
        if "weight_zero_point" in parts:
            zeros = unpack_stream(parts["weight_zero_point"], bits, out) - (1 << bits - 1)
    if "weight_g_idx" in parts:
        column = parts["weight_g_idx"]
    else:
        column = np.arange(codes.shape[1]) // -(-codes.shape[1] // scale.shape[1])
    return scale[:, column] * (codes - zeros[:, column])
