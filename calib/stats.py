"""What is remembered of the inputs a linear layer saw during calibration."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_TILE = 256  # columns of a Hessian that are accumulated at a time


@dataclass
class InputStats:
    """Second moments of the inputs of one linear (or of several that share their input).

    hessian   float32 [in, in], sum of x x^T over tokens (only the lower triangle until `finish`)
    tokens    number of rows seen
    derived   what algorithms computed from the above, for linears that share these statistics
    """

    width: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tokens: int = 0
    derived: dict[Hashable, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hessian = torch.zeros(self.width, self.width, device=self.device)

    def add(self, x: Tensor) -> None:
        """Accumulate x, [..., in]."""
        x = x.reshape(-1, self.width).float()
        if not len(x):
            return
        self.tokens += len(x)
        for start in range(0, self.width, _TILE):  # the lower triangle, tile by tile: little over half the work
            rows, columns = slice(start, start + _TILE), slice(0, min(start + _TILE, self.width))
            self.hessian[rows, columns].addmm_(x[:, rows].T, x[:, columns])

    def derive(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` computes from these statistics, computed once."""
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]

    def finish(self) -> None:
        """Mirror the triangle and turn sums into means over tokens."""
        self.hessian = torch.tril(self.hessian) + torch.tril(self.hessian, -1).T
        self.hessian /= max(self.tokens, 1)

    @property
    def importance(self) -> Tensor:
        """float32 [in]: mean squared input, what llama.cpp's imatrix holds."""
        return self.hessian.diagonal()


def diagonal_stats(mean_squares: Tensor, tokens: int) -> InputStats:
    """Statistics known only by their mean squares, float32 [in], as an imatrix file holds them."""
    stats = InputStats(len(mean_squares), tokens=tokens)
    stats.hessian = torch.diag(mean_squares)
    return stats
