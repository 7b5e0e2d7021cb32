"""Is peak memory bounded by a block, not by the model? python tests/bench/memory.py [--layers 28] [--algorithm gptq]

Writes a Llama-shaped checkpoint of random bf16 weights (1.5 billion parameters as it stands), quantises it with the
`quantize` command, and prints the command's peak resident memory next to the size of the model. Exits with 1 unless
that stayed under the limit.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart"


def write_model(folder: Path, config: LlamaConfig) -> int:
    """Random weights, one shard per block. Returns the number of parameters."""
    generator = torch.Generator().manual_seed(0)
    index: dict[str, str] = {}
    parameters = 0

    def shard(number: int, tensors: dict[str, tuple[int, ...]]) -> None:
        nonlocal parameters
        name = f"model-{number:05d}.safetensors"
        values = {}
        for key, shape in tensors.items():
            value = torch.randn(shape, generator=generator) * 0.02 if len(shape) > 1 else torch.ones(shape)
            values[key] = value.bfloat16()
            index[key] = name
            parameters += values[key].numel()
        save_file(values, folder / name, {"format": "pt"})

    h, m, v = config.hidden_size, config.intermediate_size, config.vocab_size
    kv = config.num_key_value_heads * config.head_dim
    shard(0, {"model.embed_tokens.weight": (v, h), "lm_head.weight": (v, h), "model.norm.weight": (h,)})
    for i in range(config.num_hidden_layers):
        block = f"model.layers.{i}."
        linears = {"q": (h, h), "k": (kv, h), "v": (kv, h), "o": (h, h)}
        tensors: dict[str, tuple[int, ...]] = {f"{block}self_attn.{n}_proj.weight": s for n, s in linears.items()}
        tensors |= {f"{block}mlp.{n}_proj.weight": (m, h) for n in ("gate", "up")}
        tensors |= {f"{block}mlp.down_proj.weight": (h, m)}
        tensors |= {f"{block}{n}_layernorm.weight": (h,) for n in ("input", "post_attention")}
        shard(i + 1, tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QUICKSTART / "model" / name, folder)
    return parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--algorithm", default="gptq", choices=["rtn", "gptq"])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--limit-gb", type=float, default=4)
    args = parser.parse_args()
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=args.layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (model := folder / "model").mkdir()
        parameters = write_model(model, config)
        importance = ", importance: true" if args.algorithm == "rtn" else ""
        (folder / "recipe.yaml").write_text(
            f"version: 1\ncalibration: {{data: {QUICKSTART / 'calib.txt'}, samples: {args.samples}, length: 512}}\n"
            f"steps: [{{algorithm: {args.algorithm}, grid: {{bits: 4, group_size: 128}}{importance}}}]\n"
            "output: {format: gptq}\n"
        )
        start = time.perf_counter()
        quantize = str(Path(sys.executable).with_name("quantize"))
        subprocess.run([quantize, "run", folder / "recipe.yaml", model, "-o", folder / "out"], check=True)
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(
        f"{parameters / 1e9:.2f} billion parameters, {2 * parameters / 1e9:.2f} GB; {args.algorithm} in {seconds:.0f} s"
    )
    print(f"peak resident memory {peak / 1e9:.2f} GB, limit {args.limit_gb} GB")
    sys.exit(peak > args.limit_gb * 1e9)


if __name__ == "__main__":
    main()
