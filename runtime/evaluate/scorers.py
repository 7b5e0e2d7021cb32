"""Models as something that answers with logits: through transformers (dense) or the bundled runtime (packed)."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.containers import open_checkpoint
from formats.errors import DataError, UsageError


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


def dense_model(checkpoint: Checkpoint) -> Any:
    """The transformers model of a checkpoint, in float32 and in evaluation mode."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = AutoConfig.for_model(**checkpoint.config)
    config.tie_word_embeddings = f"{checkpoint.arch.head}.weight" not in checkpoint.names()
    state = {name: checkpoint.read_dense(name) for name in checkpoint.names()}
    # from_pretrained adopts these tensors without a copy, and fuses routed experts where its modules want that.
    with quiet_transformers():
        family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, report = family.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
        )
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            names = ", ".join(str(name) for name in sorted(report[problem])[:3])
            raise DataError(f"{problem.replace('_keys', '')} tensors: {names}", where=str(checkpoint.path))
    return model.eval()


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's transformers tokenizer, whatever container it came in."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save_tokenizer(Path(folder))
        return AutoTokenizer.from_pretrained(folder)


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


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers: ours go to stderr, one per run."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
