"""Packed linears in Triton: fused dequantising GEMV for few rows, split-K GEMM for some, dequantise + matmul for many.

Split-K writes one partial result per slice and adds them in a second pass, in a fixed order: no atomics. Sizes come
from triton_tuning.json, by number of output columns. Runs on CPUs under TRITON_INTERPRET=1, for tests.
"""

import json
from functools import cache
from importlib import resources
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from formats.qtensor import QTensor
from runtime.kernels.packed import GROUP, Folded, fold
from runtime.linear import Kernel

HALF = GROUP // 2


@triton.jit
def _values(code: Any, scales: Any, offsets: Any, table: Any, group: Any, mask: Any, LOWEST: tl.constexpr,
            TABLE: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr) -> Any:  # fmt: skip
    """float32 weights of codes, whose parameters lie at index `group`; finite where masked."""
    level = tl.load(table + code) if TABLE else (code + LOWEST).to(tl.float32)
    scale = tl.load(scales + group, mask=mask, other=0).to(tl.float32)
    if OFFSET:
        offset = tl.load(offsets + group, mask=mask, other=0).to(tl.float32)
        if ZERO:
            return scale * (level - offset)
        return scale * level - offset
    return scale * level


@triton.jit
def _multiply(x: Any, codes: Any, scales: Any, offsets: Any, table: Any, out: Any, m_count: Any, n_count: Any,
              k_count: Any, row_bytes: Any, groups: Any, width: Any, slice_bytes: Any, NIBBLES: tl.constexpr,
              LOWEST: tl.constexpr, TABLE: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr, DOT: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr) -> None:  # fmt: skip
    """out[slice] float32 [M, N] = x [M, K] times the slice's columns of the packed weight, transposed."""
    n, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(2)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    end = tl.minimum((part + 1) * slice_bytes, row_bytes)
    for first in range(part * slice_bytes, end, BLOCK_K):
        j = first + tl.arange(0, BLOCK_K)
        stored = (n[:, None] < n_count) & (j[None, :] < end)
        raw = tl.load(codes + n[:, None].to(tl.int64) * row_bytes + j[None, :], mask=stored, other=0).to(tl.int32)
        for high in tl.static_range(2 if NIBBLES else 1):
            column = j
            code = raw
            if NIBBLES:
                column = j // 16 * 32 + j % 16 + 16 * high
                code = (raw >> (4 * high)) & 15
            group = n[:, None] * groups + column[None, :] // width
            w = _values(code, scales, offsets, table, group, stored, LOWEST, TABLE, ZERO, OFFSET)
            here = (m[:, None] < m_count) & (column[None, :] < k_count) & (j[None, :] < end)
            a = tl.load(x + m[:, None].to(tl.int64) * k_count + column[None, :], mask=here, other=0)
            if DOT:
                sums += tl.dot(a, tl.trans(w).to(a.dtype), input_precision="ieee")
            else:
                sums += tl.sum(a.to(tl.float32)[:, None, :] * w[None, :, :], 2)
    at = (part.to(tl.int64) * m_count + m[:, None]) * n_count + n[None, :]
    tl.store(out + at, sums, mask=(m[:, None] < m_count) & (n[None, :] < n_count))


@triton.jit
def _add_slices(parts: Any, out: Any, size: Any, SLICES: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """The second pass of split-K: out [size] = the sum of SLICES partial results, first to last."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(SLICES):
        total += tl.load(parts + part * size + i, mask=i < size, other=0)
    tl.store(out + i, total, mask=i < size)


@triton.jit
def _dequantise(codes: Any, scales: Any, offsets: Any, table: Any, rows: Any, out: Any, k_count: Any, row_bytes: Any,
                groups: Any, width: Any, NIBBLES: tl.constexpr, LOWEST: tl.constexpr, TABLE: tl.constexpr,
                ZERO: tl.constexpr, OFFSET: tl.constexpr, BLOCK_K: tl.constexpr) -> None:  # fmt: skip
    """out [rows, K] = weight rows `rows`, one program per row and block of columns."""
    i, column = tl.program_id(0), tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.load(rows + i)
    inside = column < k_count
    byte = column
    if NIBBLES:
        byte = column // 32 * 16 + column % 16
    code = tl.load(codes + n * row_bytes + byte, mask=inside, other=0).to(tl.int32)
    if NIBBLES:
        code = (code >> (column % 32 // 16 * 4)) & 15
    w = _values(code, scales, offsets, table, n * groups + column // width, inside, LOWEST, TABLE, ZERO, OFFSET)
    tl.store(out + i.to(tl.int64) * k_count + column, w, mask=inside)


@cache
def tuning() -> dict[str, Any]:
    """The tuning table: block sizes by number of output columns, and the row counts where strategies change."""
    table: dict[str, Any] = json.loads((resources.files("runtime.kernels") / "triton_tuning.json").read_text())
    return table


def _tuned(strategy: str, n: int) -> dict[str, int]:
    sizes: dict[str, int] = next(e for e in tuning()[strategy] if e["columns_up_to"] is None or n <= e["columns_up_to"])
    return sizes


class TritonKernel(Kernel):
    """Codes uint8 [out, bytes] (two 4-bit codes a byte, 16 columns apart), parameters [out, groups]."""

    def __init__(self, weight: "Tensor | QTensor", device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.out_features, self.in_features = weight.shape
        folded = fold(weight) if isinstance(weight, QTensor) else None
        self.dense: Tensor | None = None
        if folded is None:
            dense = weight.dequantize() if isinstance(weight, QTensor) else weight
            self.dense = dense.to(device, dtype)
            return
        self.order = None if folded.order is None else folded.order.to(device)
        self._upload(folded)

    def _upload(self, f: Folded) -> None:
        layout = f.layout
        columns = -(-self.in_features // GROUP) * GROUP
        codes = f.codes.new_zeros(self.out_features, columns)
        codes[:, : self.in_features] = f.codes
        if layout.store == "4":
            pairs = codes.view(self.out_features, -1, 2, HALF)
            codes = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
        self.width = layout.group << f.shift
        table = torch.tensor(layout.table or (0.0,))
        self.codes, self.scale, self.offset, self.table = (
            t.contiguous().to(self.device) for t in (codes, f.scale, f.offset, table)
        )
        self.flags: dict[str, Any] = dict(
            NIBBLES=layout.store == "4", LOWEST=layout.lowest, TABLE=bool(layout.table), ZERO=layout.zero,
            OFFSET=bool(layout.offset),
        )  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        if self.dense is not None:
            return x @ self.dense.T
        x = (x if self.order is None else x[:, self.order]).contiguous()
        if len(x) > tuning()["gemm_up_to"]:
            return x @ self._rows(torch.arange(self.out_features, device=self.device), x.dtype).T
        return self.fused(x, "gemv" if len(x) <= tuning()["gemv_up_to"] else "gemm")

    def fused(self, x: Tensor, strategy: str, **override: int) -> Tensor:
        """x [M, in] (columns in stored order) by one of the fused strategies; override: sizes to try when tuning."""
        m, n = len(x), self.out_features
        sizes = _tuned(strategy, n) | override
        row_bytes, block_k = self.codes.shape[1], sizes["block_k"]
        blocks = -(-row_bytes // block_k)
        split = min(sizes["split"], blocks)
        slice_bytes = -(-blocks // split) * block_k
        split = -(-row_bytes // slice_bytes)
        block_m = triton.next_power_of_2(m) if strategy == "gemv" else max(16, min(64, triton.next_power_of_2(m)))
        parts = torch.empty(split, m, n, dtype=torch.float32, device=x.device)
        grid = (triton.cdiv(n, sizes["block_n"]), triton.cdiv(m, block_m), split)
        _multiply[grid](
            x, self.codes, self.scale, self.offset, self.table, parts, m, n, self.in_features, row_bytes,
            self.scale.shape[1], self.width, slice_bytes, **self.flags, DOT=strategy == "gemm", BLOCK_M=block_m,
            BLOCK_N=sizes["block_n"], BLOCK_K=block_k, num_warps=sizes["warps"],
        )  # fmt: skip
        if split == 1:
            return parts[0].to(x.dtype)
        out = torch.empty(m, n, dtype=x.dtype, device=x.device)
        _add_slices[(triton.cdiv(m * n, 1024),)](parts, out, m * n, SLICES=split, BLOCK=1024)
        return out

    def _rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantised rows, columns in stored order."""
        out = torch.empty(len(ids), self.in_features, dtype=dtype, device=self.device)
        grid = (len(ids), triton.cdiv(self.in_features, 1024))
        _dequantise[grid](
            self.codes, self.scale, self.offset, self.table, ids, out, self.in_features, self.codes.shape[1],
            self.scale.shape[1], self.width, **self.flags, BLOCK_K=1024,
        )  # fmt: skip
        return out

    def rows(self, ids: Tensor) -> Tensor:
        if self.dense is not None:
            return self.dense[ids]
        stored = self._rows(ids, self.dtype)
        return stored if self.order is None else torch.empty_like(stored).index_copy_(1, self.order, stored)

    def nbytes(self) -> int:
        if self.dense is not None:
            return self.dense.nbytes
        return self.codes.nbytes + self.scale.nbytes + self.offset.nbytes

    def describe(self, m: int) -> str:
        if self.dense is not None:
            return "triton: dense matmul"
        strategies = (("gemv", "fused GEMV"), ("gemm", "split-K GEMM"))
        return "triton: " + next((what for s, what in strategies if m <= tuning()[f"{s}_up_to"]), "dequantise + matmul")
