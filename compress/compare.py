"""Several compressed models in one table and one picture: size against what was lost."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compress.plots import Point, size_quality
from compress.report import EVAL
from formats.checkpoint import Checkpoint
from formats.containers import open_checkpoint
from formats.errors import UsageError
from formats.qtensor import Grid


@dataclass(frozen=True)
class Entry:
    """One model: bytes of tensor data, over how many weights, and what `evaluate` found (or eval.json says)."""

    name: str
    container: str
    nbytes: int
    weights: int
    evaluation: dict[str, Any]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.weights

    def summary(self) -> dict[str, Any]:
        size = {"bytes": self.nbytes, "bits_per_weight": round(self.bits_per_weight, 4)}
        return {"name": self.name, "container": self.container} | size | self.evaluation


def stored_size(checkpoint: Checkpoint) -> tuple[int, int]:
    """(bytes of tensor data, number of weights), tied weights counted once."""
    bits, weights = 0.0, 0
    for name in checkpoint.names():
        shape, stored = checkpoint.shape(name), checkpoint.stored_as(name)
        count = math.prod(shape)
        bits += count * (stored.bits_per_weight(shape[-1]) if isinstance(stored, Grid) else _float_bits(stored))
        weights += count
    return round(bits / 8), weights


def _float_bits(dtype: str) -> int:
    return int(torch.finfo(getattr(torch, dtype)).bits)


def gather(models: Iterable[Path], evaluate: Callable[[Path], dict[str, Any]] | None = None) -> list[Entry]:
    """Sizes, and evaluations: through `evaluate` when given, else from the eval.json that a run left there.

    Raises UsageError when there is neither, or when the evaluations used different texts or references.
    """
    entries = []
    for path in models:
        with open_checkpoint(path) as checkpoint:
            nbytes, weights = stored_size(checkpoint)
            container = checkpoint.container
        found = evaluate(path) if evaluate else _recorded(path)
        entries.append(Entry(_short_name(path), container, nbytes, weights, found))
    if len({(e.evaluation.get("windows_sha256"), round(e.evaluation["ref_ppl"], 3)) for e in entries}) > 1:
        raise UsageError(
            "the recorded evaluations used different texts or references",
            where=", ".join(entry.name for entry in entries),
            how_to_fix="measure them all alike: --against SOURCE --text FILE",
        )
    return sorted(entries, key=lambda entry: (entry.nbytes, entry.name))


def _recorded(path: Path) -> dict[str, Any]:
    file = path / EVAL
    if path.is_dir() and file.exists():
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if "kld" in found:
            return found
    raise UsageError(
        "no recorded KL divergence", where=str(path), how_to_fix="measure it now: --against SOURCE --text FILE"
    )


def _short_name(path: Path) -> str:
    return path.resolve().stem if path.is_file() else path.resolve().name


HEADER = ("model", "container", "MB", "bits/weight", "KLD", "+-", "ppl", "+-", "ppl ratio", "top-1 %")


def table(entries: Sequence[Entry]) -> list[tuple[str, ...]]:
    """Rows for HEADER, smallest file first."""
    return [
        (
            entry.name,
            entry.container,
            f"{entry.nbytes / 1e6:.1f}",
            f"{entry.bits_per_weight:.2f}",
            f"{entry.evaluation['kld']:.4f}",
            f"{entry.evaluation['kld_stderr']:.4f}",
            f"{entry.evaluation['ppl']:.2f}",
            f"{entry.evaluation['ppl_stderr']:.2f}",
            f"{entry.evaluation['ppl_ratio']:.4f}",
            f"{entry.evaluation['top1'] * 100:.1f}",
        )
        for entry in entries
    ]


def plot(entries: Sequence[Entry], stem: Path) -> list[Path]:
    """Size against KL divergence, coloured by container, as `stem`.png and `stem`.svg."""
    points = [
        Point(e.name, e.nbytes / 1e6, e.evaluation["kld"], e.evaluation["kld_stderr"], e.container) for e in entries
    ]
    return size_quality(points, stem)
