"""Searches for the parameters of a number format that leave the least weighted squared error.

Everything works on blocks laid out as [..., width, N]: the weights of a block lie along dim -2 and N blocks side by
side along the last one, so that sums over a block are plain vector additions. Parameters are [..., N]. `weight` is the
importance of each element, normalised so that its mean over a row is 1.
"""

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from formats.qtensor import Params

Snap = Callable[[Tensor], Tensor]
"""Replaces each element by the nearest level of the format (it may work in place)."""

_CHUNK = 1 << 17  # weights fitted at a time: temporaries stay in the processor's cache, and in the allocator's hands
_LARGEST = 1e9  # beyond anything an fp16 scale reaches; keeps squares finite
_HALF = torch.finfo(torch.float16)


def fit_blocks(
    fit: Callable[..., Params],
    width: int,
    w: Tensor,
    importance: Tensor | None,
    params: Params | None = None,
) -> Params:
    """Run `fit(x, weight) -> {name: [N] or [N, subs]}` over w [out, n] in chunks of rows.

    importance: [n], [out, n] or None. A ragged last block is padded with copies of its last weight, of no importance.
    params found before are cut alike and passed on: `fit(x, weight, params)`.
    Returns the parameters as [out, blocks] or [out, blocks, subs].
    """
    n = w.shape[1]
    blocks, rows = -(-n // width), max(1, _CHUNK // n)

    def cut(t: Tensor) -> Tensor:
        if n % width:
            t = torch.cat([t, t[:, -1:].expand(-1, blocks * width - n)], dim=1)
        return t.reshape(-1, width).t().contiguous()

    parts: list[Params] = []
    for start in range(0, len(w), rows):
        chunk = slice(start, start + rows)
        x = w[chunk].float().clamp(-_LARGEST, _LARGEST)
        weight = cut(_normalised(importance if importance is None or importance.dim() == 1 else importance[chunk], x))
        if n % width:
            weight.view(width, -1, blocks)[n % width :, :, -1] = 0
        given = [] if params is None else [{name: p[chunk].flatten(0, 1) for name, p in params.items()}]
        part = fit(cut(x), weight, *given)
        parts.append({name: p.unflatten(0, (-1, blocks)) for name, p in part.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _normalised(importance: Tensor | None, x: Tensor) -> Tensor:
    """Importance as positive weights of mean 1 per row, [rows, n]; uniform where it says nothing at all."""
    if importance is None:
        return torch.ones_like(x)
    weight = importance.float().to(x.device).expand_as(x)
    mean = weight.mean(1, keepdim=True)
    # the floor decides only between parameters that the importance cannot tell apart
    return torch.where(mean > 0, weight / mean, torch.ones_like(mean)) + 1e-9


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is not positive."""
    return torch.where(b > 0, a / b, torch.zeros_like(a))


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for 0."""
    return torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)


def half(t: Tensor) -> Tensor:
    """t as fp16 would store it (saturating), in float32."""
    return t.clamp(_HALF.min, _HALF.max).half().float()


def near_halves(t: Tensor) -> list[Tensor]:
    """The fp16 value nearest to t and its neighbours on either side."""
    return [half(t), half(t * (1 - 2**-11)), half(t * (1 + 2**-11))]


def best_of(
    candidates: Iterable[tuple[Tensor, ...]], error: Callable[..., Tensor]
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Per block, the candidate of least `error(*candidate)`; also returns that error."""
    best: tuple[Tensor, ...] | None = None
    least = torch.empty(0)
    for candidate in candidates:
        e = error(*candidate)
        if best is None:
            best, least = candidate, e
            continue
        better = e < least
        best = tuple(torch.where(better, new, old) for new, old in zip(candidate, best, strict=True))
        least = torch.where(better, e, least)
    assert best is not None
    return best, least


def reach(bits: int) -> float:
    """Where a uniform quantiser of so many bits clips a normal distribution at its best, in standard deviations."""
    return 1.25 + 0.36 * bits


def signed_peak(x: Tensor) -> Tensor:
    """The element of largest magnitude, with its sign."""
    high, low = x.amax(-2), x.amin(-2)
    return torch.where(high >= -low, high, low)


def scale_squares(x: Tensor, weight: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """(sum w*x*level, sum w*level^2): their ratio is the best scale of these levels."""
    weighted = weight * level
    squares = (level * weighted).sum(-2)
    return weighted.mul_(x).sum(-2), squares


def scale_error(x: Tensor, weight: Tensor, snap: Snap, scale: Tensor) -> Tensor:
    """Weighted squared error of rounding x to scale * level."""
    residual = snap(x * inverse(scale).unsqueeze(-2)).mul_(scale.unsqueeze(-2)).sub_(x)
    return residual.square_().mul_(weight).sum(-2)


def search_scale(x: Tensor, weight: Tensor, snap: Snap, ends: tuple[float, float], bits: int, signed: bool) -> Tensor:
    """The scale of x ~ scale * level, float32 [..., N], before rounding to the format's precision.

    Candidates run geometrically from just above the one that maps the largest weight to the end of the levels down to
    the one that clips at the spread of the block; each is judged with the least-squares scale of its codes.
    ends: lowest and highest level. signed: may the scale be negative, to give the largest weight the longer side?
    """
    peak = signed_peak(x)
    natural = torch.where(peak < 0, ends[0], ends[1])
    spread = ratio((weight * x).mul_(x).sum(-2), weight.sum(-2)).sqrt()
    margin = max(1.6 / (1 << bits - 1), 0.06)
    tightest = torch.maximum(ratio(peak.abs(), 0.55 * reach(bits) * spread), torch.full_like(peak, 1 + margin))
    best, gain = torch.zeros_like(peak), torch.zeros_like(peak)
    for end in (natural, ends[0] + ends[1] - natural) if signed else (natural,):
        base = end * inverse(peak)
        for t in torch.linspace(0, 1, 32).tolist():
            factor = base * ((1 - margin) ** (1 - t) * tightest**t)
            products, squares = scale_squares(x, weight, snap(x * factor.unsqueeze(-2)))
            candidate = ratio(products, squares)
            better = products * candidate > gain
            gain = torch.where(better, products * candidate, gain)
            best = torch.where(better, candidate, best)
    for _ in range(2):
        best = ratio(*scale_squares(x, weight, snap(x * inverse(best).unsqueeze(-2))))
    return best


def fit_scale(
    x: Tensor, weight: Tensor, snap: Snap, ends: tuple[float, float], bits: int, signed: bool
) -> dict[str, Tensor]:
    """The fp16 scale of x ~ scale * level; never worse than the usual one, which maps the peak to an end."""
    peak = signed_peak(x)
    usual = [half(peak.abs() / ends[1]), half(peak.abs() / -ends[0])]
    if signed:
        usual.append(half(peak / ends[0]))
    searched = near_halves(search_scale(x, weight, snap, ends, bits, signed))
    (scale,), _ = best_of(((s,) for s in usual + searched), lambda s: scale_error(x, weight, snap, s))
    return {"scale": scale.half()}


class MinimumSquares:
    """Least squares of x ~ scale * code + minimum over blocks, around the weighted mean for precision.

    lowered: the format stores only minima of 0 or below.
    """

    def __init__(self, x: Tensor, weight: Tensor, lowered: bool) -> None:
        self.weight, self.total, self.lowered = weight, weight.sum(-2), lowered
        self.mean = ratio((weight * x).sum(-2), self.total)
        self.centred = x - self.mean.unsqueeze(-2)
        self.weighted = weight * self.centred

    def spread(self) -> Tensor:
        return ratio((self.weighted * self.centred).sum(-2), self.total).sqrt()

    def codes(self, scale: Tensor, minimum: Tensor, top: int) -> Tensor:
        inv = inverse(scale)
        q = self.centred * inv.unsqueeze(-2)
        return q.add_(((self.mean - minimum) * inv).unsqueeze(-2)).round_().clamp_(0, top)

    def sums(self, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(sum w*q, sum w*q^2, sum w*(x - mean)*q)."""
        weighted = self.weight * codes
        linear = weighted.sum(-2)
        return linear, weighted.mul_(codes).sum(-2), (self.weighted * codes).sum(-2)

    def solve(self, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Best (scale, minimum) for these codes, and how much of the error about the mean they take away."""
        linear, squares, products = self.sums(codes)
        scale = ratio(products, squares - ratio(linear * linear, self.total))
        minimum = -ratio(scale * linear, self.total)
        if self.lowered:
            minimum = torch.minimum(minimum, -self.mean)
            scale = ratio(products - minimum * linear, squares)
        gain = scale * (2 * products - scale * squares - 2 * minimum * linear) - minimum * minimum * self.total
        return scale, minimum + self.mean, gain

    def minimum(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Best minimum for these codes and this scale."""
        return self.mean - scale * ratio((self.weight * codes).sum(-2), self.total)

    def error(self, scale: Tensor, minimum: Tensor, top: int) -> Tensor:
        """Weighted squared error with the nearest codes."""
        residual = self.codes(scale, minimum, top).mul_(scale.unsqueeze(-2)).sub_(self.centred)
        residual += (minimum - self.mean).unsqueeze(-2)
        return residual.square_().mul_(self.weight).sum(-2)


def clip_ranges(low: Tensor, high: Tensor, mean: Tensor, spread: Tensor, bits: int) -> Iterable[Tensor]:
    """Candidate ranges (low, high), stacked [2, ..., N]: each end moves on its own from a little outside the block's
    extreme to where a normal distribution of that spread would be clipped, one step of the grid at least."""
    step = 1.6 * (high - low) / ((1 << bits) - 1)
    limit = 0.55 * reach(bits) * spread
    rise, fall = torch.maximum(mean - limit - low, step), torch.maximum(high - mean - limit, step)
    places = torch.linspace(-0.5, 1, min(bits, 5) + 5).tolist()
    for i in places:
        for j in places:
            yield torch.stack([low + i * rise, high - j * fall])


def search_scale_minimum(x: Tensor, weight: Tensor, bits: int, lowered: bool = False) -> tuple[Tensor, Tensor]:
    """The (scale, minimum) of x ~ scale * code + minimum, codes 0..2^bits-1, before rounding to stored precision."""
    top = (1 << bits) - 1
    squares = MinimumSquares(x, weight, lowered)
    low, high = x.amin(-2), x.amax(-2)
    if lowered:
        low, high = low.clamp(max=0), high.clamp(min=0)
    scale, minimum = torch.zeros_like(low), squares.mean.clamp(max=0) if lowered else squares.mean
    gain = -((minimum - squares.mean) ** 2) * squares.total
    ranges = clip_ranges(low, high, squares.mean, squares.spread(), bits)
    for bounds in itertools.chain(ranges, (None,) * 2):  # None: start again from the best so far
        start, step = (minimum, scale) if bounds is None else (bounds[0], (bounds[1] - bounds[0]).clamp(min=0) / top)
        s, m, g = squares.solve(squares.codes(step, start, top))
        better = (g > gain) & (s > 0)
        scale, minimum = torch.where(better, s, scale), torch.where(better, m, minimum)
        gain = torch.where(better, g, gain)
    return scale, minimum
