"""Qwen 3 with routed experts in every block."""

from dataclasses import replace

from formats.arch.qwen3 import ARCH as QWEN3

EXPERT = "mlp.experts.{e}"

ARCH = replace(
    QWEN3,
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    gguf_name="qwen3moe",
    stages=(*QWEN3.stages[:2], (f"{EXPERT}.gate_proj", f"{EXPERT}.up_proj"), (f"{EXPERT}.down_proj",)),
    fused=(QWEN3.fused[0], (f"{EXPERT}.gate_proj", f"{EXPERT}.up_proj")),
    scale_pairs=(*QWEN3.scale_pairs[:2], (f"{EXPERT}.up_proj", (f"{EXPERT}.down_proj",))),
    tensor_names={hf: gguf for hf, gguf in QWEN3.tensor_names.items() if ".mlp." not in hf}
    | {
        "model.layers.{i}.mlp.gate": "blk.{i}.ffn_gate_inp",
        "model.layers.{i}." + EXPERT + ".gate_proj": "blk.{i}.ffn_gate_exps",
        "model.layers.{i}." + EXPERT + ".up_proj": "blk.{i}.ffn_up_exps",
        "model.layers.{i}." + EXPERT + ".down_proj": "blk.{i}.ffn_down_exps",
    },
    experts=EXPERT,
)
