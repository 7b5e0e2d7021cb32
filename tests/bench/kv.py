"""What an 8-bit KV cache costs: python tests/bench/kv.py MODEL TEXT [--windows 10] [--step 64] [--max-kld 0.001]

KL divergence (nats per token) of the model with int8 keys and values from itself with float32 ones, second halves of
windows of 512 tokens, which are run `step` tokens at a time (1: as decoding does, with every block's scale growing).
Exits with 1 above --max-kld.
"""

import argparse
import sys
from pathlib import Path

import torch

from runtime.blocks import BlockManager, BlockTable, KVCache
from runtime.model import BatchInfo, Model, load_model

LENGTH = 512


def second_half(model: Model, window: list[int], dtype: str, step: int) -> tuple[torch.Tensor, int]:
    """Log-probabilities [256, vocab] after the tokens of the second half, and bytes of the cache."""
    c = model.config
    cache, manager, table = (
        KVCache(c.n_layers, 32, c.n_kv_heads, c.head_dim, dtype=dtype),
        BlockManager(32),
        BlockTable(),
    )
    manager.reserve(table, LENGTH)
    hidden = []
    for start in range(0, LENGTH, step):
        tokens = torch.tensor(window[start : start + step])
        batch = cache.batch([table], [len(tokens)])
        hidden.append(model.forward(tokens, batch.positions.long(), batch, BatchInfo(batch.sequence)))
        table.length += len(tokens)
    return model.logits(torch.cat(hidden)[LENGTH // 2 :]).log_softmax(-1), cache.nbytes()


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--step", type=int, default=64)
    parser.add_argument("--max-kld", type=float, default=0.001)
    arguments = parser.parse_args()
    model = load_model(arguments.model)
    tokens = model.tokenizer.encode(arguments.text.read_text(encoding="utf-8"), verbose=False)
    parts, size = [], {}
    for start in range(0, arguments.windows * LENGTH, LENGTH):
        window = tokens[start : start + LENGTH]
        exact, size["float32"] = second_half(model, window, "float32", arguments.step)
        rounded, size["int8"] = second_half(model, window, "int8", arguments.step)
        parts.append((exact.exp() * (exact - rounded)).sum(-1))
    kld = torch.cat(parts)
    print(
        f"int8 KV: KL divergence {kld.mean():.6f} +- {kld.std() / len(kld) ** 0.5:.6f} nats per token, "
        f"{2 * size['int8'] / size['float32']:.3f} of the memory of float16"
    )
    return 0 if kld.mean() <= arguments.max_kld else 1


if __name__ == "__main__":
    sys.exit(main())
