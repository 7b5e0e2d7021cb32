"""Round to nearest: fit the grid, optionally weighing columns by their mean squared input, and round."""

from torch import Tensor

from calib.stats import InputStats
from compress.algorithms import Outcome, relative_error
from compress.recipe import RtnStep
from formats.qtensor import Grid, QTensor


def quantize(W: Tensor, stats: InputStats | None, grid: Grid, step: RtnStep) -> Outcome:
    """W float32 [out, in]; stats None rounds without looking at inputs."""
    params = grid.fit(W, stats.importance if stats is not None and step.importance else None)
    tensor = QTensor(grid, grid.encode(W, params), params)
    error = relative_error(W, tensor.dequantize(), stats.hessian if stats is not None else None)
    return Outcome(tensor, error, error)
