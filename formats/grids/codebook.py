"""Grids whose levels are a table: llama.cpp's iq4_nl and iq4_xs, QLoRA's nf4, and the OCP's mxfp4."""

from collections.abc import Sequence

import torch
from torch import Tensor

from formats.grids.affine import OneScale
from formats.grids.kquant import SUPER, SuperScale, spread_super
from formats.grids.search import (
    best_of,
    fit_blocks,
    ratio,
    scale_error,
    search_scale,
)
from formats.qtensor import Columns, Factor, Grid, Params

_CELLS = 4096


class Codebook(Grid):
    """A 4-bit grid with a table of 16 levels."""

    bits = 4

    def __init__(self, name: str, block: int | None, levels: Sequence[float]) -> None:
        self.name, self.block = name, block
        self.level_table = torch.tensor(levels, dtype=torch.float32)
        self.ends = min(levels), max(levels)
        # the level nearest to the middle of each of many equal cells: rounding by lookup, for searches
        self._cell = (self.ends[1] - self.ends[0]) / _CELLS
        centres = self.ends[0] + self._cell * (torch.arange(_CELLS) + 0.5)
        self._lookup = self.level_table[self._nearest_level(centres).long()]

    def round_levels(self, x: Tensor) -> Tensor:
        """The nearest levels; within 1/4096 of the range of a tie either neighbour may win."""
        cell = x.sub_(self.ends[0]).mul_(1 / self._cell).clamp_(0, _CELLS - 1).to(torch.int32)
        return self._lookup.to(x.device).index_select(0, cell.flatten()).view(x.shape)


class ScaleCodebook(OneScale, Codebook):
    """iq4_nl."""


class SubScaleCodebook(Codebook):
    """iq4_xs: `(scale * sub_scale) * level`, 8 sub-blocks of 32.

    params: scale fp16 [out, superblocks]; sub_scale int8 [out, superblocks, 8], -32..31.
    """

    factors = (Factor(32, "sub_scale", scale_range=(-32, 31)), Factor(SUPER, "scale"))

    def bits_per_weight(self, in_features: int) -> float:
        return 4 + (8 * 6 + 16) / SUPER

    def columns(self, params: Params, n: int) -> Columns:
        return Columns(spread_super(params, "scale", "sub_scale", n))

    def fit(self, w: Tensor, importance: Tensor | None = None) -> Params:
        def fit(x: Tensor, weight: Tensor) -> Params:
            return SuperScale(x, weight, self.round_levels, self.ends, self.bits, subs=8, sub_bits=6).fit()

        return fit_blocks(fit, SUPER, w, importance)


def dynamic_map() -> Tensor:
    """bitsandbytes' signed 8-bit "dynamic" code, float32 [256], ascending: for each decade 10^-6 .. 1, twice as many
    values as for the one below, evenly spaced between a tenth of it and itself; and 0, and 1."""
    values = [torch.tensor([0.0, 1.0])]
    for i in range(7):
        edges = torch.linspace(0.1, 1, (1 << i) + 1)
        middles = 10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [middles, -middles]
    return torch.cat(values).sort().values


class NestedCodebook(Codebook):
    """nf4 with double quantisation, as bitsandbytes stores it: `(map[sub_scale] * scale + offset) * level`.

    Blocks of 64 weights; the 8-bit block scales are themselves in groups of 256, counted along the flattened matrix,
    and one offset serves the whole matrix, so that it can only be fitted whole (`block` is None).
    params: sub_scale uint8 [out, blocks] (index into the dynamic map); scale, offset float32 [out, blocks], repeated
    for all blocks that share one: `scale.flatten()[::256]` and `offset[0, 0]` are what a file holds.
    """

    width, group = 64, 256

    def __init__(self, name: str, levels: Sequence[float]) -> None:
        super().__init__(name, None, levels)
        self.map = dynamic_map()

    def bits_per_weight(self, in_features: int) -> float:
        blocks = -(-in_features // self.width)
        return 4 + blocks / in_features * (8 + 32 / self.group)

    def _absmax(self, params: Params) -> Tensor:
        return self.map.to(params["scale"].device)[params["sub_scale"].long()] * params["scale"] + params["offset"]

    def columns(self, params: Params, n: int) -> Columns:
        return Columns(self._absmax(params).repeat_interleave(self.width, dim=1)[:, :n])

    def _nested(self, absmax: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """Indices of the map values nearest to (absmax - offset) / scale."""
        values = self.map.to(absmax.device)
        return torch.bucketize(ratio(absmax - offset, scale), (values[1:] + values[:-1]) / 2)

    def fit(self, w: Tensor, importance: Tensor | None = None) -> Params:
        def ideal(x: Tensor, weight: Tensor) -> Params:
            return {"absmax": search_scale(x, weight, self.round_levels, self.ends, self.bits, signed=False)}

        def settle(x: Tensor, weight: Tensor, old: Params) -> Params:
            code = self._nested(old["absmax"], old["scale"], old["offset"])
            moves = [((code + step).clamp(0, 255),) for step in (0, -1, 1, -2, 2)]

            def error(code: Tensor) -> Tensor:
                return scale_error(x, weight, self.round_levels, self._absmax({**old, "sub_scale": code}))

            return {"sub_scale": best_of(moves, error)[0][0].to(torch.uint8)}

        found = fit_blocks(ideal, self.width, w, importance)
        absmax = found["absmax"].flatten()
        offset = absmax.median()  # a mean would follow a few huge blocks away from all others
        spread = torch.nn.functional.pad((absmax - offset).abs(), (0, -len(absmax) % self.group))
        scale = spread.view(-1, self.group).amax(1).repeat_interleave(self.group)[: len(absmax)]
        shared = {"scale": scale.view_as(found["absmax"]), "offset": offset.expand_as(found["absmax"]).contiguous()}
        return {**shared, **fit_blocks(settle, self.width, w, importance, params={**found, **shared})}


class ExponentCodebook(Codebook):
    """mxfp4: 32 weights share a power of two. params: exponent uint8 [out, blocks].

    The table holds twice the e2m1 values, as GGUF has it, and the scale half the e8m0 one: 2^(exponent - 128).
    """

    def bits_per_weight(self, in_features: int) -> float:
        return 4 + 8 / 32

    def _scale(self, exponent: Tensor) -> Tensor:
        e = exponent.int()
        return torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1) << 23).view(torch.float32)

    def columns(self, params: Params, n: int) -> Columns:
        return Columns(self._scale(params["exponent"]).repeat_interleave(32, dim=1)[:, :n])

    def fit(self, w: Tensor, importance: Tensor | None = None) -> Params:
        def fit(x: Tensor, weight: Tensor) -> Params:
            usual = torch.frexp(x.abs().amax(-2)).exponent - 3 + 127  # floor(log2(peak)) - 2, biased
            # 1 / scale stays finite from 2 on, and no weight needs less
            moves = [((usual + step).clamp(2, 254).float(),) for step in (0, 1, -1, -2, -3, -4)]
            (e,), _ = best_of(moves, lambda e: scale_error(x, weight, self.round_levels, self._scale(e)))
            return {"exponent": e.to(torch.uint8)}

        return fit_blocks(fit, 32, w, importance)


_IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
IQ4_NL = ScaleCodebook("iq4_nl", 32, _IQ4)
IQ4_XS = SubScaleCodebook("iq4_xs", SUPER, _IQ4)
# fmt: off
NF4 = NestedCodebook("nf4", [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])
# fmt: on
MXFP4 = ExponentCodebook("mxfp4", 32, [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
