"""A random two-layer attention model whose rows never depend on each other: enough to drive the engine exactly."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def product(x: Tensor, w: Tensor) -> Tensor:
    """x [N, in] @ w[out, in].T, every row summed in the same order whatever N is."""
    return (x[:, None, :] * w).sum(-1)


class ToyModel:
    """The interface of runtime.model.Model, in 60 lines. sharpness: spread of the logits."""

    device = "cpu"

    def __init__(self, vocab: int = 29, seed: int = 0, sharpness: float = 6.0, positions: int = 4096) -> None:
        g = torch.Generator().manual_seed(seed)
        heads, kv_heads, dim, hidden = 4, 2, 16, 32
        self.config = SimpleNamespace(
            n_layers=2, n_heads=heads, n_kv_heads=kv_heads, head_dim=dim, vocab_size=vocab, max_positions=positions
        )

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g) / shape[-1] ** 0.5

        self.embedding = torch.randn(vocab, hidden, generator=g)
        self.frequency = torch.rand(hidden, generator=g)
        self.layers = [
            (weight(heads * dim, hidden), weight(kv_heads * dim, hidden), weight(kv_heads * dim, hidden),
             weight(hidden, heads * dim)) for _ in range(2)
        ]  # fmt: skip
        self.head = weight(vocab, hidden) * sharpness
        self.calls: list[int] = []

    def forward(self, tokens: Tensor, positions: Tensor, kv: Any, batch: Any = None) -> Tensor:
        self.calls.append(len(tokens))
        n, dim = len(tokens), self.config.head_dim
        x = self.embedding[tokens] + torch.sin(positions[:, None].float() * self.frequency)
        for i, (q, k, v, o) in enumerate(self.layers):
            qx, kx, vx = (product(x, w).view(n, -1, dim) for w in (q, k, v))
            x = x + product(kv.attend(i, qx, kx, vx, 0.5, 40 if i else None, None).reshape(n, -1), o)
        return x / x.square().mean(-1, keepdim=True).sqrt()

    def logits(self, hidden: Tensor) -> Tensor:
        return product(hidden, self.head)

    def linears(self) -> list[Any]:
        return []

    def alone(self, tokens: list[int]) -> Tensor:
        """Logits [len(tokens), vocab] of one sequence with a fresh cache, all at once."""
        from runtime.blocks import BlockManager, BlockTable, KVCache

        blocks, table = BlockManager(-(-len(tokens) // 16)), BlockTable()
        blocks.reserve(table, len(tokens))
        batch = KVCache(2, blocks.num_blocks, 2, 16).batch([table], [len(tokens)])
        return self.logits(self.forward(torch.tensor(tokens), batch.positions.long(), batch))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.alone(tokens)[-1].argmax()))
        return tokens[len(prompt) :]
