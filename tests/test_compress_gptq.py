"""GPTQ and its parts against slow references written from the paper, and inequalities they must satisfy."""

import pytest
import torch
from torch import Tensor

from calib.stats import InputStats
from compress.algorithms import relative_error
from compress.algorithms.gptq import Curvature, Rounder, gptq, inverse_factor, quantize
from compress.algorithms.refine import refine
from compress.algorithms.rtn import quantize as rtn
from compress.recipe import GptqStep, RtnStep
from formats.grids import parse_grid

GRIDS = ["q4_1", "q4_0", "q8_0", "int3-g64", "int4-g64-sym", "int4-channel", "iq4_nl", "q4_k", "q3_k", "q2_k"]


def problem(out: int = 48, n: int = 256, tokens: int = 2000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(W [out, n], H [n, n]) with correlated inputs of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(n, n, generator=generator) / n**0.5 + torch.eye(n)
    size = torch.rand(n, generator=generator).pow(3) * 4 + 0.05
    x = (torch.randn(tokens, n, generator=generator) @ mix) * size
    return torch.randn(out, n, generator=generator), x.T @ x / tokens


def stats_of(H: Tensor) -> InputStats:
    stats = InputStats(len(H), tokens=10_000)
    stats.hessian = H
    return stats


def gptq_by_the_paper(W: Tensor, H: Tensor, grid, params, order: Tensor) -> Tensor:
    """Equation 3, column by column, the inverse recomputed for the remaining columns each time; float64."""
    W, H = W.double().clone(), H.double()
    left = order.tolist()
    Q = torch.zeros_like(W)
    columns = grid.columns(params, W.shape[1])
    while left:
        j, inverse = left[0], torch.linalg.inv(H[left][:, left])
        one = type(columns)(*(None if t is None else t[:, [j]] for t in (columns.scale, columns.offset, columns.zero)))
        Q[:, j] = grid.values(grid.nearest(W[:, [j]].float(), one), one)[:, 0].double()
        W[:, left] -= torch.outer((W[:, j] - Q[:, j]) / inverse[0, 0], inverse[0])
        left = left[1:]
    return Q.float()


@pytest.mark.parametrize("name", ["q4_1", "int3-g64", "iq4_nl"])
def test_feedback_is_the_papers(name: str) -> None:
    W, H = problem(out=19, n=128)
    grid, curvature = parse_grid(name), Curvature(H, 0.01)
    params = grid.fit(W, H.diagonal())
    rounder = Rounder(W, H, grid, curvature.order)
    rounder.set_columns(grid.columns(params, 128))
    rounder.feedback(curvature.U)
    codes, values = rounder.result()
    expected = gptq_by_the_paper(W, curvature.H, grid, params, curvature.order)
    differing = (values != expected).float().mean()
    assert differing < 0.01  # ties fall differently in float32
    assert torch.equal(values, grid.decode(codes, params))


def test_without_feedback_it_would_not_be_gptq() -> None:
    """The reference tells apart an implementation that forgets to spread the error."""
    W, H = problem(out=19, n=128)
    grid, curvature = parse_grid("q4_1"), Curvature(H, 0.01)
    params = grid.fit(W, H.diagonal())
    expected = gptq_by_the_paper(W, curvature.H, grid, params, curvature.order)
    assert (grid.decode(grid.encode(W, params), params) != expected).float().mean() > 0.1


@pytest.mark.parametrize("name", GRIDS)
def test_gptq_loses_much_less_than_rounding(name: str) -> None:
    W, H = problem()
    ours = quantize(W, stats_of(H), parse_grid(name), GptqStep(algorithm="gptq"))
    plain = rtn(W, None, parse_grid(name), RtnStep(algorithm="rtn"))
    weighted = rtn(W, stats_of(H), parse_grid(name), RtnStep(algorithm="rtn", importance=True))
    assert ours.error == pytest.approx(relative_error(W, ours.tensor.dequantize(), H), rel=1e-4)
    assert weighted.error < relative_error(W, plain.tensor.dequantize(), H)
    assert ours.error < 0.75 * weighted.error


@pytest.mark.parametrize("name", ["q4_1", "q4_k", "q3_k", "int4-g64", "iq4_nl"])
def test_refine_and_polish_only_lower_the_loss(name: str) -> None:
    W, H = problem()
    grid, curvature = parse_grid(name), Curvature(H, 0.01)
    params = grid.fit(W, H.diagonal())
    rounder = Rounder(W, curvature.H, grid, curvature.order)
    rounder.set_columns(grid.columns(params, 256))
    rounder.feedback(curvature.U)
    losses = [relative_error(W, rounder.result()[1], curvature.H)]
    for _ in range(3):
        rounder.polish(2)
        codes, values = rounder.result()
        losses.append(relative_error(W, values, curvature.H))
        params = refine(W, curvature.H, grid, codes, params)
        losses.append(relative_error(W, grid.decode(codes, params), curvature.H))
        rounder.set_columns(grid.columns(params, 256))
    assert all(b <= a * (1 + 1e-5) for a, b in zip(losses, losses[1:], strict=False))
    assert losses[-1] < 0.97 * losses[0]


def test_polish_ends_where_no_single_code_can_improve() -> None:
    W, H = problem(out=8, n=64)
    grid, curvature = parse_grid("int4-g64"), Curvature(H, 0.01)
    rounder = Rounder(W, curvature.H, grid, curvature.order)
    params = grid.fit(W)
    rounder.set_columns(grid.columns(params, 64))
    rounder.feedback(curvature.U)
    rounder.polish(50)
    codes, values = rounder.result()

    def losses(codes: Tensor) -> Tensor:
        E = W - grid.decode(codes, params)
        return ((E @ curvature.H) * E).sum(1)

    best = losses(codes)
    for j in range(64):
        for step in (-1, 1):
            moved = codes.clone()
            moved[:, j] = (moved[:, j].int() + step).clamp(0, 15).to(torch.uint8)
            assert (losses(moved) >= best - 1e-4 * best).all()


def test_act_order_stores_blocks_of_alike_columns() -> None:
    W, H = problem()
    step = GptqStep(algorithm="gptq", act_order=True)
    outcome = quantize(W, stats_of(H), parse_grid("int4-g64"), step)
    g_idx = outcome.tensor.g_idx
    assert g_idx is not None
    order = torch.argsort(H.diagonal(), descending=True, stable=True)
    assert torch.equal(g_idx[order], (torch.arange(256) // 64).int())
    assert outcome.error < 0.85 * outcome.rtn_error


def test_a_hessian_without_full_rank_needs_more_damping_and_dead_inputs_are_harmless() -> None:
    W, _ = problem(n=128)
    x = torch.randn(20, 128)
    x[:, 7] = 0
    H = x.T @ x / 20
    curvature = Curvature(H, 1e-9)
    assert curvature.damp > 1e-9
    values = gptq(W, curvature, parse_grid("q4_1"))[0].dequantize()
    assert torch.isfinite(values).all()
    assert (values[:, 7] - W[:, 7]).abs().max() < 0.5


def test_a_hopeless_hessian_gets_its_eigenvalues_clamped() -> None:
    H = -torch.eye(32) * 100 + torch.ones(32, 32)
    H.fill_diagonal_(1.0)
    H[0, 1] = H[1, 0] = -300.0
    U, damp = inverse_factor(H, 0.01)
    assert damp == float("inf") and torch.isfinite(U).all()


def test_statistics_are_the_second_moments() -> None:
    x = torch.randn(3, 100, 24)
    stats = InputStats(24)
    for part in x.split([1, 2]):
        stats.add(part)
    stats.finish()
    flat = x.reshape(-1, 24).double()
    assert torch.allclose(stats.hessian.double(), flat.T @ flat / 300, atol=1e-5)
    assert torch.allclose(stats.importance.double(), flat.square().mean(0), atol=1e-5)
