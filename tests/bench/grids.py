"""How good and how fast the fits are: weighted squared error of ours over ggml's, per grid.

    python tests/bench/grids.py [--library libggml.so] [--model model.safetensors]

Made-up weights (normal, Student's t with 4 degrees of freedom, outlier columns), each without and with importances
(log-normal), and, with --model, real ones: every 10th two-dimensional tensor of a safetensors file.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from ggml import Ggml, bundled_library  # noqa: E402

from formats.grids import parse_grid  # noqa: E402

GRIDS = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "iq4_xs", "mxfp4"]


def samples(model: str | None) -> dict[str, list[Tensor]]:
    torch.manual_seed(0)
    normal = torch.randn(512, 1536) * 0.02
    outlier = normal.clone()
    outlier[:, ::37] *= 15
    heavy = torch.distributions.StudentT(4.0).sample((512, 1536)) * 0.02
    found = {"normal": [normal], "heavy": [heavy], "outlier": [outlier]}
    if model:
        with safe_open(model, framework="pt") as file:
            names = [name for name in file.keys() if len(file.get_slice(name).get_shape()) == 2]  # noqa: SIM118
            real = [file.get_tensor(name)[:512].float() for name in names[::10]]
        found["model"] = [w[:, : w.shape[1] // 256 * 256].contiguous() for w in real]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=bundled_library())
    parser.add_argument("--model")
    options = parser.parse_args()
    if options.library is None:
        parser.error("no ggml library: install ik-llama-cpp-python or pass --library")
    torch.set_num_threads(1)
    ggml, sets = Ggml(options.library), samples(options.model)
    titles = [f"{kind}{suffix}" for kind in sets for suffix in ("", "+imp")]
    print("| grid | " + " | ".join(titles) + " | ns/weight |\n" + "|---" * (len(titles) + 2) + "|")
    for name in GRIDS:
        grid, ratios, seconds, count = parse_grid(name), [], 0.0, 0
        for tensors in sets.values():
            for weighted in (False, True):
                logs = []
                for w in tensors:
                    torch.manual_seed(1)
                    importance = torch.exp(torch.randn(w.shape[1])) if weighted else None
                    start = time.process_time()
                    params = grid.fit(w, importance)
                    seconds, count = seconds + time.process_time() - start, count + w.numel()
                    weight = 1.0 if importance is None else importance
                    ours = ((grid.decode(grid.encode(w, params), params) - w) ** 2 * weight).sum().item()
                    theirs = ((ggml.quantize(name, w, importance) - w) ** 2 * weight).sum().item()
                    logs.append(math.log(ours / theirs))
                ratios.append(math.exp(sum(logs) / len(logs)))
        print(f"| {name} | " + " | ".join(f"{r:.3f}" for r in ratios) + f" | {seconds / count * 1e9:.0f} |", flush=True)


if __name__ == "__main__":
    main()
