"""The algorithms by name, and what each gives back. One file each, math only."""

from dataclasses import dataclass

import torch
from torch import Tensor

from formats.qtensor import QTensor
from formats.registry import Registry

ALGORITHMS = Registry(
    "algorithm",
    {
        "rtn": "compress.algorithms.rtn:quantize",
        "gptq": "compress.algorithms.gptq:quantize",
        "awq": "compress.algorithms.awq:quantize",
    },
)
"""name -> quantize(W, stats or None, grid, step) -> Outcome"""

PREPARATIONS = Registry("algorithm", {"awq": "compress.algorithms.awq:fold_scales"})
"""name -> prepare(block, grids, step) -> changed parameters; done to a whole block before its codes are chosen"""


@dataclass
class Outcome:
    """A quantised matrix and what was achieved.

    error, rtn_error  output error relative to the output's energy on the calibration inputs, and the same for plain
                      rounding to the same grid; relative weight errors where there were no inputs
    damp              fraction of its diagonal that was added to the Hessian, None without one
    """

    tensor: QTensor
    error: float
    rtn_error: float
    damp: float | None = None


def relative_error(W: Tensor, Q: Tensor, H: Tensor | None = None) -> float:
    """trace((W - Q) H (W - Q)^T) / trace(W H W^T); H = I when there is none."""
    E = W - Q
    if H is None:
        return float(E.square().sum() / W.square().sum().clamp(min=torch.finfo(torch.float32).tiny))
    return float(((E @ H) * E).sum() / ((W @ H) * W).sum().clamp(min=torch.finfo(torch.float32).tiny))
