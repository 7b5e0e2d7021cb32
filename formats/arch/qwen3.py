"""Qwen 3 (dense): Llama's layout with a norm on each head's queries and keys."""

from dataclasses import replace

from formats.arch.llama import ARCH as LLAMA

ARCH = replace(
    LLAMA,
    name="qwen3",
    model_types=("qwen3",),
    gguf_name="qwen3",
    tensor_names=LLAMA.tensor_names
    | {
        "model.layers.{i}.self_attn.q_norm": "blk.{i}.attn_q_norm",
        "model.layers.{i}.self_attn.k_norm": "blk.{i}.attn_k_norm",
    },
    rotary_permuted=(),
)
