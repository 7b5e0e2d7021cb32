"""Attention over block tables in Triton: one program per tile of query tokens and key head, online softmax.

The same walk as the CPU kernel: keys block by block from the first one visible, so that a row's result depends on its
position alone. Everything is computed in float32. Runs on CPUs under TRITON_INTERPRET=1, for tests.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels import attention_reference
from runtime.kernels.attention_reference import AttentionKernel

if TYPE_CHECKING:
    from runtime.blocks import KVBatch


@triton.jit
def _load(codes: Any, scales: Any, block: Any, head: Any, stored: Any, size: Any, heads: Any, dim: Any,
          SIZE: tl.constexpr, DIM: tl.constexpr, INT8: tl.constexpr) -> Any:  # fmt: skip
    """One block of one head as float32 [SIZE, DIM]; zeros after its `stored` tokens, where anything may lie."""
    t, d = tl.arange(0, SIZE)[:, None], tl.arange(0, DIM)[None, :]
    at = ((block.to(tl.int64) * size + t) * heads + head) * dim + d
    x = tl.load(codes + at, mask=(t < stored) & (d < dim), other=0).to(tl.float32)
    if INT8:
        x *= tl.load(scales + block * heads + head)
    return x


@triton.jit
def _attend(tiles: Any, q: Any, k: Any, v: Any, k_scale: Any, v_scale: Any, tables: Any, out: Any, width: Any,
            size: Any, heads: Any, dim: Any, scale: Any, softcap: Any, window: Any, GROUP: tl.constexpr,
            ROWS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, INT8: tl.constexpr,
            SOFTCAP: tl.constexpr, SLIDES: tl.constexpr) -> None:  # fmt: skip
    tile, head = tiles + 4 * tl.program_id(0), tl.program_id(1)
    sequence, start, tokens, position = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    row = tl.arange(0, ROWS)
    token, d = row // GROUP, tl.arange(0, DIM)
    at = ((start + token).to(tl.int64) * heads * GROUP + head * GROUP + row % GROUP)[:, None] * dim + d[None, :]
    real = (token < tokens)[:, None] & (d < dim)[None, :]
    query = tl.load(q + at, mask=real, other=0).to(tl.float32)
    own = (position + token)[:, None]
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    first = 0
    if SLIDES:
        first = tl.maximum(position - window + 1, 0) // size
    for b in range(first, (position + tokens - 1) // size + 1):
        block, stored = tl.load(tables + sequence * width + b), tl.minimum(position + tokens - b * size, size)
        t = tl.arange(0, SIZE)[None, :]
        key = b * size + t
        visible = (key <= own) & (t < stored)
        if SLIDES:
            visible &= key > own - window
        keys = _load(k, k_scale, block, head, stored, size, heads, dim, SIZE, DIM, INT8)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcap * (2 / (1 + tl.exp(-2 * scores / softcap)) - 1)
        scores = tl.where(visible, scores, -float("inf"))
        high = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - high[:, None])
        factor = tl.exp(peak - high)
        values = _load(v, v_scale, block, head, stored, size, heads, dim, SIZE, DIM, INT8)
        sums = sums * factor[:, None] + tl.dot(weights, values, input_precision="ieee")
        total = total * factor + tl.sum(weights, 1)
        peak = high
    tl.store(out + at, sums / tl.maximum(total, 1e-30)[:, None], mask=real)


def attend(batch: "KVBatch", layer: int, q: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    """Flash-style attention; q [N, heads, head_dim], result alike."""
    cache, k = batch.cache, batch.cache.k[layer]
    heads, dim = k.shape[2], k.shape[3]
    group = q.shape[1] // heads
    q = q.contiguous()
    out = torch.empty_like(q)
    _attend[len(batch.tiles), heads](
        batch.tiles, q, k, cache.v[layer], cache.k_scale[layer], cache.v_scale[layer], batch.block_tables, out,
        batch.block_tables.shape[1], cache.block_size, heads, dim, scale, softcap, window,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group * batch.longest)),
        SIZE=max(16, triton.next_power_of_2(cache.block_size)),
        DIM=max(16, triton.next_power_of_2(dim)),
        INT8=cache.dtype == torch.int8,
        SOFTCAP=softcap != 0,
        SLIDES=window != 0,
    )  # fmt: skip
    return out


KERNEL = AttentionKernel(attention_reference.store, attend)
