"""Attention over block tables in plain torch: the oracle of the other kernels, and the int8 store they share on GPUs.

A kernel is two functions of a `KVBatch`: `store` writes the new keys and values, `attend` reads the past.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from runtime.blocks import KVBatch


class AttentionKernel(NamedTuple):
    """store(batch, layer, k, v); attend(batch, layer, q, scale, window or 0, softcap or 0.0) -> like q."""

    store: Callable[["KVBatch", int, Tensor, Tensor], None]
    attend: Callable[["KVBatch", int, Tensor, float, int, float], Tensor]


def store(batch: "KVBatch", layer: int, k: Tensor, v: Tensor) -> None:
    """Write k, v [N, kv_heads, head_dim] into the slots of the batch."""
    cache = batch.cache
    for new, codes, scales in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        if cache.dtype == torch.int8:
            store_int8(new.float(), codes[layer], scales[layer], batch.slots)
        else:
            codes[layer].flatten(0, 1).index_copy_(0, batch.slots, new.to(cache.dtype))


def store_int8(new: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    """Write new float32 [N, kv_heads, head_dim] into codes [blocks, block_size, ..] under one scale per block and head.

    scales float32 [blocks, kv_heads] grow when a block's new content needs it; a block entered at its first slot
    starts afresh.
    """
    size = codes.shape[1]
    block = slots // size
    scales[block[slots % size == 0]] = 0
    touched, inverse = torch.unique(block, return_inverse=True)
    peak = torch.zeros(len(touched), new.shape[1], device=new.device)
    peak.scatter_reduce_(0, inverse[:, None].expand(-1, new.shape[1]), new.abs().amax(-1), "amax")
    old = scales[touched]
    grown = torch.maximum(old, peak / 127)
    safe = grown.clamp(min=1e-30)
    codes[touched] = (codes[touched] * (old / safe)[:, None, :, None]).round().to(torch.int8)
    scales[touched] = grown
    codes.flatten(0, 1)[slots] = (new / safe[inverse][..., None]).round().to(torch.int8)


def gather(codes: Tensor, scales: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The content of `blocks`, float64 [length, kv_heads, head_dim]."""
    content = codes[blocks].double()
    if codes.dtype == torch.int8:
        content = content * scales[blocks].double()[:, None, :, None]
    return content.flatten(0, 1)[:length]


def attend(batch: "KVBatch", layer: int, q: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    """Softmax attention in float64, sequence after sequence."""
    cache, out = batch.cache, torch.empty_like(q)
    for s, length in enumerate(batch.lengths.tolist()):
        rows = batch.sequence == s
        blocks = batch.block_tables[s].long()
        k = gather(cache.k[layer], cache.k_scale[layer], blocks, length)
        v = gather(cache.v[layer], cache.v_scale[layer], blocks, length)
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q[rows].double(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        past = batch.positions[rows][:, None].long() - torch.arange(length, device=q.device)
        hidden = (past < 0) | (past >= window) if window else past < 0
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hnm,mhd->nhd", weights, v).to(q.dtype)
    return out


KERNEL = AttentionKernel(store, attend)
