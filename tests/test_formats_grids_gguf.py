"""The grids of GGUF against its published dequantisers, bit for bit, and against ggml's own quantisers."""

import gguf
import numpy as np
import pytest
import torch
from ggml import Ggml, bundled_library

from formats.containers.gguf_blocks import pack_blocks
from formats.grids import parse_grid
from formats.qtensor import Grid, Params, QTensor

torch.set_num_threads(1)

GRIDS = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4"]


def random_params(grid: Grid, out: int, n: int) -> Params:
    """Every stored value a file may hold, fp16 subnormals and negative scales included."""
    supers = n // (grid.block or n)
    params = grid.fit(torch.randn(out, n))
    for name, value in params.items():
        if value.is_floating_point():
            magnitude = 10.0 ** torch.empty(out, supers).uniform_(-7, 2)
            params[name] = (torch.randn(out, supers) * magnitude).half()
        elif name == "exponent":
            params[name] = torch.randint(0, 250, value.shape, dtype=torch.uint8)  # above, products overflow
        else:
            low, high = SUB_RANGES[grid.name]
            params[name] = torch.randint(low, high + 1, value.shape).to(value.dtype)
    return params


SUB_RANGES = {
    "q2_k": (0, 15),
    "q3_k": (-32, 31),
    "q4_k": (0, 63),
    "q5_k": (0, 63),
    "q6_k": (-128, 127),
    "iq4_xs": (-32, 31),
}


@pytest.mark.parametrize("name", GRIDS)
def test_decode_equals_gguf_dequantiser(name: str) -> None:
    torch.manual_seed(0)
    grid = parse_grid(name)
    params = random_params(grid, 16, 1024)
    codes = torch.randint(0, len(grid.level_table), (16, 1024), dtype=torch.uint8)
    stored = pack_blocks(QTensor(grid, codes, params))
    published = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(grid.decode(codes, params).numpy(), published)


@pytest.mark.parametrize("name", GRIDS)
def test_bits_per_weight_is_the_size_of_the_file(name: str) -> None:
    width, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    grid = parse_grid(name)
    assert grid.block == width and grid.bits_per_weight(1024) == size * 8 / width


@pytest.fixture(scope="module")
def ggml() -> Ggml:
    path = bundled_library()
    if path is None:
        pytest.skip("ik-llama-cpp-python is not installed")
    return Ggml(path)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["gaussian", "heavy", "outlier"])
@pytest.mark.parametrize("name", GRIDS)
def test_fit_beats_ggml(ggml: Ggml, name: str, kind: str, weighted: bool) -> None:
    torch.manual_seed(0)
    w = torch.randn(48, 512) * 0.02
    if kind == "heavy":
        w = torch.distributions.StudentT(4.0).sample((48, 512)) * 0.02
    if kind == "outlier":
        w[:, ::37] *= 15
    importance = torch.exp(1.5 * torch.randn(512))
    grid = parse_grid(name)
    params = grid.fit(w, importance if weighted else None)
    weight = importance if weighted else torch.ones(512)
    ours = ((grid.decode(grid.encode(w, params), params) - w) ** 2 * weight).sum()
    theirs = ((ggml.quantize(name, w, importance if weighted else None) - w) ** 2 * weight).sum()
    assert ours < theirs
