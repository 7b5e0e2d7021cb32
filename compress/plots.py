"""Pictures for model cards and comparisons: PNG and SVG of each, the same bytes whenever the data are the same."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by the colour-blind; the marker says the same a second time.
SERIES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"))
INK = "#333333"


@dataclass(frozen=True)
class Point:
    """One file: size in MB (1e6 bytes), KL divergence in nats with its standard error, and whose it is."""

    label: str
    mb: float
    kld: float
    kld_stderr: float = 0.0
    series: str = ""


def size_quality(
    points: Sequence[Point], stem: Path, *, curve: Iterable[tuple[float, float]] = (), title: str = "Size and loss"
) -> list[Path]:
    """KL divergence over size, lower left is better. curve: (MB, KLD) of what could have been chosen, as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    line = list(curve)
    if line:
        axes.plot(*zip(*line, strict=True), color="#999999", lw=1.5, zorder=1, label="predicted, all sizes")
    names = sorted({point.series for point in points})
    for name, (color, marker) in zip(names, SERIES * (len(names) // len(SERIES) + 1), strict=False):
        mine = [point for point in points if point.series == name]
        axes.errorbar(
            [p.mb for p in mine],
            [p.kld for p in mine],
            yerr=[p.kld_stderr for p in mine],
            fmt=marker,
            color=color,
            ms=7,
            capsize=3,
            label=name or None,
        )
    if all(point.kld > 0 for point in points):
        axes.set_yscale("log")
        _plain_log_labels(axes)
    axes.set_xlabel("size of the weights, MB")
    axes.set_ylabel("KL divergence from the source, nats per token")
    _finish(axes, title)
    axes.margins(x=0.18, y=0.08)
    if len(names) > 1 or line:
        axes.legend(frameon=False)
    _label(figure, axes, points)
    return _save(figure, stem)


def layer_errors(layers: Iterable[Mapping[str, Any]], stem: Path) -> list[Path]:
    """Relative output error of each quantised linear over depth, one panel per kind, round-to-nearest beside it.

    layers: records of layers.jsonl (`name`, `error`, `rtn_error`), in order of the blocks; those outside numbered
    blocks, or without an error, are left out. Returns no paths when nothing is left.
    """
    from matplotlib.figure import Figure

    kinds: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for layer in layers:
        match = re.search(r"\.(\d+)\.(.+?)(?:\.weight)?$", layer["name"])
        if match and layer.get("error") is not None:
            kind = re.sub(r"\.\d+\.", ".", match[2])  # experts share a panel
            kinds.setdefault(kind, {}).setdefault(int(match[1]), []).append(layer)
    if not kinds:
        return []
    columns = min(4, len(kinds))
    rows = -(-len(kinds) // columns)
    figure = Figure(figsize=(3 * columns + 0.5, 2.4 * rows + 0.8), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    (color, marker), (other, square) = SERIES[:2]
    for panel, (kind, blocks) in zip(panels, kinds.items(), strict=False):
        achieved, plain = ([_mean(records, key) for records in blocks.values()] for key in ("error", "rtn_error"))
        if None not in plain:
            panel.plot(list(blocks), plain, color=other, marker=square, ms=3, lw=1, ls="--", label="round to nearest")
        panel.plot(list(blocks), achieved, color=color, marker=marker, ms=3.5, lw=1.5, label="achieved")
        panel.xaxis.get_major_locator().set_params(integer=True)
        _finish(panel, kind)
    for i in range(len(kinds), rows * columns):
        panels[i].set_visible(False)
        panels[i - columns].tick_params(labelbottom=True)
    if all((_mean(records, "error") or 0) > 0 for blocks in kinds.values() for records in blocks.values()):
        panels[0].set_yscale("log")
        _plain_log_labels(panels[0])
    figure.supxlabel("decoder block", fontsize=10)
    figure.supylabel("relative error of the output", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, frameon=False)
    return _save(figure, stem)


def _mean(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Over the experts of a block; None when one of them lacks the value."""
    values = [record.get(key) for record in records]
    return None if None in values else sum(values) / len(values)  # type: ignore[arg-type]


def _finish(axes: "Axes", title: str) -> None:
    axes.set_title(title, fontsize=11, color=INK, loc="left")
    axes.grid(True, which="major", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _plain_log_labels(axes: "Axes") -> None:
    """0.05 and 0.2 rather than powers of ten, with 1-2-5 steps."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _label(figure: "Figure", axes: "Axes", points: Sequence[Point]) -> None:
    """Write each point's name beside it: the nearest place where it covers no marker and no other name."""
    figure.draw_without_rendering()  # settles the layout, so that data coordinates become pixels
    scale = figure.dpi / 72
    pixels = [axes.transData.transform((point.mb, point.kld)) / scale for point in points]  # in points, as fonts are
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in pixels]
    left, low, right, high = (edge / scale for edge in (axes.bbox.x0, axes.bbox.y0, axes.bbox.x1, axes.bbox.y1))
    for point, (x, y) in sorted(zip(points, pixels, strict=True), key=lambda item: (item[0].kld, item[0].mb)):
        width = 5.2 * len(point.label)
        places = [(dx, dy) for dy in (0, 11, -11, 22, -22, 33, -33, 44) for dx in (8, -8 - width)]
        places.sort(key=lambda place: abs(place[1]) + (place[0] < 0))
        boxes = {(dx, dy): (x + dx, y + dy - 5, x + dx + width, y + dy + 5) for dx, dy in places}
        inside = [p for p in places if left < boxes[p][0] and boxes[p][2] < right and low < boxes[p][1] < high - 10]
        free = [place for place in inside if not any(_overlap(boxes[place], other) for other in taken)]
        place = (free or places)[0]
        taken.append(boxes[place])
        axes.annotate(
            point.label,
            (point.mb, point.kld),
            xytext=place,
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=INK,
            arrowprops={"arrowstyle": "-", "color": "#bbbbbb", "lw": 0.6} if abs(place[1]) > 11 else None,
        )


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _save(figure: "Figure", stem: Path) -> list[Path]:
    import matplotlib

    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")]
    with matplotlib.rc_context({"svg.hashsalt": "bitwright"}):
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None, "Creator": None})
    return paths
