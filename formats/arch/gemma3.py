"""Gemma 3 (text): norms before and after each half of a block, stored as an offset from 1."""

from dataclasses import replace

from formats.arch.qwen3 import ARCH as QWEN3

ARCH = replace(
    QWEN3,
    name="gemma3",
    model_types=("gemma3_text",),
    gguf_name="gemma3",
    scale_pairs=(
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("self_attn.v_proj", ("self_attn.o_proj",)),
        ("pre_feedforward_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ("mlp.up_proj", ("mlp.down_proj",)),
    ),
    tensor_names=QWEN3.tensor_names
    | {
        "model.layers.{i}.post_attention_layernorm": "blk.{i}.post_attention_norm",
        "model.layers.{i}.pre_feedforward_layernorm": "blk.{i}.ffn_norm",
        "model.layers.{i}.post_feedforward_layernorm": "blk.{i}.post_ffw_norm",
    },
    norm_offset=1.0,
    extra={"float16_overflows": True},  # activations reach beyond 65504
)
