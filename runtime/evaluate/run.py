"""`evaluate`: everything measured about one model, alone or against a reference."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from formats.containers import open_checkpoint
from formats.dense import load_tokenizer
from formats.errors import DataError, GateFailed, UsageError
from runtime.evaluate.divergence import Divergence, ReferenceLogits, reference_key, store_reference
from runtime.evaluate.perplexity import Window, log_probabilities, read_windows, summarize_perplexity
from runtime.evaluate.scorers import Scorer, open_scorer

Progress = Callable[[int, int], None]  # windows done, windows in all


def evaluate(
    model: str | Path,
    *,
    against: str | Path | None = None,
    text: str | Path,
    length: int = 512,
    chunks: int = 20,
    stride: int | None = None,
    engine: str = "transformers",
    kernel: str = "auto",
    device: str = "cpu",
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Perplexity of `model` on a plain text file and, with `against`, its divergence from that reference.

    Windows are llama-perplexity's (`fixed_windows`) or, with `stride`, overlapping. The tokens are the reference's,
    when there is one. Logits are float32, of the dequantised weights (engine "transformers") or of the packed ones
    through the bundled kernels ("runtime", where `kernel` picks one); the reference always goes through transformers.
    Its logits are stored at 16 bits each in `cache` and reused by the next candidate, or in a temporary folder. One
    model is in memory at a time.

    Returns `ppl ppl_stderr tokens chunks length windows_sha256 engine` (results are comparable where the digest of the
    windows is the same); with `against` also `kld kld_stderr kld_median kld_p99 kld_max top1
    top1_stderr rms_dp ref_ppl ppl_ratio ppl_ratio_stderr reference_cache_mb same_tokenizer` (see `Divergence.summary`).
    """
    text = Path(text)
    windows = _windows(against or model, text, length, chunks, stride)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        divergence = None
        if against is not None:
            reference = _reference(against, windows, Path(cache or scratch), device)
            divergence = Divergence(reference)
            result["reference_cache_mb"] = reference.nbytes / 1e6
            result["same_tokenizer"] = windows == _windows(model, text, length, chunks, stride)
        with open_scorer(model, engine, device, kernel) as scorer:
            nll = _score(scorer, windows, divergence, progress)
    if divergence is not None:
        result = divergence.summary() | result
    digest = hashlib.sha256(json.dumps([(w.ids, w.scored) for w in windows]).encode()).hexdigest()[:16]
    about = {"chunks": len(windows), "length": length, "windows_sha256": digest, "engine": engine}
    return {**summarize_perplexity(nll), **about, **result}


def check_gates(result: Mapping[str, Any], *, max_kld: float | None = None, max_ppl_ratio: float | None = None) -> None:
    """Raises GateFailed when the result of `evaluate` is worse than allowed."""
    for name, limit in (("kld", max_kld), ("ppl_ratio", max_ppl_ratio)):
        if limit is None:
            continue
        if name not in result:
            raise UsageError(f"max_{name} needs a reference", how_to_fix="name the source model with --against")
        if not result[name] <= limit:
            raise GateFailed(
                f"{name} is {result[name]:.4f}, above the allowed {limit:g}",
                how_to_fix="more bits, another algorithm, or a looser gate",
            )


def _windows(model: str | Path, text: Path, length: int, chunks: int, stride: int | None) -> list[Window]:
    with open_checkpoint(model) as checkpoint:
        return read_windows(load_tokenizer(checkpoint), text, length, chunks, stride)


def _reference(model: str | Path, windows: Sequence[Window], folder: Path, device: str) -> ReferenceLogits:
    """The reference's logits over the windows, computed unless `folder` has them already."""
    with open_checkpoint(model) as checkpoint:
        entry = folder / reference_key(checkpoint.path, windows, "transformers")
    if not entry.exists():
        with open_scorer(model, "transformers", device) as scorer:
            store_reference(scorer, windows, entry)
    return ReferenceLogits(entry)


def _score(
    scorer: Scorer, windows: Sequence[Window], divergence: Divergence | None, progress: Progress | None
) -> torch.Tensor:
    """Negative log-likelihoods of all scored tokens, [n]; feeds the divergence on the way."""
    parts = []
    for done, window in enumerate(windows, start=1):
        log_q = log_probabilities(scorer.logits(window.ids, window.scored + 1)[:-1]).cpu()
        if divergence is not None:
            if log_q.shape[1] != divergence.reference.vocab:
                raise DataError(
                    f"{log_q.shape[1]} logits per token, the reference has {divergence.reference.vocab}",
                    how_to_fix="compare models with the same vocabulary",
                )
            divergence.add(log_q, window.targets)
        parts.append(-log_q.gather(1, window.targets[:, None])[:, 0])
        if progress is not None:
            progress(done, len(windows))
    return torch.cat(parts)
