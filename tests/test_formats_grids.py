"""Every number format: its fit beats the plain ones and survives strange input."""

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from formats.grids import parse_grid
from formats.qtensor import Grid, Params

torch.set_num_threads(1)

LEGACY = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]
AFFINE = ["int4-g32", "int4-g64-sym", "int3-g128", "int2-g64", "int8-channel-sym", "int8-channel", "int3-channel"]
KQUANTS = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]
CODEBOOKS = ["iq4_nl", "iq4_xs", "nf4", "mxfp4"]
GRIDS = LEGACY + AFFINE + KQUANTS + CODEBOOKS


def weights(kind: str, rows: int = 24, n: int = 512) -> Tensor:
    torch.manual_seed(0)
    w = torch.randn(rows, n) * 0.02
    if kind == "heavy":
        w = torch.distributions.StudentT(3.0).sample((rows, n)) * 0.02
    if kind == "outlier":
        w[:, ::37] *= 15
    return w


def importances(kind: str, n: int = 512) -> Tensor | None:
    torch.manual_seed(1)
    return {"none": None, "skewed": torch.exp(2 * torch.randn(n)), "sparse": (torch.rand(n) < 0.1).float()}[kind]


def error(w: Tensor, values: Tensor, importance: Tensor | None) -> float:
    squares = (w.double() - values.double()) ** 2
    return float((squares if importance is None else squares * importance.double()).sum())


def fitted(grid: Grid, w: Tensor, importance: Tensor | None) -> float:
    params = grid.fit(w, importance)
    return error(w, grid.decode(grid.encode(w, params), params), importance)


def min_max(grid: Grid, w: Tensor) -> Params:
    """The plain parameters: the range of each block, nothing searched."""
    block = grid.block or w.shape[1]
    g = w.unflatten(1, (-1, block))
    bits = int(np.log2(len(grid.level_table)))
    top = (1 << bits) - 1
    if grid.level_table[0] < 0:
        return {"scale": (g.abs().amax(-1) / (top // 2)).half()}
    if grid.name in LEGACY:
        return {"scale": ((g.amax(-1) - g.amin(-1)) / top).half(), "minimum": g.amin(-1).half()}
    low, high = g.amin(-1).clamp(max=0), g.amax(-1).clamp(min=0)
    scale = ((high - low) / top).half()
    return {"scale": scale, "zero": (-low / scale.float()).round().clamp(0, top).to(torch.uint8)}


@pytest.mark.parametrize("importance", ["none", "skewed", "sparse"])
@pytest.mark.parametrize("kind", ["gaussian", "heavy", "outlier"])
@pytest.mark.parametrize("name", LEGACY + AFFINE)
def test_fit_beats_min_max(name: str, kind: str, importance: str) -> None:
    grid, w, weight = parse_grid(name), weights(kind), importances(importance)
    params = min_max(grid, w)
    plain = error(w, grid.decode(grid.encode(w, params), params), weight)
    ours = fitted(grid, w, weight)
    assert ours <= plain * (1 + 1e-6)
    if importance == "skewed":
        assert ours < 0.95 * plain


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "outlier"])
@pytest.mark.parametrize("name", LEGACY)
def test_fit_beats_gguf_quantiser(name: str, kind: str) -> None:
    w = weights(kind)
    kind_ = gguf.GGMLQuantizationType[name.upper()]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(w.numpy(), kind_), kind_)
    assert fitted(parse_grid(name), w, None) <= error(w, torch.from_numpy(theirs), None)


def slow_symmetric(block: Tensor, weight: Tensor, bits: int, signed: bool) -> float:
    """Least error over a dense set of fp16 scales, one block, in float64."""
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    scales = torch.logspace(-1.3, 0.3, 4000).double() * block.abs().max() / high
    scales = torch.cat([scales, -scales] if signed else [scales]).half().double()[:, None]
    levels = (block / scales).round().clamp(low, high)
    return float(((levels * scales - block) ** 2 * weight).sum(1).min())


def slow_zero(block: Tensor, weight: Tensor, bits: int) -> float:
    """Least error over every zero point and a dense set of fp16 scales."""
    top = (1 << bits) - 1
    scales = torch.logspace(-1, 0.2, 800).double() * (block.max() - block.min()) / top
    scales = scales.half().double()[:, None]
    rounded = (block / scales).round()
    return min(
        float(((rounded.clamp(-z, top - z) * scales - block) ** 2 * weight).sum(1).min()) for z in range(top + 1)
    )


def slow_minimum(block: Tensor, weight: Tensor, bits: int) -> float:
    """Least error over a dense set of ranges, each followed by least squares for its codes."""
    top = (1 << bits) - 1
    a, b = torch.meshgrid(*[torch.linspace(-0.08, 0.55, 90).double()] * 2, indexing="ij")
    keep = a + b < 0.9
    span = block.max() - block.min()
    scale = ((1 - a - b)[keep] * span / top)[:, None]
    codes = ((block - (block.min() + a[keep] * span)[:, None]) / scale).round().clamp(0, top)
    mean, mean_code = (block * weight).sum() / weight.sum(), (codes * weight).sum(1, keepdim=True) / weight.sum()
    products = (weight * (codes - mean_code) * (block - mean)).sum(1, keepdim=True)
    scale = (products / (weight * (codes - mean_code) ** 2).sum(1, keepdim=True)).half().double()
    minimum = (mean - scale * mean_code).half().double()
    codes = ((block - minimum) / scale).round().clamp(0, top)
    return float(((codes * scale + minimum - block) ** 2 * weight).sum(1).nan_to_num(torch.inf).min())


@pytest.mark.parametrize("importance", ["none", "skewed"])
@pytest.mark.parametrize(
    ("name", "slow", "slack"),
    [
        ("q4_0", lambda x, w: slow_symmetric(x, w, 4, True), 1.02),
        ("q5_0", lambda x, w: slow_symmetric(x, w, 5, True), 1.05),
        ("int4-g64-sym", lambda x, w: slow_symmetric(x, w, 4, False), 1.02),
        ("int4-g32", lambda x, w: slow_zero(x, w, 4), 1.03),
        ("int2-g64", lambda x, w: slow_zero(x, w, 2), 1.03),
        ("q4_1", lambda x, w: slow_minimum(x, w, 4), 1.03),
        ("q5_1", lambda x, w: slow_minimum(x, w, 5), 1.08),
    ],
)
def test_fit_is_near_a_slow_search(
    name: str, slow: Callable[[Tensor, Tensor], float], slack: float, importance: str
) -> None:
    grid, w, weight = parse_grid(name), weights("heavy", 4, 256), importances(importance, 256)
    i = (torch.ones(256) if weight is None else weight).double()
    blocks = zip(w.double().reshape(-1, grid.block), i.repeat(4).reshape(-1, grid.block), strict=True)
    assert fitted(grid, w, weight) <= slack * sum(slow(x, p) for x, p in blocks)


@pytest.mark.parametrize("name", GRIDS)
def test_strange_weights_stay_finite(name: str) -> None:
    grid = parse_grid(name)
    n = 512
    w = weights("gaussian", 12, n)
    w[0] = 0
    w[1] = 0.37
    w[2] = -0.37
    w[3] *= 1e-30
    w[4] *= 1e-7
    w[5] *= 1e6
    w[6] *= 1e30
    w[7, 1:] = 0
    w[8] = w[8].abs() + 1
    w[9] = -w[9].abs() - 1
    for importance in (None, torch.zeros(n), torch.full((n,), 1e-20), torch.full((12, n), 1e25), importances("sparse")):
        params = grid.fit(w, importance)
        codes = grid.encode(w, params)
        values = grid.decode(codes, params)
        assert codes.dtype == torch.uint8 and int(codes.max()) < len(grid.level_table)
        assert values.isfinite().all()
        assert all(p.isfinite().all() for p in params.values() if p.is_floating_point())
        if importance is None:
            assert values[0].abs().max() == 0
        if importance is None and name != "nf4":  # whose rows share a scale: huge ones drown the others
            rest = torch.cat([w[7:8], w[10:]])
            assert (values[[7, 10, 11]] - rest).square().sum() < rest.square().sum() * 0.2


@pytest.mark.parametrize("name", AFFINE)
def test_ragged_last_group(name: str) -> None:
    grid, w, weight = parse_grid(name), weights("gaussian", 5, 300), importances("skewed", 300)
    params = grid.fit(w, weight)
    values = grid.decode(grid.encode(w, params), params)
    assert values.shape == w.shape
    if grid.block:
        whole = 300 // grid.block * grid.block
        tail = grid.fit(w[:, whole:], weight[whole:])
        assert torch.equal(params["scale"][:, -1:], tail["scale"])


@pytest.mark.parametrize("name", [name for name in GRIDS if name != "nf4"])
def test_rows_do_not_depend_on_their_neighbours(name: str) -> None:
    grid, w, weight = parse_grid(name), weights("heavy", 600, 512), importances("skewed")
    params = {key: value[580:] for key, value in grid.fit(w, weight).items()}
    w, weight = w[580:], weight.expand(600, -1)[580:]
    together = error(w, grid.decode(grid.encode(w, params), params), weight)
    assert together == pytest.approx(fitted(grid, w, weight), rel=2e-3)  # the order of a sum may break a tie


def double_quantised(w: Tensor) -> Tensor:
    """QLoRA's nf4 with nested absolute maxima, straight from its definition."""
    grid = parse_grid("nf4")
    blocks = w.reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    nested = torch.nn.functional.pad(absmax - absmax.mean(), (0, -len(absmax) % 256)).view(-1, 256)
    scale = nested.abs().amax(1, keepdim=True)
    nearest = grid.map[(nested / scale).unsqueeze(-1).sub(grid.map).abs().argmin(-1)] * scale
    absmax = nearest.flatten()[: len(absmax)] + absmax.mean()
    normal = blocks / blocks.abs().amax(1, keepdim=True)
    levels = grid.level_table[normal.unsqueeze(-1).sub(grid.level_table).abs().argmin(-1)]
    return (levels * absmax[:, None]).view_as(w)


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "outlier"])
def test_nf4_beats_double_quantisation_as_published(kind: str) -> None:
    w, weight = weights(kind, 100), importances("skewed")
    grid, plain = parse_grid("nf4"), double_quantised(w)
    assert fitted(grid, w, None) < 0.97 * error(w, plain, None)
    assert fitted(grid, w, weight) < 0.8 * error(w, plain, weight)


def test_nf4_is_stored_as_bitsandbytes_does() -> None:
    grid = parse_grid("nf4")
    params = grid.fit(weights("heavy", 100))
    groups = torch.nn.functional.pad(params["scale"].flatten(), (0, -100 * 8 % 256)).view(-1, 256)
    assert len(groups) == 4 and all(torch.equal(g[g > 0], g[:1].expand(int((g > 0).sum()))) for g in groups)
    assert params["offset"].unique().numel() == 1
    assert grid.map.numel() == 256 and {0.0, 1.0, grid.map[0].item()} <= set(grid.map.tolist())
    assert grid.map[:127].flip(0).equal(-grid.map[128:255])  # symmetric but for the 1 at the top


@pytest.mark.slow
def test_nf4_decodes_as_bitsandbytes_does() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    grid, w = parse_grid("nf4"), weights("heavy", 100)
    assert torch.equal(functional.create_dynamic_map(), grid.map)
    params = grid.fit(w)
    codes = grid.encode(w, params)
    _, state = functional.quantize_4bit(w, quant_type="nf4", compress_statistics=True, blocksize=64)
    state.absmax, state.offset = params["sub_scale"].flatten(), params["offset"][0, 0]
    state.state2.absmax = params["scale"].flatten()[::256].contiguous()
    packed = (codes.flatten()[::2] << 4 | codes.flatten()[1::2]).view(-1, 1)
    assert torch.equal(functional.dequantize_4bit(packed, state), grid.decode(codes, params))


@pytest.mark.parametrize("importance", ["none", "skewed"])
def test_mxfp4_takes_the_best_exponent(importance: str) -> None:
    grid, w, weight = parse_grid("mxfp4"), weights("heavy"), importances(importance)
    best = torch.full((24, 16), torch.inf)
    for exponent in range(100, 140):
        params = {"exponent": torch.full((24, 16), exponent, dtype=torch.uint8)}
        squares = (grid.decode(grid.encode(w, params), params) - w) ** 2
        best = torch.minimum(best, (squares * (1 if weight is None else weight)).view(24, 16, 32).sum(-1))
    assert fitted(grid, w, weight) <= best.double().sum() * (1 + 1e-3)


@pytest.mark.parametrize("name", GRIDS)
def test_encode_finds_the_nearest_value(name: str) -> None:
    grid, w = parse_grid(name), weights("heavy", 6, 256)
    params = grid.fit(w)
    every = torch.stack(
        [grid.decode(torch.full(w.shape, code, dtype=torch.uint8), params) for code in range(len(grid.level_table))]
    )
    least = (every - w).abs().amin(0)
    found = (grid.decode(grid.encode(w, params), params) - w).abs()
    torch.testing.assert_close(found, least, rtol=1e-4, atol=1e-7)
