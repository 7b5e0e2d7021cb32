"""Build, check and time the Triton linears on a GPU, in a few minutes.

    python tests/bench/gpu.py [--json OUT] [--tune]

Check: every grid against float64 dequantise + matmul. Time: GEMV at 4 bits against the measured copy bandwidth and
`torch._weight_int4pack_mm`. --tune tries block sizes and prints the best ones for triton_tuning.json.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from formats.grids import GRIDS, parse_grid
from formats.qtensor import QTensor
from runtime.kernels.triton_linear import TritonKernel

SIZES = [(4096, 4096), (11008, 4096), (4096, 11008), (8192, 8192)]


def made_up(grid: str, n: int, k: int) -> QTensor:
    """Random codes under fitted parameters: fitting large matrices on a CPU would take longer than everything else."""
    g = parse_grid(grid)
    params = g.fit(torch.randn(64, k) * 0.02)
    params = {name: p.repeat(-(-n // 64), *[1] * (p.ndim - 1))[:n] for name, p in params.items()}
    return QTensor(g, torch.randint(0, len(g.level_table), (n, k), dtype=torch.uint8), params)


def microseconds(run: Callable[[int], object], copies: int) -> float:
    """Median time of a call, replayed from a CUDA graph over `copies` different weights, so that no cache helps."""
    for i in range(copies):
        run(i)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            run(i)
    times = []
    for _ in range(20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / copies)
    return sorted(times)[len(times) // 2]


def check() -> list[str]:
    failures = []
    for grid in [*GRIDS, "int4-g64", "int4-g128-sym", "int8-channel-sym"]:
        weight = made_up(grid, 512, 1024)
        dense = weight.dequantize().double().cuda()
        for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)):
            kernel = TritonKernel(weight, "cuda", dtype)
            for m in (1, 2, 4, 5, 33, 64, 300):
                x = torch.randn(m, 1024, device="cuda", dtype=dtype)
                want = x.double() @ dense.T
                error = float((kernel(x).double() - want).norm() / want.norm())
                if not error < limit:
                    failures.append(f"{grid} {dtype} M={m}: {error:.1e}")
    return failures


def copy_bandwidth() -> float:
    """GB/s of reading plus writing."""
    a, b = torch.empty(2, 1 << 28, dtype=torch.uint8, device="cuda")
    return 2 * a.numel() / microseconds(lambda _: b.copy_(a), 4) / 1e3


def int4pack(n: int, k: int, m: int, copies: int) -> float:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    weights = [torch._convert_weight_to_int4pack(codes, 8) for _ in range(copies)]
    parameters = torch.ones(k // 128, n, 2, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    return microseconds(lambda i: torch._weight_int4pack_mm(x, weights[i], 128, parameters), copies)


def best_sizes(kernels: list[TritonKernel], x: torch.Tensor, strategy: str) -> tuple[float, dict[str, int]]:
    tried = []
    for n, k, split, warps in itertools.product((4, 8, 16, 32, 64), (64, 128, 256, 512), (1, 2, 4, 8), (2, 4, 8)):
        if not 4096 <= n * k <= 16384 or (strategy == "gemm" and n < 16):
            continue
        sizes = dict(block_n=n, block_k=k, split=split, warps=warps)
        time = microseconds(lambda i, sizes=sizes: kernels[i].fused(x, strategy, **sizes), len(kernels))
        tried.append((time, sizes))
    return min(tried, key=lambda entry: entry[0])


def timings(tune: bool) -> dict[str, object]:
    peak = copy_bandwidth()
    rows = []
    print(f"copy bandwidth {peak:.0f} GB/s")
    for n, k in SIZES:
        copies = max(2, (1 << 28) // (n * k // 2))
        weight = made_up("int4-g128", n, k)
        kernels = [TritonKernel(weight, "cuda", torch.bfloat16) for _ in range(copies)]
        for m in (1, 2, 4, 16, 64):
            x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
            time = microseconds(lambda i, x=x, kernels=kernels: kernels[i](x), copies)
            theirs = int4pack(n, k, m, copies)
            share = kernels[0].nbytes() / time / 1e3 / peak
            row = {"n": n, "k": k, "m": m, "us": time, "int4pack_us": theirs, "share_of_copy": share}
            if tune and m in (1, 16):
                row["best_us"], row["best"] = best_sizes(kernels, x, "gemv" if m == 1 else "gemm")
            rows.append(row)
            print({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}, flush=True)
    return {"device": torch.cuda.get_device_name(), "copy_gb_s": peak, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: no GPU")
        return
    torch.manual_seed(0)
    failures = check()
    print("check:", "all grids agree with the reference" if not failures else "\n".join(["FAILED", *failures]))
    results = timings(args.tune)
    if args.json:
        args.json.write_text(json.dumps({"failures": failures, **results}, indent=1))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
