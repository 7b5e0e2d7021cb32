"""Results for people, on stdout."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def show_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def show_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Aligned columns, those of numbers to the right. Never wrapped: what is piped stays one line per row."""
    cells = [[str(cell) for cell in row] for row in rows]
    lines = [list(header), *cells] if any(header) else cells
    for line in lines:
        columns = []
        for i, cell in enumerate(line):
            width = max(len(other[i]) for other in lines)
            number = all(row[i][:1].isdigit() or not row[i] for row in cells) and len(header) > 2
            columns.append(cell.rjust(width) if number else cell.ljust(width))
        print("  ".join(columns).rstrip())


def show_plan(summary: Mapping[str, Any], condensed: Iterable[Sequence[Any]]) -> None:
    """`Plan.summary()` and `Plan.condensed()`."""
    rows = [(name, n, grid, f"{bits:.3f}", f"{size / 1e6:.2f}", note) for name, n, grid, bits, size, note in condensed]
    show_table(("tensors", "number", "grid", "bits", "MB", ""), rows)
    minutes, seconds = divmod(summary["estimated_seconds"], 60)
    print()
    show_table(
        ("", ""),
        [
            ("container", summary["container"]),
            ("weights", f"{summary['parameters'] / 1e6:.1f} million"),
            ("size", f"{summary['bytes'] / 1e6:.1f} MB, {summary['bits_per_weight']:.3f} bits per weight"),
            ("peak memory", f"about {summary['peak_memory_bytes'] / 1e9:.1f} GB (estimate)"),
            ("time", f"about {minutes} min {seconds} s on this CPU (rough estimate)"),
        ],
    )
    for note in summary["notes"]:
        print(f"note: {note}")


def show_model(facts: Mapping[str, Any], condensed: Iterable[Sequence[Any]]) -> None:
    """`inspect_model` and `condensed` of its tensors."""
    show_table(("tensors", "number", "shape", "stored as", "bits"), condensed)
    print()
    total = facts["parameters"]
    rows = [
        (kind, f"{100 * n / total:.1f} %", "#" * round(40 * n / total), facts["kernels"].get(kind, ""))
        for kind, n in facts["histogram"].items()
    ]
    show_table(("stored as", "weights", "", "kernel"), rows)
    print()
    size = f"{facts['bytes'] / 1e6:.1f} MB, {facts['bits_per_weight']:.3f} bits per weight"
    pairs = {"container": facts["container"], "architecture": facts["architecture"], "size": size} | facts["config"]
    show_table(("", ""), pairs.items())
