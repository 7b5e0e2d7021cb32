"""Perplexity over fixed windows, as llama-perplexity computes it, or over overlapping ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.errors import DataError, UsageError


@dataclass(frozen=True)
class Window:
    """A stretch of text given to the model at once; its last `scored` tokens count."""

    ids: list[int]
    scored: int

    @property
    def targets(self) -> Tensor:
        """The scored tokens, int64 [scored]."""
        return torch.tensor(self.ids[-self.scored :])


def fixed_windows(tokens: Sequence[int], length: int, chunks: int, bos: int | None) -> list[Window]:
    """The first `chunks` non-overlapping stretches of `length` tokens; the second half of each is scored.

    Exactly llama-perplexity's protocol: tokens length/2+1 .. length-1 of a chunk are scored, so that each has at least
    half a window of context; where the model's tokenizer begins a text with BOS, BOS *replaces* the first token of each
    chunk.
    """
    starts = range(0, len(tokens) - length + 1, length)[:chunks]
    rows = [list(tokens[start : start + length]) for start in starts]
    if bos is not None:
        rows = [[bos, *row[1:]] for row in rows]
    return [Window(row, length - length // 2 - 1) for row in rows]


def strided_windows(tokens: Sequence[int], length: int, stride: int, chunks: int) -> list[Window]:
    """Overlapping windows: after the first, each moves on by `stride` and scores only the tokens not yet scored."""
    starts = range(0, len(tokens) - length + 1, stride)[:chunks]
    return [Window(list(tokens[s : s + length]), stride if s else length - 1) for s in starts]


def read_windows(tokenizer: Any, text: Path, length: int, chunks: int, stride: int | None = None) -> list[Window]:
    """Windows over a plain text file, from its beginning; fewer than `chunks` where the text ends early.

    Raises UsageError for impossible sizes, DataError when the text does not fill a single window.
    """
    if length < 4 or chunks < 1 or (stride is not None and not 0 < stride < length):
        raise UsageError(
            f"cannot evaluate with length {length}, chunks {chunks}, stride {stride}",
            how_to_fix="length of at least 4, chunks of at least 1, 0 < stride < length",
        )
    needed = length * chunks if stride is None else length + stride * (chunks - 1)
    tokens = _first_tokens(tokenizer, text, needed)
    if len(tokens) < length:
        raise DataError(
            f"only {len(tokens)} tokens, fewer than one window of {length}",
            where=str(text),
            how_to_fix=f"a longer text, or a length of at most {len(tokens)}",
        )
    if stride is not None:
        return strided_windows(tokens, length, stride, chunks)
    begins_with_bos = tokenizer.bos_token_id is not None and tokens[0] == tokenizer.bos_token_id
    return fixed_windows(tokens, length, chunks, tokenizer.bos_token_id if begins_with_bos else None)


def _first_tokens(tokenizer: Any, text: Path, needed: int) -> list[int]:
    """At least `needed` tokens from the front of the file (if it has them), without tokenising all of it."""
    try:
        content = text.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read the text: {error.strerror}", where=str(text)) from None
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text: {error.reason} at byte {error.start}", where=str(text)) from None
    size = 8 * needed
    while True:
        # The tokens near a cut differ from those of the whole text: a margin of 64 keeps them out of the windows.
        tokens: list[int] = tokenizer(content[:size], verbose=False).input_ids
        if size >= len(content) or len(tokens) >= needed + 64:
            return tokens[:needed]
        size *= 2


def log_probabilities(logits: Tensor) -> Tensor:
    """float32 [n, vocab] log-probabilities. Raises DataError when the model answers with NaN or infinity."""
    if not torch.isfinite(logits).all():
        raise DataError("the model computes NaN or infinite logits", how_to_fix="check its weights with `inspect`")
    return torch.log_softmax(logits.float(), dim=-1)


def summarize_perplexity(nll: Tensor) -> dict[str, float | int]:
    """nll: negative log-likelihood (nats) of each scored token, [n]. The standard error is that of exp(mean) to first
    order, tokens taken as independent, as llama-perplexity reports it."""
    ppl = math.exp(nll.double().mean())
    return {"ppl": ppl, "ppl_stderr": ppl * standard_error(nll), "tokens": nll.numel()}


def standard_error(values: Tensor) -> float:
    """Of the mean of values [n]."""
    return float(values.double().std(correction=1) / math.sqrt(values.numel())) if values.numel() > 1 else math.inf
