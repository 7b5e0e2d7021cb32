"""AWQ (Lin et al. 2023, arXiv:2306.00978): scale salient input channels up before rounding, and the previous operator
down by as much, so that the float model stays the same and the rounding error falls where activations are large.

Symbols: x float32 [tokens, in], inputs of the linears W [out, in] that follow one operator; s float32 [in],
s = mean|x|^r normalised so that max(s) min(s) = 1 (eq. 5); r is searched on an even grid over [0, 1] for the least
squared error of the block's output when each W becomes Q(W s) / s.
"""

from collections.abc import Mapping

from torch import Tensor

from calib.stats import InputStats
from calib.walk import Block, Probe
from compress.algorithms import Outcome, rtn
from compress.recipe import AwqStep, RtnStep
from formats.qtensor import Grid

ROWS = 128  # output rows that are rounded while a scale is judged; the others stay float


def fold_scales(block: Block, grids: Mapping[str, Grid], step: AwqStep) -> dict[str, Tensor]:
    """Search and fold the scales of all pairs of a block, in place. Returns the changed parameters by full name."""
    changed: dict[str, Tensor] = {}
    probe = block.probe(list(grids))
    for operator, targets in block.scale_pairs():
        targets = tuple(name for name in targets if name in probe.inputs)
        if not targets or not all(name in grids for name in targets):
            continue
        size = probe.inputs[targets[0]].abs().mean(0).clamp(min=1e-5)
        width = block.output_width(operator)
        if len(size) % width:
            continue
        s = best_scale(block, probe, _shared(size, width, block.head_dim), targets, grids, step.points)
        for name in targets:
            block.replace(name, block.weight(name) * s)
        changed |= block.divide_output(operator, _own(s, width, block.head_dim))
    return changed


def best_scale(
    block: Block, probe: Probe, size: Tensor, targets: tuple[str, ...], grids: Mapping[str, Grid], points: int
) -> Tensor:
    """s [in] of the lowest output error; all ones when no scale helps. size [in]: mean |x|."""
    weights = {name: block.weight(name) for name in targets}
    importance = {name: probe.inputs[name].square().mean(0) for name in targets}
    errors: dict[int, float] = {}

    def scale(point: int) -> Tensor:
        s = size.pow(point / points)
        return s / (s.max() * s.min()).sqrt()

    def error(point: int) -> float:
        if point not in errors:
            for name in targets:
                block.replace(name, _rounded_rows(weights[name], scale(point), grids[name], importance[name]))
            errors[point] = float((block.output() - probe.output).square().sum())
        return errors[point]

    stride = 1 << max(points // 4, 1).bit_length() - 1
    best = min(range(0, points, stride), key=error)
    while stride > 1:  # the error is smooth in the exponent: look closer only around the best
        stride //= 2
        best = min((p for p in (best, best - stride, best + stride) if 0 <= p < points), key=error)
    for name in targets:
        block.replace(name, weights[name])
    return scale(best)


def _rounded_rows(W: Tensor, s: Tensor, grid: Grid, importance: Tensor) -> Tensor:
    """W with an even choice of its rows replaced by Q(W s) / s."""
    rows = slice(None, None, max(1, len(W) // ROWS))
    scaled = W[rows] * s
    params = grid.fit(scaled, importance / s.square())
    result = W.clone()
    result[rows] = grid.decode(grid.encode(scaled, params), params) / s
    return result


def _shared(size: Tensor, width: int, head_dim: int) -> Tensor:
    """Where several query heads read one value head, their channels must share a scale: the mean over the heads."""
    if len(size) == width:
        return size
    heads = size.view(width // head_dim, -1, head_dim)
    return heads.mean(1, keepdim=True).expand_as(heads).reshape(-1)


def _own(s: Tensor, width: int, head_dim: int) -> Tensor:
    """The scale of the operator's own outputs, [width]."""
    return s if len(s) == width else s.view(width // head_dim, -1, head_dim)[:, 0].reshape(-1)


def quantize(W: Tensor, stats: InputStats, grid: Grid, step: AwqStep) -> Outcome:
    """Round the scaled W. The fit clips: it searches each group's range, weighing columns by their input."""
    return rtn.quantize(W, stats, grid, RtnStep(algorithm="rtn", importance=step.clip))
