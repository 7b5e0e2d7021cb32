"""The neutral form of a quantised tensor, and what a number format must be able to do.

An algorithm chooses codes on a grid; a container stores codes; a kernel multiplies by codes. None of the three needs to
know the others: they meet here.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Params = dict[str, Tensor]
"""Parameters of a grid for some columns of a matrix: each tensor is [out, blocks, ...], so that the parameters of
neighbouring columns concatenate along dim 1. Their names and dtypes belong to the grid (fp16 scales stay fp16)."""


@dataclass
class Columns:
    """The values a weight may take, column by column: `scale * level(code) - offset`.

    scale, offset: float32 [out, n]; zero: float32 [out, n] or None, subtracted from the level (integer zero points).
    """

    scale: Tensor
    offset: Tensor | None = None
    zero: Tensor | None = None


@dataclass(frozen=True)
class Factor:
    """Parameters in which a grid's values are linear: `value = scale * (..) + minimum * (..)` over `width` columns.

    scale, minimum  names in Params, whose trailing dims flatten to [out, groups]; minimum None: there is none
    scale_range, minimum_range  the integers they may be, or None where they are fp16
    """

    width: int | None
    scale: str
    minimum: str | None = None
    scale_range: tuple[int, int] | None = None
    minimum_range: tuple[int, int] | None = None

    def store_scale(self, scale: Tensor) -> Tensor:
        return self._store(scale, self.scale_range)

    def store_minimum(self, minimum: Tensor) -> Tensor:
        return self._store(minimum, self.minimum_range)

    @staticmethod
    def _store(x: Tensor, integers: tuple[int, int] | None) -> Tensor:
        if integers is None:
            return x.clamp(-65504, 65504).half().float()
        return x.round().clamp(*integers)


class Grid(ABC):
    """A number format. All knowledge of scales, zero points, super-blocks and codebooks lives in its subclasses.

    name        canonical, parseable by `formats.grids.parse_grid` ("q4_k", "int4-g64-sym", "int8-channel-sym")
    block       columns that share a set of parameters (256 for K-quants, the group size for affine grids);
                None when one set covers a whole row
    level_table float32 [levels]: the value of each code before scale, zero and offset
    factors     parameters in which values are linear, finest first; empty where refinement has nothing to hold on to
    """

    name: str
    block: int | None
    level_table: Tensor
    factors: tuple[Factor, ...] = ()
    minimum_sign = 1.0  # whether minima are added or subtracted

    @abstractmethod
    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight, parameters included."""

    @abstractmethod
    def fit(self, w: Tensor, importance: Tensor | None = None) -> Params:
        """Choose parameters for w, float32 [out, n], minimising sum(importance * (w - decode(encode(w)))**2).

        importance: float32 [n] or [out, n], non-negative, or None for uniform. n covers whole blocks, except that the
        last block of an affine grid may be ragged. Vectorised over rows and blocks.
        """

    @abstractmethod
    def columns(self, params: Params, n: int) -> Columns:
        """The values allowed in each of n columns, in the arithmetic of the format's published dequantiser."""

    def derivatives(self, factor: Factor, codes: Tensor, params: Params) -> tuple[Tensor, Tensor | None]:
        """(d value / d scale, d value / d minimum or None) of a factor, float32 [out, n] each."""

        def spread(name: str, width: int | None) -> Tensor:
            n = codes.shape[1]
            return params[name].flatten(1).float().repeat_interleave(width or n, dim=1)[:, :n]

        by_scale = self._level(codes)
        if "zero" in params:
            by_scale = by_scale - spread("zero", self.block)
        by_minimum = None if factor.minimum is None else torch.full_like(by_scale, self.minimum_sign)
        for other in self.factors:
            if other is not factor:
                by_scale = by_scale * spread(other.scale, other.width)
                if by_minimum is not None and other.minimum is not None:
                    by_minimum = by_minimum * spread(other.minimum, other.width)
        return by_scale, by_minimum

    def encode(self, w: Tensor, params: Params) -> Tensor:
        """Nearest codes, uint8 [out, n]."""
        return self.nearest(w, self.columns(params, w.shape[1]))

    def decode(self, codes: Tensor, params: Params) -> Tensor:
        """Values of codes, float32 [out, n]; bit-exact with the format's published dequantiser."""
        return self.values(codes, self.columns(params, codes.shape[1]))

    def nearest(self, w: Tensor, columns: Columns) -> Tensor:
        """Nearest codes for w [out, n] (or [out] with columns sliced alike)."""
        scale = torch.where(columns.scale == 0, torch.ones_like(columns.scale), columns.scale)
        x = (w if columns.offset is None else w + columns.offset) / scale
        if columns.zero is not None:
            x = x + columns.zero
        return self._nearest_level(x)

    def values(self, codes: Tensor, columns: Columns) -> Tensor:
        level = self._level(codes)
        if columns.zero is not None:
            level = level - columns.zero
        value = columns.scale * level
        return value if columns.offset is None else value - columns.offset

    def _level(self, codes: Tensor) -> Tensor:
        return self.level_table.to(codes.device)[codes.long()]

    def _nearest_level(self, x: Tensor) -> Tensor:
        """Codes (uint8) of the levels nearest to x. Overridden where levels are consecutive integers."""
        table = self.level_table.to(x.device)
        ordered, order = table.sort()
        return order[torch.bucketize(x, (ordered[1:] + ordered[:-1]) / 2)].to(torch.uint8)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return self.name


class IntegerLevels(Grid):
    """A grid whose levels are consecutive integers `lowest, lowest + 1, ..`: rounding is arithmetic, not a search."""

    def __init__(self, name: str, block: int | None, bits: int, lowest: int = 0) -> None:
        self.name, self.block, self.bits, self.lowest = name, block, bits, lowest
        self.top = (1 << bits) - 1
        self.ends = float(lowest), float(lowest + self.top)
        self.level_table = torch.arange(lowest, lowest + self.top + 1, dtype=torch.float32)

    def round_levels(self, x: Tensor) -> Tensor:
        """The nearest levels, in place."""
        return x.round_().clamp_(*self.ends)

    def _level(self, codes: Tensor) -> Tensor:
        level = codes.float()
        return level + self.lowest if self.lowest else level

    def _nearest_level(self, x: Tensor) -> Tensor:
        return (x - self.lowest).round().clamp(0, self.top).to(torch.uint8)


@dataclass
class QTensor:
    """A quantised matrix: codes uint8 [out, in] on a grid, with the grid's parameters. Never packed.

    g_idx: int32 [in] or None; column j uses the parameters of block g_idx[j] (GPTQ's act_order). Codes are always in
    the natural column order. meta: provenance only, e.g. {"algorithm": "gptq"}.
    """

    grid: Grid
    codes: Tensor
    params: Params
    g_idx: Tensor | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix the codes stand for, [out, in]."""
        if self.g_idx is None:
            return self.grid.decode(self.codes, self.params).to(dtype)
        order = torch.argsort(self.g_idx.long(), stable=True)
        values = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        values[:, order] = self.grid.decode(self.codes[:, order], self.params).to(dtype)
        return values

    def nbytes(self) -> int:
        """Stored size in bytes, parameters included."""
        out, n = self.shape
        return round(self.grid.bits_per_weight(n) * out * n / 8)
