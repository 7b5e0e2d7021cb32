"""Affine grids: `scale * (code - zero)` of 2-8 bits in groups of any size, and GGUF's 32-wide blocks."""

import torch
from torch import Tensor

from formats.grids.search import (
    MinimumSquares,
    Snap,
    best_of,
    clip_ranges,
    fit_blocks,
    fit_scale,
    half,
    inverse,
    near_halves,
    ratio,
    scale_squares,
    search_scale_minimum,
)
from formats.qtensor import Columns, Factor, IntegerLevels, Params


def _expand(param: Tensor, block: int | None, n: int) -> Tensor:
    """A parameter [out, groups] spread over n columns, float32."""
    return param.float().repeat_interleave(block or n, dim=1)[:, :n]


def _fit_asymmetric(x: Tensor, weight: Tensor, bits: int) -> Params:
    """fp16 scale and integer zero of x ~ scale * (code - zero), searched together."""
    top = (1 << bits) - 1
    low, high = x.amin(-2).clamp(max=0), x.amax(-2).clamp(min=0)
    total = weight.sum(-2)
    mean = ratio((weight * x).sum(-2), total)
    spread = ratio((weight * (x - mean).square_()).sum(-2), total).sqrt()

    def levels(scale: Tensor, zero: Tensor) -> Tensor:
        level = (x * inverse(scale)).round_()
        return torch.minimum(torch.maximum(level, -zero, out=level), top - zero, out=level)

    def error(scale: Tensor, zero: Tensor) -> Tensor:
        return levels(scale, zero).mul_(scale).sub_(x).square_().mul_(weight).sum(-2)

    plain = half((high - low) / top)
    plain_zero = (-low * inverse(plain)).round().clamp(0, top)
    scale, zero, gain = torch.zeros_like(low), plain_zero, torch.zeros_like(low)
    for start, end in clip_ranges(low, high, mean, spread, bits):
        step = (end - start).clamp(min=0) / top
        candidate = (-start * inverse(step)).round().clamp(0, top)
        products, squares = scale_squares(x, weight, levels(step, candidate))
        best = ratio(products, squares)
        better = (products * best > gain) & (best > 0)
        gain = torch.where(better, products * best, gain)
        scale, zero = torch.where(better, best, scale), torch.where(better, candidate, zero)
    for _ in range(2):
        scale = ratio(*scale_squares(x, weight, levels(scale, zero))).clamp(min=0)
    candidates = [(plain, plain_zero)] + [(s, zero) for s in near_halves(scale)]
    candidates += [(half(scale), (zero + step).clamp(0, top)) for step in (-1, 1)]
    (scale, zero), _ = best_of(candidates, error)
    return {"scale": scale.half(), "zero": zero.to(torch.uint8)}


def _fit_scale_minimum(x: Tensor, weight: Tensor, bits: int) -> Params:
    """fp16 scale and minimum of x ~ scale * code + minimum; each scale near the best gets its own best minimum."""
    top = (1 << bits) - 1
    squares = MinimumSquares(x, weight, lowered=False)
    low, high = x.amin(-2), x.amax(-2)
    found, minimum = search_scale_minimum(x, weight, bits)
    codes = squares.codes(found, minimum, top)
    candidates = [(half((high - low) / top), half(low)), (half(found), half(minimum))]
    candidates += [(s, half(squares.minimum(codes, s))) for s in near_halves(found)]
    (scale, minimum), _ = best_of(candidates, lambda s, m: squares.error(s, m, top))
    return {"scale": scale.half(), "minimum": minimum.half()}


class AffineGrid(IntegerLevels):
    """2-8 bit integers, one fp16 scale (and, unless symmetric, one integer zero point) per group or row.

    params: scale fp16 [out, groups], positive; zero uint8 [out, groups] when asymmetric. Symmetric codes are offset by
    2**(bits-1), so that code 0 is the most negative level.
    """

    def __init__(self, bits: int, group_size: int | None, symmetric: bool) -> None:
        shape = f"g{group_size}" if group_size else "channel"
        super().__init__(
            f"int{bits}-{shape}{'-sym' if symmetric else ''}", group_size, bits, -(1 << bits - 1) if symmetric else 0
        )
        self.symmetric = symmetric
        self.factors = (Factor(group_size, "scale"),)

    def bits_per_weight(self, in_features: int) -> float:
        groups = -(-in_features // (self.block or in_features))
        return self.bits + groups * (16 if self.symmetric else 16 + self.bits) / in_features

    def fit(self, w: Tensor, importance: Tensor | None = None) -> Params:
        def fit(x: Tensor, weight: Tensor) -> Params:
            if self.symmetric:
                return fit_scale(x, weight, self.round_levels, self.ends, self.bits, signed=False)
            return _fit_asymmetric(x, weight, self.bits)

        return fit_blocks(fit, self.block or w.shape[1], w, importance)

    def columns(self, params: Params, n: int) -> Columns:
        zero = None if self.symmetric else _expand(params["zero"], self.block, n)
        return Columns(_expand(params["scale"], self.block, n), zero=zero)


class OneScale:
    """32 weights share an fp16 scale of either sign, whatever the levels. params: scale fp16 [out, blocks]."""

    factors: tuple[Factor, ...] = (Factor(32, "scale"),)
    bits: int
    ends: tuple[float, float]
    round_levels: Snap

    def bits_per_weight(self, in_features: int) -> float:
        return self.bits + 16 / 32

    def fit(self, w: Tensor, importance: Tensor | None = None) -> Params:
        def fit(x: Tensor, weight: Tensor) -> Params:
            return fit_scale(x, weight, self.round_levels, self.ends, self.bits, signed=True)

        return fit_blocks(fit, 32, w, importance)

    def columns(self, params: Params, n: int) -> Columns:
        return Columns(_expand(params["scale"], 32, n))


class ScaleBlock(OneScale, IntegerLevels):
    """GGUF's q4_0, q5_0, q8_0."""


class ScaleMinBlock(IntegerLevels):
    """GGUF's q4_1, q5_1: `scale * code + minimum`. params: scale, minimum fp16 [out, blocks]."""

    factors = (Factor(32, "scale", "minimum"),)

    def bits_per_weight(self, in_features: int) -> float:
        return self.bits + 32 / 32

    def fit(self, w: Tensor, importance: Tensor | None = None) -> Params:
        return fit_blocks(lambda x, weight: _fit_scale_minimum(x, weight, self.bits), 32, w, importance)

    def columns(self, params: Params, n: int) -> Columns:
        return Columns(_expand(params["scale"], 32, n), offset=-_expand(params["minimum"], 32, n))


Q4_0 = ScaleBlock("q4_0", 32, 4, -8)
Q5_0 = ScaleBlock("q5_0", 32, 5, -16)
Q8_0 = ScaleBlock("q8_0", 32, 8, -128)
Q4_1 = ScaleMinBlock("q4_1", 32, 4)
Q5_1 = ScaleMinBlock("q5_1", 32, 5)
