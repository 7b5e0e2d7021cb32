"""GGUF's quantised blocks as data: how codes and parameters lie in the bytes of a block, in both directions.

A block holds fields one after another. Nearly every field is a fold: values of a few bits laid over one another in
bytes, so one small class describes the codes of all formats, their high bits, and the packed scales of most.
Byte layouts: ggml's ggml-common.h and gguf-py's quants.py.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from formats.grids import parse_grid
from formats.qtensor import QTensor

Bytes = NDArray[Any]  # of uint8
Values = dict[str, Bytes]
"""Raw stored values of one tensor's blocks, each uint8 [blocks, values per block]; "codes" is one of them."""


@dataclass(frozen=True)
class Fold:
    """Bits [shift, shift + bits) of a source, reshaped to [..., k, l]: the k rows are laid over each other in l bytes,
    row i at bit i * bits."""

    source: str
    shape: tuple[int, ...]
    bits: int
    shift: int = 0

    @property
    def size(self) -> int:
        return prod(self.shape) // self.shape[-2]

    def pack(self, values: Values) -> Bytes:
        rows = values[self.source] >> self.shift & (1 << self.bits) - 1
        rows = rows.reshape(len(rows), *self.shape)
        packed = rows[..., 0, :].copy()
        for i in range(1, self.shape[-2]):
            packed |= rows[..., i, :] << i * self.bits
        return packed.reshape(len(packed), -1)

    def unpack(self, data: Bytes, values: Values) -> None:
        *outer, k, n = self.shape
        folded = data.reshape(len(data), *outer, n)
        rows = np.stack([folded >> i * self.bits & (1 << self.bits) - 1 for i in range(k)], axis=-2)
        rows = rows.reshape(len(data), -1) << self.shift
        values[self.source] = values[self.source] | rows if self.source in values else rows


@dataclass(frozen=True)
class Raw:
    """Bytes stored as they are."""

    source: str
    size: int

    def pack(self, values: Values) -> Bytes:
        return values[self.source]

    def unpack(self, data: Bytes, values: Values) -> None:
        values[self.source] = data


@dataclass(frozen=True)
class NibblePairs:
    """q2_k's scales: 16 bytes, the scale in the low nibble and the minimum in the high one."""

    size: int = 16

    def pack(self, values: Values) -> Bytes:
        return values["sub_scale"] | values["sub_minimum"] << 4

    def unpack(self, data: Bytes, values: Values) -> None:
        values["sub_scale"], values["sub_minimum"] = data & 15, data >> 4


@dataclass(frozen=True)
class SixBitPairs:
    """The 12 bytes of q4_k and q5_k: 8 scales and 8 minima of 6 bits. The first four of each lie in the low bits of
    bytes 0-3 and 4-7, whose two top bits hold the top bits of the last four; their low nibbles share bytes 8-11."""

    size: int = 12

    def pack(self, values: Values) -> Bytes:
        scale, minimum = values["sub_scale"], values["sub_minimum"]
        low = [x[:, :4] | x[:, 4:] >> 4 << 6 for x in (scale, minimum)]
        return np.concatenate([*low, scale[:, 4:] & 15 | (minimum[:, 4:] & 15) << 4], axis=1)

    def unpack(self, data: Bytes, values: Values) -> None:
        for i, source in enumerate(("sub_scale", "sub_minimum")):
            low = data[:, 4 * i : 4 * i + 4]
            high = data[:, 8:] >> 4 * i & 15 | low >> 6 << 4
            values[source] = np.concatenate([low & 63, high], axis=1)


SCALE, MINIMUM = Raw("scale", 2), Raw("minimum", 2)
NIBBLES = Fold("codes", (2, 16), 4)
FIFTH_BIT = Fold("codes", (4, 8, 1), 1, shift=4)
LOW_CRUMBS = Fold("codes", (2, 4, 32), 2)

LAYOUTS: dict[str, tuple[Fold | Raw | NibblePairs | SixBitPairs, ...]] = {
    "q4_0": (SCALE, NIBBLES),
    "q4_1": (SCALE, MINIMUM, NIBBLES),
    "q5_0": (SCALE, FIFTH_BIT, NIBBLES),
    "q5_1": (SCALE, MINIMUM, FIFTH_BIT, NIBBLES),
    "q8_0": (SCALE, Raw("codes", 32)),
    "q2_k": (NibblePairs(), LOW_CRUMBS, SCALE, MINIMUM),
    "q3_k": (
        Fold("codes", (8, 32), 1, shift=2),
        LOW_CRUMBS,
        Fold("sub_scale", (2, 8), 4),
        Fold("sub_scale", (4, 4), 2, shift=4),
        SCALE,
    ),
    "q4_k": (SCALE, MINIMUM, SixBitPairs(), Fold("codes", (4, 2, 32), 4)),
    "q5_k": (SCALE, MINIMUM, SixBitPairs(), Fold("codes", (8, 32), 1, shift=4), Fold("codes", (4, 2, 32), 4)),
    "q6_k": (
        Fold("codes", (2, 2, 64), 4),
        Fold("codes", (2, 4, 32), 2, shift=4),
        Raw("sub_scale", 16),
        SCALE,
    ),
    "iq4_nl": (SCALE, NIBBLES),
    "iq4_xs": (
        SCALE,
        Fold("sub_scale", (2, 4, 1), 2, shift=4),
        Fold("sub_scale", (4, 2, 1), 4),
        Fold("codes", (8, 2, 16), 4),
    ),
    "mxfp4": (Raw("exponent", 1), NIBBLES),
}

SIGNED = {"q3_k": 32, "iq4_xs": 32, "q6_k": 0}  # stored sub-scale minus this is the int8 sub_scale of the grid


def block_bytes(name: str) -> int:
    """Bytes of one block of a format."""
    return sum(field.size for field in LAYOUTS[name])


def pack_blocks(tensor: QTensor) -> Bytes:
    """The tensor's GGUF bytes, uint8 [out, bytes per row]. Its grid must have a layout and divide its rows."""
    name, (out, n) = tensor.grid.name, tensor.shape
    blocks = out * n // (tensor.grid.block or n)
    values = {"codes": tensor.codes.cpu().contiguous().numpy().reshape(blocks, -1)}
    if name == "q8_0":
        values["codes"] = values["codes"] ^ 0x80  # two's complement of code - 128
    for key, param in tensor.params.items():
        if key == "sub_scale" and SIGNED.get(name):
            param = param + SIGNED[name]
        values[key] = param.cpu().contiguous().numpy().reshape(blocks, -1).view(np.uint8)
    return np.concatenate([field.pack(values) for field in LAYOUTS[name]], axis=1).reshape(out, -1)


def unpack_blocks(name: str, data: Bytes) -> QTensor:
    """The tensor of a format's blocks, data uint8 [out, bytes per row]."""
    out = data.shape[0]
    blocks = np.ascontiguousarray(data).reshape(-1, block_bytes(name))
    values: Values = {}
    start = 0
    for field in LAYOUTS[name]:
        field.unpack(blocks[:, start : start + field.size], values)
        start += field.size
    codes = values.pop("codes")
    if name == "q8_0":
        codes = codes ^ 0x80
    return QTensor(
        parse_grid(name),
        torch.from_numpy(codes.reshape(out, -1)),
        {key: _param(name, key, value, out) for key, value in values.items()},
    )


def _param(name: str, key: str, value: Bytes, out: int) -> torch.Tensor:
    """Stored values [blocks, values] as a grid's parameter [out, blocks per row(, subs)] of its dtype."""
    value = np.ascontiguousarray(value)
    if key in ("scale", "minimum"):
        return torch.from_numpy(value.view(np.float16).reshape(out, -1))
    if key == "exponent":
        return torch.from_numpy(value.reshape(out, -1))
    if key == "sub_scale" and name in SIGNED:
        value = value.view(np.int8) - np.int8(SIGNED[name])
    return torch.from_numpy(value.reshape(out, -1, value.shape[1]))
