"""Mixtral: Llama's attention, and routed experts in place of the MLP. Names are those of checkpoints; transformers'
modules keep a block's experts in two stacked parameters, `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`."""

from dataclasses import replace

from formats.arch.llama import ARCH as LLAMA

EXPERT = "block_sparse_moe.experts.{e}"

ARCH = replace(
    LLAMA,
    name="mixtral",
    model_types=("mixtral",),
    stages=(*LLAMA.stages[:2], (f"{EXPERT}.w1", f"{EXPERT}.w3"), (f"{EXPERT}.w2",)),
    fused=(LLAMA.fused[0], (f"{EXPERT}.w1", f"{EXPERT}.w3")),
    scale_pairs=(*LLAMA.scale_pairs[:2], (f"{EXPERT}.w3", (f"{EXPERT}.w2",))),
    tensor_names={hf: gguf for hf, gguf in LLAMA.tensor_names.items() if ".mlp." not in hf}
    | {
        "model.layers.{i}.block_sparse_moe.gate": "blk.{i}.ffn_gate_inp",
        "model.layers.{i}." + EXPERT + ".w1": "blk.{i}.ffn_gate_exps",
        "model.layers.{i}." + EXPERT + ".w2": "blk.{i}.ffn_down_exps",
        "model.layers.{i}." + EXPERT + ".w3": "blk.{i}.ffn_up_exps",
    },
    experts=EXPERT,
    extra={"module_names": {"block_sparse_moe": "mlp"}},  # checkpoint name -> transformers' module
)
