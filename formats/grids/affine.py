"""Affine grids: `scale * (code - zero)` of 2-8 bits in groups of any size, and GGUF's 32-wide blocks."""

import torch
from torch import Tensor

from formats.qtensor import Columns, IntegerLevels, Params


def _groups(w: Tensor, block: int | None) -> Tensor:
    """[out, n] -> [out, groups, block]; a ragged last group is padded by repeating its first column."""
    out, n = w.shape
    block = block or n
    ragged = n % block
    if ragged:
        w = torch.cat([w, w[:, n - ragged :][:, :1].expand(out, block - ragged)], dim=1)
    return w.reshape(out, -1, block)


def _expand(param: Tensor, block: int | None, n: int) -> Tensor:
    """A parameter [out, groups] spread over n columns, float32."""
    return param.float().repeat_interleave(block or n, dim=1)[:, :n]


class AffineGrid(IntegerLevels):
    """2-8 bit integers, one fp16 scale (and, unless symmetric, one integer zero point) per group or row.

    params: scale fp16 [out, groups]; zero uint8 [out, groups] when asymmetric. Symmetric codes are offset by
    2**(bits-1), so that code 0 is the most negative level.
    """

    def __init__(self, bits: int, group_size: int | None, symmetric: bool) -> None:
        shape = f"g{group_size}" if group_size else "channel"
        super().__init__(
            f"int{bits}-{shape}{'-sym' if symmetric else ''}", group_size, bits, -(1 << bits - 1) if symmetric else 0
        )
        self.symmetric = symmetric

    def bits_per_weight(self, in_features: int) -> float:
        groups = -(-in_features // (self.block or in_features))
        return self.bits + groups * (16 if self.symmetric else 16 + self.bits) / in_features

    def fit(self, w: Tensor, importance: Tensor | None = None) -> Params:
        g = _groups(w, self.block)
        if self.symmetric:
            scale = g.abs().amax(-1) / (self.top / 2)
            return {"scale": scale.clamp(min=1e-7).half()}
        low, high = g.amin(-1).clamp(max=0), g.amax(-1).clamp(min=0)
        scale = ((high - low) / self.top).clamp(min=1e-7).half()
        return {"scale": scale, "zero": (-low / scale.float()).round().clamp(0, self.top).to(torch.uint8)}

    def columns(self, params: Params, n: int) -> Columns:
        zero = None if self.symmetric else _expand(params["zero"], self.block, n)
        return Columns(_expand(params["scale"], self.block, n), zero=zero)


class ScaleBlock(IntegerLevels):
    """GGUF's q4_0, q5_0, q8_0: 32 weights share an fp16 scale. params: scale fp16 [out, blocks]."""

    def bits_per_weight(self, in_features: int) -> float:
        return self.bits + 16 / 32

    def fit(self, w: Tensor, importance: Tensor | None = None) -> Params:
        return {"scale": (_groups(w, 32).abs().amax(-1) / (self.top / 2)).half()}

    def columns(self, params: Params, n: int) -> Columns:
        return Columns(_expand(params["scale"], 32, n))


class ScaleMinBlock(IntegerLevels):
    """GGUF's q4_1, q5_1: `scale * code + minimum`. params: scale, minimum fp16 [out, blocks]."""

    def bits_per_weight(self, in_features: int) -> float:
        return self.bits + 32 / 32

    def fit(self, w: Tensor, importance: Tensor | None = None) -> Params:
        g = _groups(w, 32)
        low, high = g.amin(-1), g.amax(-1)
        return {"scale": ((high - low) / self.top).half(), "minimum": low.half()}

    def columns(self, params: Params, n: int) -> Columns:
        return Columns(_expand(params["scale"], 32, n), offset=-_expand(params["minimum"], 32, n))


Q4_0 = ScaleBlock("q4_0", 32, 4, -8)
Q5_0 = ScaleBlock("q5_0", 32, 5, -16)
Q8_0 = ScaleBlock("q8_0", 32, 8, -128)
Q4_1 = ScaleMinBlock("q4_1", 32, 4)
Q5_1 = ScaleMinBlock("q5_1", 32, 5)
