"""GPT-2: learned positions, layer norms with biases, q/k/v in one matrix, linears stored transposed (Conv1D)."""

from formats.arch import Arch

ARCH = Arch(
    name="gpt2",
    model_types=("gpt2",),
    gguf_name="gpt2",
    block="transformer.h.{i}",
    stages=(("attn.c_attn",), ("attn.c_proj",), ("mlp.c_fc",), ("mlp.c_proj",)),
    fused=(),
    scale_pairs=(("ln_1", ("attn.c_attn",)), ("ln_2", ("mlp.c_fc",))),
    tensor_names={
        "transformer.wte": "token_embd",
        "transformer.wpe": "position_embd",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
        "transformer.h.{i}.ln_1": "blk.{i}.attn_norm",
        "transformer.h.{i}.attn.c_attn": "blk.{i}.attn_qkv",
        "transformer.h.{i}.attn.c_proj": "blk.{i}.attn_output",
        "transformer.h.{i}.ln_2": "blk.{i}.ffn_norm",
        "transformer.h.{i}.mlp.c_fc": "blk.{i}.ffn_up",
        "transformer.h.{i}.mlp.c_proj": "blk.{i}.ffn_down",
    },
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    conv1d=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
)
