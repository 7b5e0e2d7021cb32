"""Packed linears on CPUs: numba spreads machine-code tiles (tile.py) over threads and rows.

Two ways to multiply. `cpu` keeps activations in float32 and multiplies by exactly dequantised weights. `cpu-int8`
rounds activations to int8 with a scale per 32 columns (for 8-bit channels, W8A8: per token) and multiplies integers
(VNNI where the CPU has it): several times faster, about 6e-3 relative error per product. In both, a
row's result does not depend on the other rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from formats.qtensor import QTensor
from runtime.kernels.attention_cpu import _bits_to_float
from runtime.kernels.compiled import compiled
from runtime.kernels.packed import Packed, pack
from runtime.kernels.tile import GROUP, LANES, has, shapes, tile_address
from runtime.linear import Kernel, QuantizedLinear

FIELDS = 12
SHAPES = np.array(shapes(), np.int64)
_WIDTH = FIELDS + len(SHAPES)
CACHED = 1 << 19  # bytes of activations that one pass over the weights uses: they should stay in the second-level cache
STRIPES, GROUPS, SHIFT, CODES, SCALES, OFFSETS, CODE_STEP, SCALE_STEP, OFFSET_STEP, INTEGER, COLUMN = range(11)
"""Fields of a linear's descriptor: sizes, addresses, bytes per stripe, arithmetic, first output column in its stage;
from FIELDS on, the addresses of the tiles in the order of SHAPES."""


def _emit_call_tile(typingctx: Any, address: Any, arguments: Any) -> Any:
    """Call machine code at an address with a tuple of 12 int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        values = [builder.extract_value(args[1], i) for i in range(12)]
        function = ir.FunctionType(ir.VoidType(), [word] * 12)
        builder.call(builder.inttoptr(args[0], function.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, 12)), codegen


_call_tile: Any = intrinsic(_emit_call_tile)


def _emit_address(typingctx: Any, array: Any) -> Any:
    """Address of an array's first element, int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), codegen


address: Any = intrinsic(_emit_address)


@compiled
def quantise_row(x: np.ndarray, codes: np.ndarray, scales: np.ndarray, sums: np.ndarray, whole: bool) -> None:
    """x float32 [K] -> codes int8 [K], scales float32 [K/32], sums float32 [K/32, 4]; K a multiple of 32.

    whole: the row has one scale, as compressed-tensors' dynamic activations have, instead of one per 32 columns.
    """
    high = np.int32(0)
    bits = x.view(np.int32)  # magnitudes compare as integers do, which vectorises
    for g in range(len(scales)):
        at = g * 32
        if g == 0 or not whole:
            high = np.int32(0)
            for k in range(at, len(x) if whole else at + 32):
                high = max(high, bits[k] & np.int32(0x7FFFFFFF))
        top = _bits_to_float(np.uint32(high))
        scale = top / np.float32(127)
        inverse = np.float32(127) / top if top > 0 else np.float32(0)
        first = second = np.int32(0)
        for k in range(at, at + 16):
            code = np.int32(np.rint(x[k] * inverse))
            codes[k] = code
            first = np.int32(first + code)
        for k in range(at + 16, at + 32):
            code = np.int32(np.rint(x[k] * inverse))
            codes[k] = code
            second = np.int32(second + code)
        scales[g] = scale
        sums[g, 0] = scale * np.float32(first + second)
        sums[g, 1] = scale * np.float32(first)
        sums[g, 2] = scale * np.float32(second)


@compiled
def _unit(d: Any, stripe: int, a: Any, out: Any, first: int, end: int) -> None:
    """Two stripes of one linear times rows first..end-1, in the largest tiles that fit."""
    integer, groups = d[INTEGER] != 0, a.scales.shape[1]
    step = a.codes.shape[1] if integer else a.x.shape[1] * 4
    start = address(a.codes) if integer else address(a.x)
    row = np.int64(first)
    for s in range(len(SHAPES)):
        while end - row >= SHAPES[s, 0]:
            for half in range(0, 2, SHAPES[s, 1]):
                at = stripe + half
                arguments = (
                    d[CODES] + at * d[CODE_STEP],
                    d[SCALES] + at * d[SCALE_STEP],
                    d[OFFSETS] + at * d[OFFSET_STEP],
                    start + row * step,
                    address(a.scales) + row * groups * 4,
                    address(a.sums) + row * groups * 16,
                    address(out) + (row * out.shape[1] + d[COLUMN] + at * LANES) * 4,
                    np.int64(step),
                    np.int64(groups),
                    np.int64(out.shape[1] * 4),
                    d[GROUPS],
                    d[SHIFT],
                )
                _call_tile(d[FIELDS + s], arguments)
            row += SHAPES[s, 0]


@compiled(parallel=True)
def multiply(stage: Any, bounds: Any, a: Any, out: Any, rows: int) -> None:
    """out[:rows] = the first rows of the activations times the transposed linears of a stage, side by side.

    stage: int64 [linears, _WIDTH] descriptors; bounds: int64 [threads + 1], each thread's first pair of stripes;
    out: float32 [rows, columns].
    """
    for t in numba.prange(len(bounds) - 1):
        before = np.int64(0)
        for i in range(len(stage)):
            pairs = stage[i, STRIPES] // 2
            step = a.x.shape[1] * 4 if stage[i, INTEGER] == 0 else a.codes.shape[1]
            block = max(CACHED // step, 1)
            for first in range(0, rows, block):
                for p in range(max(bounds[t] - before, 0), min(bounds[t + 1] - before, pairs)):
                    _unit(stage[i], 2 * p, a, out, first, min(first + block, rows))
            before += pairs


@compiled
def quantise(a: Any, rows: int, whole: bool) -> None:
    """`quantise_row` for the first rows."""
    for m in range(rows):
        quantise_row(a.x[m], a.codes[m], a.scales[m], a.sums[m], whole)


class Stage:
    """Linears that read the same activations, as one multiplication. `columns`: width of their common output."""

    def __init__(self, kernels: Sequence["CpuKernel"]) -> None:
        self.kernels = list(kernels)
        self.descriptors = np.stack([k.descriptor for k in kernels])
        self.starts = np.cumsum([0] + [k.packed.stripes * LANES for k in kernels])
        self.descriptors[:, COLUMN] = self.starts[:-1]
        self.columns = int(self.starts[-1])
        weight = np.concatenate([np.full(k.packed.stripes // 2, 2.0 * k.packed.codes.shape[1]) for k in kernels])
        self._done = np.concatenate([[0.0], np.cumsum(weight)])

    @classmethod
    def of(cls, linears: "Sequence[QuantizedLinear]") -> "Stage":
        kernels = [linear.kernel for linear in linears]
        assert all(isinstance(kernel, CpuKernel) for kernel in kernels)
        return cls([kernel for kernel in kernels if isinstance(kernel, CpuKernel)])

    def bounds(self, threads: int) -> np.ndarray:
        """Where each thread starts, so that all read about as many bytes."""
        shares = self._done[-1] * np.arange(threads + 1) / threads
        return np.abs(self._done[:, None] - shares).argmin(0).astype(np.int64)


_wanted = torch.get_num_threads()
numba.get_num_threads()  # starts numba's threads, which resets the OpenMP setting that torch reads
torch.set_num_threads(_wanted)


def threads() -> int:
    """Threads that the kernels use: torch's setting, as far as numba can follow.

    numba is told too: else a region with work for one thread still wakes, and waits for, all the others.
    """
    count = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if numba.get_num_threads() != count:
        numba.set_num_threads(count)
    return count


class Activations(NamedTuple):
    """Activations of a stage: x float32 [rows, K padded to 32], and the int8 form of `quantise_row`."""

    x: np.ndarray
    codes: np.ndarray
    scales: np.ndarray
    sums: np.ndarray


def activations(rows: int, width: int) -> Activations:
    """Room for rows of `width` columns; what is past them stays zero."""
    groups = -(-width // GROUP)
    return Activations(
        np.zeros((rows, groups * GROUP), np.float32),
        np.zeros((rows, groups * GROUP), np.int8),
        np.zeros((rows, groups), np.float32),
        np.zeros((rows, groups, 4), np.float32),
    )


class CpuKernel(Kernel):
    """float32 activations times exactly dequantised weights."""

    integer = False

    def __init__(self, weight: "Tensor | QTensor", device: str, dtype: torch.dtype) -> None:
        self.packed: Packed = pack(weight)
        layout = self.packed.layout
        self.integer = self.integer and not layout.dense
        channels = GROUP << self.packed.shift >= self.packed.in_features and layout.group == GROUP
        self.whole = self.integer and channels and layout.store == "8" and not layout.offset  # W8A8
        self.fusable = self.packed.order is None
        p, d = self.packed, np.zeros(_WIDTH, np.int64)
        d[: INTEGER + 1] = (
            p.stripes,
            p.groups,
            p.shift,
            *(t.data_ptr() for t in (p.codes, p.scales, p.offsets)),
            *(t.nbytes // p.stripes for t in (p.codes, p.scales, p.offsets)),
            self.integer,
        )
        d[FIELDS:] = [tile_address(p.layout, int(r), int(s), self.integer) for r, s in SHAPES]
        self.descriptor = d
        self.stage = Stage([self])

    def __call__(self, x: Tensor) -> Tensor:
        rows = len(x)
        a = activations(rows, self.packed.in_features)
        order = self.packed.order
        a.x[:, : x.shape[1]] = (x if order is None else x[:, order]).float().numpy()
        if self.integer:
            quantise(a, rows, self.whole)
        out = np.empty((rows, self.stage.columns), np.float32)
        multiply(self.stage.descriptors, self.stage.bounds(threads()), a, out, rows)
        return torch.from_numpy(out)[:, : self.packed.out_features].to(x.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return self.packed.rows(ids)

    def nbytes(self) -> int:
        return self.packed.nbytes()

    def describe(self, m: int) -> str:
        p = self.packed.layout
        arithmetic = (
            "float32"
            if not self.integer
            else ("int8 VNNI" if has("avx512vnni") else "int8") + " per token" * self.whole
        )
        rows = next(r for r, _ in SHAPES if r <= m)
        return f"cpu: {p.store if p.dense else f'{p.store}-bit codes'}, {arithmetic}, tiles of {rows}"


class CpuInt8Kernel(CpuKernel):
    """int8 activations, integer products; float32 where weights are dense."""

    integer = True
