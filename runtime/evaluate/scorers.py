"""Models as something that answers with logits: through transformers (dense) or the bundled runtime (packed)."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.containers import open_checkpoint
from formats.dense import dense_model
from formats.errors import UsageError


class Scorer(Protocol):
    """Anything that can be evaluated."""

    def logits(self, ids: list[int], last: int) -> Tensor:
        """Logits after each of the `last` final tokens of `ids`, float32 [last, vocab]."""


class DenseScorer:
    """Any checkpoint as a transformers model: float32 weights, dequantised one by one, float32 arithmetic."""

    def __init__(self, checkpoint: Checkpoint, device: str = "cpu") -> None:
        self.model = dense_model(checkpoint).to(device)
        self.device = device

    @torch.inference_mode()
    def logits(self, ids: list[int], last: int) -> Tensor:
        tokens = torch.tensor([ids], device=self.device)
        logits: Tensor = self.model(tokens, use_cache=False, logits_to_keep=last).logits
        return logits[0, -last:].float()


class PackedScorer:
    """Packed weights through the bundled runtime, as the server runs them."""

    def __init__(self, checkpoint: Checkpoint, device: str = "cpu", kernel: str = "auto") -> None:
        from runtime.model import load_model

        self.model = load_model(checkpoint, kernel=kernel, device=device)

    @torch.inference_mode()
    def logits(self, ids: list[int], last: int) -> Tensor:
        from runtime.blocks import BlockManager, BlockTable, KVCache
        from runtime.model import BatchInfo

        config, table = self.model.config, BlockTable()
        blocks = BlockManager(-(-len(ids) // 16), 16, prefix_cache=False)
        blocks.reserve(table, len(ids))
        cache = KVCache(
            config.n_layers, blocks.num_blocks, config.n_kv_heads, config.head_dim, device=self.model.device
        )
        batch = cache.batch([table], [len(ids)])
        tokens = torch.tensor(ids, device=batch.positions.device)
        hidden = self.model.forward(tokens, batch.positions.long(), batch, BatchInfo(batch.sequence))
        return self.model.logits(hidden[-last:])


@contextlib.contextmanager
def open_scorer(path: str | Path, engine: str, device: str = "cpu", kernel: str = "auto") -> Iterator[Scorer]:
    """A model ready to be scored; its weights are released on leaving.

    engine: "transformers" (dense float32 weights: what the stored numbers mean), or "runtime" (packed weights through
    the bundled kernels: what a server computes).
    """
    if engine not in ("transformers", "runtime"):
        raise UsageError(f'unknown engine "{engine}"', how_to_fix='one of: "transformers", "runtime"')
    with open_checkpoint(path) as checkpoint:
        scorer = PackedScorer(checkpoint, device, kernel) if engine == "runtime" else DenseScorer(checkpoint, device)
    yield scorer
