"""Attention over block tables on CPUs, compiled by numba.

The unit of work is a tile (up to 16 query tokens of one sequence) and a key head. Keys are taken 16 at a time, from
position 0 (or the window's first sixteenth) upwards, converted to float32 and transposed, so that 16 scores fill one
vector; softmax is online (running maximum, rescaled sums). What a query row computes, and in which order, depends on
its position alone: its result has the same bits alone, in any batch, however its prompt was cut.
"""

import math
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from runtime.kernels import attention_reference
from runtime.kernels.attention_reference import AttentionKernel
from runtime.kernels.compiled import compiled

if TYPE_CHECKING:
    from runtime.blocks import KVBatch

LANES, ROWS = 16, 4  # keys (or channels) per vector; query rows that share one load of it
FLOAT, HALF, BFLOAT, INT8 = range(4)
WORTH_THREADS = 256  # query-key tiles per head below which waking a second thread costs more than it saves
_intrinsic: Any = intrinsic  # its stub takes the typing context for an argument of the caller
KINDS = {torch.float32: FLOAT, torch.float16: HALF, torch.bfloat16: BFLOAT, torch.int8: INT8}


@_intrinsic
def _bits_to_float(typingctx: Any, bits: Any) -> Any:
    """float32 with the given uint32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


def _splat(builder: Any, vector: Any, value: Any) -> Any:
    undefined, lane = ir.Constant(vector, ir.Undefined), ir.IntType(32)
    first = builder.insert_element(undefined, value, lane(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(lane, LANES), [0] * LANES))


@_intrinsic
def _highest(typingctx: Any, a: Any, at: Any) -> Any:
    """The greatest of the 16 elements from a[at] on, float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), LANES)
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        kind = ir.FunctionType(ir.FloatType(), [vector])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fmax.v16f32")
        place = builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer())
        return builder.call(reduce, [builder.load(place, align=4)])

    return types.float32(a, types.int64), codegen


@_intrinsic
def _multiply_tile(typingctx: Any, a: Any, a_at: Any, a_step: Any, b: Any, b_at: Any, b_step: Any, c: Any, c_at: Any,
                   c_step: Any, depth: Any) -> Any:  # fmt: skip
    """C[4, 16] += A[4, depth] @ B[depth, 16], float32, fused multiply-adds, even and odd steps apart (depth even).

    a, b, c: float32 arrays; x_at: offset of the first element; x_step: elements from row to row. Written as vector
    code, so that neither speed nor the order of additions is left to the compiler's judgement.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, single = ir.IntType(64), ir.FloatType()
        vector = ir.VectorType(single, LANES)
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), "llvm.fma.v16f32")
        arrays = [context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 3, 6)]
        (a_at, a_step), (b_at, b_step), (c_at, c_step) = ((args[i + 1], args[i + 2]) for i in (0, 3, 6))
        depth = args[9]

        def vector_at(index: Any) -> Any:
            return builder.bitcast(builder.gep(arrays[2], [index]), vector.as_pointer())

        places = [vector_at(builder.add(c_at, builder.mul(c_step, word(r)))) for r in range(ROWS)]
        before, head = builder.block, builder.append_basic_block("depth")
        zero = ir.Constant(vector, [0.0] * LANES)
        first = [builder.load(place, align=4) for place in places] + [zero] * ROWS
        builder.branch(head)
        builder.position_at_end(head)
        step = builder.phi(word)
        sums = [builder.phi(vector) for _ in first]  # those of even steps, then those of odd ones
        after = []
        for odd in (0, 1):
            k = builder.add(step, word(odd))
            row = builder.gep(arrays[1], [builder.add(b_at, builder.mul(k, b_step))])
            b_row = builder.load(builder.bitcast(row, vector.as_pointer()), align=4)
            for r in range(ROWS):
                index = builder.add(builder.add(a_at, builder.mul(a_step, word(r))), k)
                splat = _splat(builder, vector, builder.load(builder.gep(arrays[0], [index])))
                after.append(builder.call(fma, [splat, b_row, sums[odd * ROWS + r]]))
        following = builder.add(step, word(2))
        done = builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed("<", following, depth), head, done)
        step.add_incoming(word(0), before)
        step.add_incoming(following, head)
        for phi, start, value in zip(sums, first, after, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(value, head)
        builder.position_at_end(done)
        for r, place in enumerate(places):
            builder.store(builder.fadd(after[r], after[ROWS + r]), place, align=4)
        return context.get_dummy_value()

    return types.void(a, types.int64, types.int64, b, types.int64, types.int64, c, types.int64, types.int64,
                      types.int64), codegen  # fmt: skip


@_intrinsic
def _transpose_tile(typingctx: Any, a: Any, a_at: Any, a_step: Any, b: Any, b_at: Any, b_step: Any) -> Any:
    """B[16, 16] = A[16, 16] transposed, float32; arguments as in `_multiply_tile`. Four rounds of pairwise exchange."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, vector = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)

        def place(array: int, row: int) -> Any:
            data = context.make_array(signature.args[array])(context, builder, args[array]).data
            index = builder.add(args[array + 1], builder.mul(args[array + 2], word(row)))
            return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())

        def exchange(x: Any, y: Any, lanes: list[int]) -> Any:
            return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), LANES), lanes))

        rows = [builder.load(place(0, r), align=4) for r in range(LANES)]
        for step in (1, 2, 4, 8):
            low = [t if not t & step else LANES + t - step for t in range(LANES)]
            high = [t + step if not t & step else LANES + t for t in range(LANES)]
            for r in (r for r in range(LANES) if not r & step):
                x, y = rows[r], rows[r + step]
                rows[r], rows[r + step] = exchange(x, y, low), exchange(x, y, high)
        for r in range(LANES):
            builder.store(rows[r], place(3, r), align=4)
        return context.get_dummy_value()

    return types.void(a, types.int64, types.int64, b, types.int64, types.int64), codegen


@compiled(inline="always")
def _exp(x: Any) -> Any:
    """exp for x <= 0 in float32, to 2 units in the last place; below -87 it is 0. exp(0) is 1 exactly."""
    x = x if x > np.float32(-88.0) else np.float32(-88.0)
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1.0)
    power = np.uint32((np.int32(n) + np.int32(127)) << np.int32(23))
    return y * _bits_to_float(power) if x > np.float32(-87.0) else np.float32(0.0)


@compiled(inline="always")
def _widen(x: Any, kind: int) -> Any:
    """A stored element as float32 (int8: the bare code)."""
    if kind == HALF:
        bits = np.uint32(x)
        value = _bits_to_float(
            (bits & np.uint32(0x7FFF)) << np.uint32(13) | (bits & np.uint32(0x8000)) << np.uint32(16)
        )
        return value * np.float32(2.0**112)
    if kind == BFLOAT:
        return _bits_to_float(np.uint32(x) << np.uint32(16))
    return np.float32(x)


@compiled
def _load(codes: Any, scales: Any, table: Any, first: int, valid: int, head: int, kind: int, out: Any) -> None:
    """Keys (or values) first .. first+valid-1 of one head as float32 into out[16, dim]; zeros after them."""
    size, dim = codes.shape[1], codes.shape[3]
    at, offset = first // size, first % size
    for t in range(valid):
        block = table[at]
        scale = scales[block, head] if kind == INT8 else np.float32(1.0)
        for d in range(dim):
            out[t, d] = _widen(codes[block, offset, head, d], kind) * scale
        offset += 1
        if offset == size:
            at, offset = at + 1, 0
    for t in range(valid, LANES):  # what lies there may be infinite
        out[t, :] = 0


@compiled
def _weigh(scores: Any, i: int, first: int, position: int, scale: Any, window: int, softcap: Any, peak: Any) -> Any:
    """Turn the 16 raw scores of row i into unnormalised weights; returns (new maximum, factor for the sums so far)."""
    for t in range(LANES):
        scores[i, t] *= scale
    if softcap != 0:
        for t in range(LANES):
            scores[i, t] = softcap * np.float32(math.tanh(scores[i, t] / softcap))
    if first + LANES - 1 > position or (window != 0 and first <= position - window):
        for t in range(LANES):
            visible = first + t <= position and (window == 0 or first + t > position - window)
            scores[i, t] = scores[i, t] if visible else np.float32(-np.inf)
    high = max(peak, _highest(scores, i * LANES))
    for t in range(LANES):
        scores[i, t] = _exp(scores[i, t] - high)
    return high, _exp(peak - high)


@compiled
def _attend_tile(tile: Any, head: int, q: Any, k: Any, v: Any, k_scale: Any, v_scale: Any, table: Any, out: Any,
                 scale: Any, window: int, softcap: Any, kind: int) -> None:  # fmt: skip
    start, tokens, position = tile[1], tile[2], tile[3]
    size, heads, dim = k.shape[1], k.shape[2], k.shape[3]
    group, k_flat, v_flat = q.shape[1] // heads, k.reshape(-1), v.reshape(-1)
    rows, width = tokens * group, (dim + LANES - 1) // LANES * LANES
    padded = (rows + ROWS - 1) // ROWS * ROWS
    queries, sums = np.zeros((padded, width), np.float32), np.zeros((padded, width), np.float32)
    totals, peaks = np.zeros((padded, LANES), np.float32), np.full(padded, -np.inf, np.float32)
    keys, values = np.zeros((width, LANES), np.float32), np.zeros((LANES, width), np.float32)
    scores = np.zeros((ROWS, LANES), np.float32)
    for r in range(rows):
        queries[r, :dim] = q[start + r // group, head * group + r % group]
    last = position + tokens - 1
    readable = kind == FLOAT and dim == width and size % LANES == 0  # full tiles need no copy
    for first in range(max(0, position - window + 1) // LANES * LANES if window else 0, last + 1, LANES):
        valid = min(LANES, last + 1 - first)
        direct = readable and valid == LANES
        base = ((np.int64(table[first // size]) * size + first % size) * heads + head) * dim
        if not direct:
            _load(k, k_scale, table, first, valid, head, kind, values)
        for d in range(0, width, LANES):
            if direct:
                _transpose_tile(k_flat, base + d, heads * dim, keys, d * LANES, LANES)
            else:
                _transpose_tile(values, d, width, keys, d * LANES, LANES)
        if not direct:
            _load(v, v_scale, table, first, valid, head, kind, values)
        for r in range(0, padded, ROWS):
            newest = position + min(r + ROWS, rows) // group
            if first > newest or (window and first + LANES <= position + r // group - window + 1):
                continue
            scores[:] = 0
            _multiply_tile(queries, r * width, width, keys, 0, LANES, scores, 0, LANES, width)
            for i in range(ROWS):
                at = position + (r + i) // group
                if r + i >= rows or first > at or (window and first + LANES <= at - window + 1):
                    scores[i, :] = 0  # this row sees none of these keys: leave its sums alone
                    continue
                peaks[r + i], factor = _weigh(scores, i, first, at, scale, window, softcap, peaks[r + i])
                for t in range(LANES):
                    totals[r + i, t] = totals[r + i, t] * factor + scores[i, t]
                if factor != 1:
                    for d in range(width):
                        sums[r + i, d] *= factor
            for d in range(0, width, LANES):
                if direct:
                    _multiply_tile(scores, 0, LANES, v_flat, base + d, heads * dim, sums, r * width + d, width, LANES)
                else:
                    _multiply_tile(scores, 0, LANES, values, d, width, sums, r * width + d, width, LANES)
    for r in range(rows):
        total = np.float32(0.0)
        for t in range(LANES):
            total += totals[r, t]
        for d in range(dim):
            out[start + r // group, head * group + r % group, d] = sums[r, d] / total


def _attend_all(tiles: Any, q: Any, k: Any, v: Any, k_scale: Any, v_scale: Any, tables: Any, out: Any, scale: Any,
                window: int, softcap: Any, kind: int) -> None:  # fmt: skip
    heads = k.shape[2]
    for item in numba.prange(len(tiles) * heads):
        tile = tiles[item // heads]
        _attend_tile(tile, item % heads, q, k, v, k_scale, v_scale, tables[tile[0]], out, scale, window, softcap, kind)


_attend_threaded = compiled(parallel=True)(_attend_all)
_attend = compiled(_attend_all)


@compiled
def _store_int8(new: Any, codes: Any, scales: Any, slots: Any) -> None:
    """`attention_reference.store_int8`, block by block (the tokens of a block follow each other in `slots`)."""
    size, heads, dim = codes.shape[1], codes.shape[2], codes.shape[3]
    n = 0
    while n < len(slots):
        block, offset, end = slots[n] // size, slots[n] % size, n + 1
        while end < len(slots) and slots[end] // size == block:
            end += 1
        for head in range(heads):
            old = scales[block, head] if offset else np.float32(0.0)
            scale = old
            for i in range(n, end):
                for d in range(dim):
                    scale = max(scale, abs(new[i, head, d]) / np.float32(127))
            scales[block, head] = scale
            safe = max(scale, np.float32(1e-30))
            if scale > old:
                for t in range(offset):
                    for d in range(dim):
                        codes[block, t, head, d] = np.int8(np.rint(codes[block, t, head, d] * (old / safe)))
            for i in range(n, end):
                for d in range(dim):
                    codes[block, offset + i - n, head, d] = np.int8(np.rint(new[i, head, d] / safe))
        n = end


def store(batch: "KVBatch", layer: int, k: Tensor, v: Tensor) -> None:
    """Write k, v [N, kv_heads, head_dim] into the slots of the batch."""
    cache = batch.cache
    if cache.dtype != torch.int8:
        return attention_reference.store(batch, layer, k, v)
    for new, codes, scales in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        _store_int8(new.float().numpy(), codes[layer].numpy(), scales[layer].numpy(), batch.slots.numpy())


def attend(batch: "KVBatch", layer: int, q: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    """Flash-style attention; q [N, heads, head_dim], result alike."""
    cache, kind = batch.cache, KINDS[batch.cache.dtype]
    k, v = cache.k[layer], cache.v[layer]
    if kind in (HALF, BFLOAT):
        k, v = k.view(torch.uint16), v.view(torch.uint16)
    scales = (cache.k_scale[layer].numpy(), cache.v_scale[layer].numpy())
    out = torch.empty(q.shape, dtype=torch.float32)
    alone = torch.get_num_threads() == 1 or k.shape[2] * len(batch.tiles) < 2 or batch.work < WORTH_THREADS
    (_attend if alone else _attend_threaded)(
        batch.tiles.numpy(), q.float().numpy(), k.numpy(), v.numpy(), *scales, batch.block_tables.numpy(), out.numpy(),
        np.float32(scale), window, np.float32(softcap), kind,
    )  # fmt: skip
    return out.to(q.dtype)


KERNEL = AttentionKernel(store, attend)
