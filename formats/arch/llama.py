"""Llama 2 and 3, SmolLM2, Mistral."""

from formats.arch import Arch

ARCH = Arch(
    name="llama",
    model_types=("llama", "mistral"),
    gguf_name="llama",
    block="model.layers.{i}",
    stages=(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    ),
    fused=(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    ),
    scale_pairs=(
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("self_attn.v_proj", ("self_attn.o_proj",)),
        ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ("mlp.up_proj", ("mlp.down_proj",)),
    ),
    tensor_names={
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.{i}.input_layernorm": "blk.{i}.attn_norm",
        "model.layers.{i}.self_attn.q_proj": "blk.{i}.attn_q",
        "model.layers.{i}.self_attn.k_proj": "blk.{i}.attn_k",
        "model.layers.{i}.self_attn.v_proj": "blk.{i}.attn_v",
        "model.layers.{i}.self_attn.o_proj": "blk.{i}.attn_output",
        "model.layers.{i}.post_attention_layernorm": "blk.{i}.ffn_norm",
        "model.layers.{i}.mlp.gate_proj": "blk.{i}.ffn_gate",
        "model.layers.{i}.mlp.up_proj": "blk.{i}.ffn_up",
        "model.layers.{i}.mlp.down_proj": "blk.{i}.ffn_down",
    },
    rotary_permuted=("self_attn.q_proj", "self_attn.k_proj"),
)
