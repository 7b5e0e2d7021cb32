"""Several compressed models in one table and one picture: size against what was lost."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.inspect import inspect_model
from compress.plots import Point, size_quality
from compress.report import EVAL
from formats.containers import open_checkpoint
from formats.errors import UsageError


@dataclass(frozen=True)
class Entry:
    """One model: bytes of tensor data, bits per weight (tied ones counted once), and what `evaluate` found."""

    name: str
    container: str
    nbytes: int
    bits_per_weight: float
    evaluation: dict[str, Any]

    def summary(self) -> dict[str, Any]:
        size = {"bytes": self.nbytes, "bits_per_weight": self.bits_per_weight}
        return {"name": self.name, "container": self.container} | size | self.evaluation


def gather(models: Iterable[Path], evaluate: Callable[[Path], dict[str, Any]] | None = None) -> list[Entry]:
    """Sizes, and evaluations: through `evaluate` when given, else from the eval.json that a run left there.

    Raises UsageError when there is neither, or when the evaluations used different texts or references.
    """
    entries = []
    for path in models:
        with open_checkpoint(path) as checkpoint:
            facts = inspect_model(checkpoint)
        found = evaluate(path) if evaluate else _recorded(path)
        entries.append(Entry(_short_name(path), facts["container"], facts["bytes"], facts["bits_per_weight"], found))
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
_MEASURED = (
    *(("kld", 1, 4), ("kld_stderr", 1, 4), ("ppl", 1, 2), ("ppl_stderr", 1, 2)),
    *(("ppl_ratio", 1, 4), ("top1", 100, 1)),
)  # (key, scale, digits) of HEADER's columns from the fifth on


def table(entries: Sequence[Entry]) -> list[tuple[str, ...]]:
    """Rows for HEADER, smallest file first."""
    return [
        (
            e.name,
            e.container,
            f"{e.nbytes / 1e6:.1f}",
            f"{e.bits_per_weight:.2f}",
            *(f"{e.evaluation[key] * scale:.{digits}f}" for key, scale, digits in _MEASURED),
        )
        for e in entries
    ]


def plot(entries: Sequence[Entry], stem: Path) -> list[Path]:
    """Size against KL divergence, coloured by container, as `stem`.png and `stem`.svg."""
    points = [
        Point(e.name, e.nbytes / 1e6, e.evaluation["kld"], e.evaluation["kld_stderr"], e.container) for e in entries
    ]
    return size_quality(points, stem)
