"""K-quants: super-blocks of 256 weights whose sub-blocks have integer scales (and minima) under fp16 super-scales.

The bytes are laid out in llama.cpp's ggml-common.h; here codes and parameters are unpacked, see each class.
"""

import itertools

import torch
from torch import Tensor

from formats.grids.search import (
    MinimumSquares,
    Snap,
    best_of,
    fit_blocks,
    half,
    inverse,
    ratio,
    scale_error,
    scale_squares,
    search_scale,
    search_scale_minimum,
    signed_peak,
)
from formats.qtensor import Columns, Factor, IntegerLevels, Params

SUPER = 256


def spread_super(params: Params, super_scale: str, sub_scale: str, n: int) -> Tensor:
    """fp16 [out, superblocks] times integers [out, superblocks, subs], over n columns: float32 [out, n]."""
    sub = params[super_scale].float().unsqueeze(-1) * params[sub_scale].float()
    return sub.flatten(1).repeat_interleave(SUPER // sub.shape[-1], dim=1)[:, :n]


class SubScaleMinBlock(IntegerLevels):
    """q2_k, q4_k, q5_k: `(scale * sub_scale) * code - minimum * sub_minimum`.

    params: scale, minimum fp16 [out, superblocks]; sub_scale, sub_minimum uint8 [out, superblocks, subs], 0..sub_top.
    """

    minimum_sign = -1.0

    def __init__(self, name: str, bits: int, subs: int, sub_bits: int) -> None:
        super().__init__(name, SUPER, bits)
        self.subs, self.sub_bits, self.sub_top = subs, sub_bits, (1 << sub_bits) - 1
        integers = (0, self.sub_top)
        self.factors = (
            Factor(SUPER // subs, "sub_scale", "sub_minimum", integers, integers),
            Factor(SUPER, "scale", "minimum"),
        )

    def bits_per_weight(self, in_features: int) -> float:
        return self.bits + (2 * self.sub_bits * self.subs + 2 * 16) / SUPER

    def columns(self, params: Params, n: int) -> Columns:
        return Columns(
            spread_super(params, "scale", "sub_scale", n), offset=spread_super(params, "minimum", "sub_minimum", n)
        )

    def fit(self, w: Tensor, importance: Tensor | None = None) -> Params:
        return fit_blocks(self._fit, SUPER, w, importance)

    def _fit(self, x: Tensor, weight: Tensor) -> Params:
        search = _SuperScaleMin(self, x, weight)
        scale, minimum = search_scale_minimum(search.x, search.weight, self.bits, lowered=True)
        largest, deepest = scale.amax(0), -minimum.amin(0)
        # with few bits it pays to clip the largest sub-scale, and more so the deepest minimum
        places = itertools.product(*(((1, 0.87, 0.75), (1, 0.8, 0.6)) if self.sub_bits == 4 else ((1, 0.98),) * 2))
        starts = [(half(largest * i / self.sub_top), half(deepest * j / self.sub_top)) for i, j in places]
        state, _ = best_of((search.settle(d, dm, scale, minimum) for d, dm in starts), search.error)
        state, _ = best_of(search.descend(*state), search.error)
        return search.params(*state)


class _SuperScaleMin:
    """The search over (scale, minimum, sub_scale, sub_minimum): [N], [N], [subs, N], [subs, N], all float32."""

    def __init__(self, grid: SubScaleMinBlock, x: Tensor, weight: Tensor) -> None:
        self.grid, self.top = grid, grid.top
        self.x, self.weight = (t.unflatten(0, (grid.subs, -1)) for t in (x, weight))
        self.squares = MinimumSquares(self.x, self.weight, lowered=True)

    def params(self, d: Tensor, dm: Tensor, sub: Tensor, low: Tensor) -> Params:
        return {
            "scale": d.half(),
            "minimum": dm.half(),
            "sub_scale": sub.t().to(torch.uint8),
            "sub_minimum": low.t().to(torch.uint8),
        }

    def integer(self, t: Tensor) -> Tensor:
        return t.round().clamp(0, self.grid.sub_top)

    def settle(self, d: Tensor, dm: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, ...]:
        """From real scales and minima [subs, N] to a state, improved twice."""
        start = d, dm, self.integer(scale * inverse(d)), self.integer(-minimum * inverse(dm))
        return self.improve(*self.improve(*start))

    def sub_errors(self, d: Tensor, dm: Tensor, sub: Tensor, low: Tensor) -> Tensor:
        return self.squares.error(d * sub, -(dm * low), self.top)

    def error(self, *state: Tensor) -> Tensor:
        return self.sub_errors(*state).sum(0)

    def improve(self, d: Tensor, dm: Tensor, sub: Tensor, low: Tensor) -> tuple[Tensor, ...]:
        """With the codes these parameters give: better integers, then better super-scales."""
        return self.solve(self.squares.codes(d * sub, -(dm * low), self.top), d, dm, sub, low)

    def solve(self, codes: Tensor, d: Tensor, dm: Tensor, sub: Tensor, low: Tensor) -> tuple[Tensor, ...]:
        squares, inv, inv_low = self.squares, inverse(d), inverse(dm)
        linear, quadratic, products = squares.sums(codes)
        products = products + squares.mean * linear

        def loss(sub: Tensor, low: Tensor) -> Tensor:  # up to a constant
            s, m = d * sub, dm * low
            return s * (s * quadratic - 2 * products - 2 * m * linear) + m * (m + 2 * squares.mean) * squares.total

        best = (squares.solve(codes)[0] * inv).floor()
        candidates = [(sub, low)]
        for step in (0, 1):
            integer = self.integer(best + step)
            candidates.append((integer, self.integer(-squares.minimum(codes, d * integer) * inv_low)))
        (sub, low), _ = best_of(candidates, loss)
        a, c = (sub * sub * quadratic).sum(0), (low * low * squares.total).sum(0)
        b = (sub * low * linear).sum(0)
        u, v = (sub * products).sum(0), -(low * squares.mean * squares.total).sum(0)
        new_dm = half(ratio(a * v + b * u, a * c - b * b).clamp(min=0))
        new_d = half(ratio(u + new_dm * b, a))
        return torch.where(new_d > 0, new_d, d), new_dm, sub, low

    def descend(self, *state: Tensor) -> "list[tuple[Tensor, ...]]":
        """Coordinate descent on the integers by the error after rounding, each sub-block on its own."""
        states = [state]
        for _ in range(2):
            d, dm, sub, low = state = self.improve(*state)
            states.append(state)
            candidates = [(sub, low)]
            for step in (-1, 0, 1):
                moved = self.integer(sub + step)
                codes = self.squares.codes(d * moved, -(dm * low), self.top)
                lowest = self.integer(-self.squares.minimum(codes, d * moved) * inverse(dm))
                candidates += [(moved, self.integer(lowest + shift)) for shift in (0, -1, 1)]
            (sub, low), _ = best_of(candidates, lambda s, m, d=d, dm=dm: self.sub_errors(d, dm, s, m))
            state = (d, dm, sub, low)
            states.append(state)
        return states


class SuperScale:
    """The search for x ~ (scale * sub_scale) * level, whatever the levels: state (scale [N], sub_scale [subs, N]).

    x, weight: [256, N]. snap, ends, bits: the levels, as for `search_scale`. sub_bits: of the signed sub-scales.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, snap: Snap, ends: tuple[float, float], bits: int, subs: int, sub_bits: int
    ) -> None:
        self.x, self.weight = (t.unflatten(0, (subs, -1)) for t in (x, weight))
        self.snap, self.ends, self.bits = snap, ends, bits
        self.lowest, self.highest = -(1 << sub_bits - 1), (1 << sub_bits - 1) - 1

    def fit(self) -> Params:
        scale = search_scale(self.x, self.weight, self.snap, self.ends, self.bits, signed=True)
        peak = signed_peak(scale)
        places = torch.linspace(0.7, 1, 4).tolist()
        starts = [half(peak * place / end) for place in places for end in (self.lowest, self.highest)]
        state, _ = best_of((self.improve(d, self.integer(scale * inverse(d))) for d in starts), self.error)
        state, _ = best_of(self.descend(*state), self.error)
        return self.params(*state)

    def params(self, d: Tensor, sub: Tensor) -> Params:
        return {"scale": d.half(), "sub_scale": sub.t().to(torch.int8)}

    def integer(self, t: Tensor) -> Tensor:
        return t.round().clamp(self.lowest, self.highest)

    def sub_errors(self, d: Tensor, sub: Tensor) -> Tensor:
        return scale_error(self.x, self.weight, self.snap, d * sub)

    def error(self, d: Tensor, sub: Tensor) -> Tensor:
        return self.sub_errors(d, sub).sum(0)

    def improve(self, d: Tensor, sub: Tensor) -> tuple[Tensor, Tensor]:
        """With the levels these scales give: better integers, then a better super-scale."""
        return self.solve(self.snap(self.x * inverse(d * sub).unsqueeze(-2)), d, sub)

    def solve(self, level: Tensor, d: Tensor, sub: Tensor) -> tuple[Tensor, Tensor]:
        products, squares = scale_squares(self.x, self.weight, level)
        best = self.integer(ratio(products, squares) * inverse(d))
        (sub,), _ = best_of([(sub,), (best,)], lambda s: d * s * (d * s * squares - 2 * products))
        new = half(ratio((sub * products).sum(0), (sub * sub * squares).sum(0)))
        return torch.where(new == 0, d, new), sub

    def descend(self, d: Tensor, sub: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Coordinate descent on the integers by the error after rounding, each sub-block on its own."""
        states = [(d, sub)]
        steps = sorted(range(self.lowest // 8, -self.lowest // 8 + 1), key=abs)
        for _ in range(2):
            d, sub = self.improve(d, sub)
            states.append((d, sub))
            moves = [(self.integer(sub + step),) for step in steps]
            (sub,), _ = best_of(moves, lambda s, d=d: self.sub_errors(d, s))
            states.append((d, sub))
        return states


class SubScaleBlock(IntegerLevels):
    """q3_k, q6_k: `(scale * sub_scale) * level`, 16 sub-blocks of 16.

    params: scale fp16 [out, superblocks]; sub_scale int8 [out, superblocks, 16], -2^(sub_bits-1) .. 2^(sub_bits-1)-1.
    """

    def __init__(self, name: str, bits: int, sub_bits: int) -> None:
        super().__init__(name, SUPER, bits, -(1 << bits - 1))
        self.sub_bits = sub_bits
        integers = (-(1 << sub_bits - 1), (1 << sub_bits - 1) - 1)
        self.factors = (Factor(16, "sub_scale", scale_range=integers), Factor(SUPER, "scale"))

    def bits_per_weight(self, in_features: int) -> float:
        return self.bits + (self.sub_bits * 16 + 16) / SUPER

    def columns(self, params: Params, n: int) -> Columns:
        return Columns(spread_super(params, "scale", "sub_scale", n))

    def fit(self, w: Tensor, importance: Tensor | None = None) -> Params:
        def fit(x: Tensor, weight: Tensor) -> Params:
            return SuperScale(x, weight, self.round_levels, self.ends, self.bits, 16, self.sub_bits).fit()

        return fit_blocks(fit, SUPER, w, importance)


Q2_K = SubScaleMinBlock("q2_k", 2, 16, 4)
Q3_K = SubScaleBlock("q3_k", 3, 6)
Q4_K = SubScaleMinBlock("q4_k", 4, 8, 6)
Q5_K = SubScaleMinBlock("q5_k", 5, 8, 6)
Q6_K = SubScaleBlock("q6_k", 6, 8)
