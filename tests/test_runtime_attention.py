"""Attention kernels against dense softmax in float64, and the promise that a row depends on nothing but its past."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from formats.errors import UsageError
from runtime.blocks import DTYPES, BlockManager, BlockTable, KVBatch, KVCache

CASES = [(None, None), (20, None), (7, 5.0), (None, 3.0)]


class Setting:
    """Random keys and values of several sequences, stored in shuffled blocks of a poisoned cache."""

    def __init__(self, lengths: list[int], heads: int = 6, kv_heads: int = 2, dim: int = 24, size: int = 16) -> None:
        g = torch.Generator().manual_seed(len(lengths) + dim)
        self.lengths, self.heads, self.dim, self.size = lengths, heads, dim, size
        self.k, self.v = ([torch.randn(n, kv_heads, dim, generator=g) for n in lengths] for _ in range(2))
        self.q = [torch.randn(n, heads, dim, generator=g) for n in lengths]
        self.kv_heads = kv_heads

    def cache(self, kernel: str, dtype: str = "float32") -> KVCache:
        cache = KVCache(2, 64, self.kv_heads, self.dim, self.size, dtype, kernel=kernel)
        if dtype != "int8":
            cache.k.fill_(float("nan"))
            cache.v.fill_(float("inf"))
        return cache

    def run(self, kernel: str, chunks: list[list[int]], dtype: str = "float32", **case: Any) -> list[Tensor]:
        """Attend, chunk by chunk: chunks[step][i] tokens of sequence i. Returns [tokens, heads, dim] of each."""
        cache, manager = self.cache(kernel, dtype), BlockManager(64, self.size)
        tables = [BlockTable() for _ in self.lengths]
        out: list[list[Tensor]] = [[] for _ in self.lengths]
        for counts in chunks:
            active = [i for i, n in enumerate(counts) if n]
            for i in active:
                manager.reserve(tables[i], tables[i].length + counts[i])
            batch = cache.batch([tables[i] for i in active], [counts[i] for i in active])
            parts = [slice(tables[i].length, tables[i].length + counts[i]) for i in active]
            q, k, v = (
                torch.cat([x[i][p] for i, p in zip(active, parts, strict=True)]) for x in (self.q, self.k, self.v)
            )
            y = batch.attend(1, q, k, v, 0.3, case.get("window"), case.get("softcap"))
            for i, rows in zip(active, y.split([counts[i] for i in active]), strict=True):
                out[i].append(rows)
                tables[i].length += counts[i]
        return [torch.cat(rows) for rows in out]

    def dense(self, i: int, window: int | None, softcap: float | None) -> Tensor:
        group, n = self.heads // self.kv_heads, self.lengths[i]
        k, v = (x[i].double().repeat_interleave(group, 1).transpose(0, 1) for x in (self.k, self.v))
        scores = self.q[i].double().transpose(0, 1) @ k.transpose(1, 2) * 0.3
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        distance = torch.arange(n)[:, None] - torch.arange(n)
        hidden = (distance < 0) | (distance >= (window or n))
        return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1).float()


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("window, softcap", CASES)
def test_agrees_with_dense_softmax(kernel: str, window: int | None, softcap: float | None) -> None:
    setting = Setting([1, 17, 50])
    out = setting.run(kernel, [[1, 9, 33], [0, 8, 17]], window=window, softcap=softcap)
    for i, y in enumerate(out):
        torch.testing.assert_close(y, setting.dense(i, window, softcap), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("heads, kv_heads, dim, size", [(1, 1, 8, 4), (9, 3, 64, 16), (4, 4, 80, 32), (5, 1, 33, 1)])
def test_cpu_kernel_takes_any_shape(heads: int, kv_heads: int, dim: int, size: int) -> None:
    setting = Setting([3, 21], heads, kv_heads, dim, size)
    for i, y in enumerate(setting.run("cpu", [[3, 21]])):
        torch.testing.assert_close(y, setting.dense(i, None, None), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("window, softcap", CASES[:3])
def test_rows_have_the_same_bits_alone_in_a_batch_and_in_chunks(
    dtype: str, window: int | None, softcap: float | None
) -> None:
    setting = Setting([40, 1, 23])
    case: dict[str, Any] = dict(dtype=dtype, window=window, softcap=softcap)
    together = setting.run("cpu", [[40, 1, 23]], **case)
    chunked = setting.run("cpu", [[5, 0, 20], [17, 1, 1], [1, 0, 1], [17, 0, 1]], **case)
    alone = setting.run("cpu", [[40, 0, 0], [0, 1, 0], *[[0, 0, 1]] * 23], **case)
    for a, b, c in zip(together, chunked, alone, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_stored_values_are_those_of_the_dtype(dtype: str) -> None:
    setting = Setting([37, 5])
    chunks = [[20, 2], [17, 3]]
    ours, reference = (setting.run(kernel, chunks, dtype) for kernel in ("cpu", "reference"))
    for i in range(2):
        torch.testing.assert_close(ours[i], reference[i], rtol=1e-5, atol=5e-6)
        exact = setting.dense(i, None, None)
        error = (ours[i] - exact).norm() / exact.norm()
        assert error < {"float16": 1e-3, "bfloat16": 8e-3, "int8": 2e-2}[dtype]


def test_half_precision_reads_zero_subnormal_and_negative_numbers() -> None:
    values = torch.tensor([0.0, -0.0, 6e-8, -5.96e-8, 1e-4, -65504.0, 1.5, -2.25]).half()
    setting = Setting([1], 1, 1, 8)
    setting.v[0] = values.float().reshape(1, 1, 8)
    assert torch.equal(setting.run("cpu", [[1]], "float16")[0].flatten(), values.float())


def test_int8_scales_grow_with_a_block_and_start_afresh_in_a_reused_one() -> None:
    cache, manager, table = KVCache(1, 1, 1, 8, 16, "int8"), BlockManager(1), BlockTable()
    for magnitude in (100.0, 1.0, 4.0):  # each time the only block is taken again
        manager.reserve(table, 2)
        for value in (magnitude / 2, magnitude):
            x = torch.full((1, 1, 8), value)
            cache.batch([table], [1]).attend(0, x, x, x, 1.0)
            table.length += 1
        assert cache.k_scale[0, 0, 0] == pytest.approx(magnitude / 127)
        stored = cache.k[0, 0, :2, 0, 0].float() * cache.k_scale[0, 0, 0]
        torch.testing.assert_close(stored, torch.tensor([magnitude / 2, magnitude]), rtol=0.01, atol=0)
        manager.release(table)


def test_unknown_dtype_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="fp12"):
        KVCache(1, 1, 1, 8, dtype="fp12")
    assert KVBatch.TILE == 16 and set(DTYPES) == {"float32", "float16", "bfloat16", "int8"}


def triton_agrees() -> None:
    setting = Setting([1, 35], 6, 2, 24)
    for dtype in ("float32", "float16", "int8"):
        for window, softcap in CASES[:3]:
            case: dict[str, Any] = dict(dtype=dtype, window=window, softcap=softcap)
            ours, reference = (setting.run(name, [[1, 18], [0, 17]], **case) for name in ("triton", "reference"))
            for a, b in zip(ours, reference, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    a, b = setting.run("triton", [[1, 35]]), setting.run("triton", [[1, 9], [0, 26]])
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_triton_kernel_agrees_under_the_interpreter() -> None:
    here = Path(__file__).parent  # the interpreter must be chosen before triton is imported
    code = f"import sys; sys.path.insert(0, {str(here)!r}); import test_runtime_attention as t; t.triton_agrees()"
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=here.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
