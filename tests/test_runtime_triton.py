"""The Triton kernels under the interpreter (float32), against float64 dequantise + matmul."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") != "1":  # the variable counts when triton is imported, which others may have done

    def test_under_the_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-3000:]

else:
    import torch
    from test_runtime_linear import SHAPES, quantised, relative

    from runtime.kernels.triton_linear import TritonKernel, tuning
    from runtime.linear import QuantizedLinear

    @pytest.mark.parametrize("grid", SHAPES)
    def test_every_strategy_multiplies_by_what_the_grid_decodes(grid: str) -> None:
        weight = quantised(grid, *SHAPES[grid])
        n, dense = weight.shape[1], weight.dequantize()
        linear = QuantizedLinear(weight, kernel="triton")
        x = torch.randn(tuning()["gemm_up_to"] + 6, n, generator=torch.Generator().manual_seed(1))
        want = x.double() @ dense.double().T
        for m in (1, 3, 17, len(x)):
            assert relative(linear(x[:m]), want[:m]) < 1e-6, linear.kernel.describe(m)
        assert torch.equal(linear.rows(torch.tensor([3, 0, 3])), dense[[3, 0, 3]])

    @pytest.mark.parametrize("strategy", ["gemv", "gemm"])
    def test_slices_add_up_to_the_whole(strategy: str) -> None:
        """Split-K in a fixed order, poisoned partial results included: equal on every run, close to one slice."""
        weight = quantised("q4_1", 40, 480)
        kernel = TritonKernel(weight, "cpu", torch.float32)
        x = torch.randn(3, 480, generator=torch.Generator().manual_seed(2))
        want = x.double() @ weight.dequantize().double().T
        results = [kernel.fused(x, strategy, block_k=32, split=split) for split in (1, 3, 8)]
        for got in results:
            assert relative(got, want) < 1e-6
        assert torch.equal(results[1], kernel.fused(x, strategy, block_k=32, split=3))

    def test_strategies_by_rows() -> None:
        kernel = TritonKernel(quantised("q4_0", 40, 96), "cpu", torch.float32)
        assert [kernel.describe(m) for m in (1, 4, 5, 64, 65)] == [
            "triton: fused GEMV",
            "triton: fused GEMV",
            "triton: split-K GEMM",
            "triton: split-K GEMM",
            "triton: dequantise + matmul",
        ]
