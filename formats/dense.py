"""A checkpoint as transformers' own objects, whatever container it came in."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from formats.checkpoint import Checkpoint
from formats.errors import DataError


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's transformers tokenizer."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save_tokenizer(Path(folder))
        return AutoTokenizer.from_pretrained(folder)


def dense_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model of a checkpoint in evaluation mode, every weight decoded to `dtype`.

    Raises DataError when tensors are missing or have the wrong shape.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = AutoConfig.for_model(**checkpoint.config)
    config.tie_word_embeddings = f"{checkpoint.arch.head}.weight" not in checkpoint.names()
    state = {name: checkpoint.read_dense(name, dtype) for name in checkpoint.names()}
    # from_pretrained adopts these tensors without a copy, and fuses routed experts where its modules want that.
    with _quiet_transformers():
        family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, report = family.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            names = ", ".join(str(name) for name in sorted(report[problem])[:3])
            raise DataError(f"{problem.replace('_keys', '')} tensors: {names}", where=str(checkpoint.path))
    return model.eval()


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers: ours go to stderr, one per run."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
