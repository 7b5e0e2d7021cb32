"""Kernels of packed linears against float64 dequantise + matmul: all grids, odd shapes, any number of rows."""

import numpy as np
import pytest
import torch

from formats.errors import UsageError
from formats.grids import GRIDS, parse_grid
from formats.qtensor import QTensor
from runtime.kernels.cpu import CpuInt8Kernel, CpuKernel, activations, multiply, quantise
from runtime.linear import QuantizedLinear

AFFINE = ("int2-g96", "int3-g128", "int4-g16", "int4-g24", "int4-g64-sym", "int4-channel", "int8-channel-sym")
ROWS = (1, 2, 3, 7, 8, 13, 300)
SUPER = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")
SHAPES = {
    grid: (40, 512) if grid in SUPER else (33, 100) if grid.startswith("int") else (40, 96)
    for grid in (*GRIDS, *AFFINE)
}


def quantised(grid: str, out: int, n: int) -> QTensor:
    g = parse_grid(grid)
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(out, n, generator=generator) * torch.rand(out, 1, generator=generator)
    params = g.fit(w)
    return QTensor(g, g.encode(w, params), params)


def inputs(n: int) -> torch.Tensor:
    return torch.randn(max(ROWS), n, generator=torch.Generator().manual_seed(1))


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("grid", SHAPES)
def test_all_kernels_multiply_by_what_the_grid_decodes(grid: str) -> None:
    weight = quantised(grid, *SHAPES[grid])
    dense, x = weight.dequantize(), inputs(weight.shape[1])
    want = x.double() @ dense.double().T
    for kernel, limit in (("reference", 1e-6), ("cpu", 1e-6), ("cpu-int8", 1.3e-2)):
        linear = QuantizedLinear(weight, kernel=kernel)
        assert torch.equal(linear.rows(torch.tensor([0, 32, 5, 5])), dense[[0, 32, 5, 5]])
        whole = linear(x)
        for m in ROWS:
            got = linear(x[:m])
            assert relative(got, want[:m]) < limit, (kernel, m)
            if kernel != "reference":
                assert torch.equal(got, whole[:m]), f"{kernel}: a row depends on the {m} rows beside it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dense_weights(dtype: torch.dtype) -> None:
    w = torch.randn(50, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    linear, x = QuantizedLinear(w, kernel="cpu"), inputs(70)
    for m in ROWS:
        assert relative(linear(x[:m]), x[:m].double() @ w.double().T) < 1e-6
    assert torch.equal(linear.rows(torch.tensor([49, 0])), w[[49, 0]].float())


@pytest.mark.parametrize("kernel", ["reference", "cpu", "cpu-int8"])
def test_permuted_groups(kernel: str) -> None:
    """GPTQ's act_order: column j belongs to group g_idx[j]."""
    grid, n = parse_grid("int4-g32"), 96
    order = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    g_idx = torch.empty(n, dtype=torch.int32)
    g_idx[order] = (torch.arange(n) // 32).int()
    w = torch.randn(20, n, generator=torch.Generator().manual_seed(4))
    params = grid.fit(w[:, torch.argsort(g_idx.long(), stable=True)])
    sorted_columns = torch.argsort(g_idx.long(), stable=True)
    codes = torch.empty(20, n, dtype=torch.uint8)
    codes[:, sorted_columns] = grid.encode(w[:, sorted_columns], params)
    weight = QTensor(grid, codes, params, g_idx)
    linear, x = QuantizedLinear(weight, torch.ones(20), kernel=kernel), inputs(n)[:5]
    want = x.double() @ weight.dequantize().double().T + 1
    assert relative(linear(x), want) < (1.3e-2 if kernel == "cpu-int8" else 1e-6)
    assert torch.equal(linear.rows(torch.arange(20)), weight.dequantize())


@pytest.mark.parametrize("kind", [CpuKernel, CpuInt8Kernel])
@pytest.mark.parametrize("rows", ROWS)
def test_every_output_is_written_and_nothing_beyond(kind: type[CpuKernel], rows: int) -> None:
    """Poisoned outputs, garbage in the rows after the last one, and two threads."""
    kernel = kind(quantised("q4_1", 160, 64), "cpu", torch.float32)
    a = activations(rows + 1, 64)
    a.x[:] = np.random.default_rng(0).standard_normal(a.x.shape)
    quantise(a, rows, False)
    a.x[rows], a.scales[rows] = np.nan, np.nan
    out = np.full((rows + 1, kernel.stage.columns), np.nan, np.float32)
    multiply(kernel.stage.descriptors, kernel.stage.bounds(2), a, out, rows)
    assert np.isfinite(out[:rows]).all() and np.isnan(out[rows]).all()


def test_weights_stay_packed_and_kernels_name_themselves() -> None:
    linear = QuantizedLinear(quantised("q4_0", 64, 128), kernel="cpu-int8")
    assert linear.kernel.nbytes() == 64 * 128 * 4.5 / 8
    assert "4-bit" in linear.kernel.describe(1) and "int8" in linear.kernel.describe(1)
    with pytest.raises(UsageError, match="reference"):
        QuantizedLinear(torch.zeros(2, 2), kernel="referense")


def test_eight_bit_channels_round_activations_per_token() -> None:
    """W8A8 as compressed-tensors means it: one scale per row of activations, absolute maximum / 127."""
    weight, x = quantised("int8-channel-sym", 40, 100), inputs(100)[:5]
    scale = x.abs().amax(1, keepdim=True).double() / 127
    rounded = (x / scale).round() * scale
    linear = QuantizedLinear(weight, kernel="cpu-int8")
    assert relative(linear(x), rounded @ weight.dequantize().double().T) < 1e-6
    assert "per token" in linear.kernel.describe(1)


def test_extreme_activations() -> None:
    """Zero rows, huge and tiny ones: int8 scales follow them."""
    weight = quantised("q8_0", 40, 96)
    x = torch.stack([torch.zeros(96), torch.full((96,), 1e30), torch.full((96,), 1e-30)])
    got, dense = QuantizedLinear(weight, kernel="cpu-int8")(x), weight.dequantize().double()
    assert torch.equal(got[0], torch.zeros(40))
    for i in (1, 2):
        assert relative(got[i], x[i].double() @ dense.T) < 1.3e-2
