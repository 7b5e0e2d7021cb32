"""GPTQ (Frantar et al. 2022, arXiv:2210.17323) on any grid.

Symbols: W float32 [out, in]; H float32 [in, in], mean of x x^T over calibration inputs; U upper triangular with
H^-1 = U^T U; Q the quantised W. Columns are rounded one at a time; the error of column j, divided by U[j, j], is spread
over the columns not yet rounded along U[j, j+1:] (eq. 3). The loss is trace((W - Q) H (W - Q)^T), per output row.
"""

import numpy as np
import torch
from torch import Tensor

from calib.stats import InputStats
from compress.algorithms import Outcome, relative_error
from compress.algorithms.refine import refine
from compress.algorithms.rounding import LANES, descend, round_forward
from compress.recipe import GptqStep
from formats.qtensor import Columns, Grid, IntegerLevels, Params, QTensor


def damped(H: Tensor, damp: float) -> Tensor:
    """H + damp * diag(H): shrinks every correlation alike, where a multiple of I would drown the quiet inputs."""
    return H + torch.diag(damp * H.diagonal())


def inverse_factor(H: Tensor, damp: float) -> tuple[Tensor, float]:
    """U upper triangular with damped(H, damp)^-1 = U^T U, and the damping that was needed.

    damp grows tenfold until the factorisation succeeds; past 1 the eigenvalues are clamped instead.
    """
    identity = torch.eye(len(H), device=H.device)
    while damp <= 1:
        L, info = torch.linalg.cholesky_ex(damped(H, damp).flip(0, 1))
        if not info and bool(torch.isfinite(L).all()):
            R = L.flip(0, 1)  # damped = R R^T with R upper, so that U = R^-1
            return torch.linalg.solve_triangular(R, identity, upper=True), damp
        damp = max(damp, 1e-4) * 10
    values, vectors = torch.linalg.eigh(H.double())
    clamped = (vectors * values.clamp(min=float(values.mean().clamp(min=1e-12)) * 0.01)) @ vectors.T
    L = torch.linalg.cholesky(clamped.flip(0, 1))
    return torch.linalg.solve_triangular(L.flip(0, 1), identity.double(), upper=True).float(), float("inf")


class Lanes:
    """Matrices [out, in] cut into chunks of LANES rows and transposed, as the compiled loops want them."""

    def __init__(self, out: int, order: Tensor) -> None:
        self.out, self.order = out, order
        self.back = torch.argsort(order)
        self.padded = -(-out // LANES) * LANES

    def pack(self, x: Tensor):  # type: ignore[no-untyped-def]
        x = x[:, self.order]
        if self.padded != self.out:
            x = torch.cat([x, x.new_zeros(self.padded - self.out, x.shape[1])])
        return x.view(-1, LANES, x.shape[1]).transpose(1, 2).contiguous().numpy()

    def unpack(self, x) -> Tensor:  # type: ignore[no-untyped-def]
        flat = torch.from_numpy(x).transpose(1, 2).reshape(self.padded, -1)
        return flat[: self.out, self.back].contiguous()


SWEEPS, ROUNDS = 3, 3  # coordinate descent over the codes; times that parameters and codes are polished in turn


class Rounder:
    """Rounds a matrix to given columns of a grid, by feedback (GPTQ) or by coordinate descent."""

    def __init__(self, W: Tensor, H: Tensor, grid: Grid, order: Tensor) -> None:
        self.W, self.H, self.grid, self.order = W, H, grid, order
        self.lanes = Lanes(len(W), order)
        levels, self.rank = grid.level_table.sort()
        self.levels = levels.numpy()
        self.middles = ((levels[1:] + levels[:-1]) / 2).numpy()
        self.integer = isinstance(grid, IntegerLevels)
        self.ordered_H = H[order][:, order].contiguous()

    def set_columns(self, columns: Columns) -> None:
        """The values that codes stand for from now on."""
        self.columns = columns
        like = lambda t: torch.zeros_like(self.W) if t is None else t  # noqa: E731
        self.scale, self.shift, self.zero = (
            self.lanes.pack(like(t)) for t in (columns.scale, columns.offset, columns.zero)
        )

    @property
    def _grid(self):  # type: ignore[no-untyped-def]
        return self.scale, self.shift, self.zero, self.levels, self.middles, self.integer

    def feedback(self, U: Tensor) -> None:
        """One column after the other, errors spread over those that follow."""
        w = self.lanes.pack(self.W)
        self.index, self.values = np.empty(w.shape, np.uint8), np.empty_like(w)
        round_forward(w, U.contiguous().numpy(), *self._grid, self.index, self.values)

    def polish(self, sweeps: int) -> None:
        """Coordinate descent from the present codes, under the present columns."""
        values = self.grid.values(self.result()[0], self.columns)
        self.values = self.lanes.pack(values)
        G = self.lanes.pack((self.W - values) @ self.H)
        descend(G, self.ordered_H.numpy(), *self._grid, self.index, self.values, sweeps)

    def result(self) -> tuple[Tensor, Tensor]:
        """Codes uint8 and values float32, [out, in]."""
        index = self.lanes.unpack(self.index)
        codes = index if self.integer else self.rank.to(torch.uint8)[index.long()]
        return codes, self.lanes.unpack(self.values)


class Curvature:
    """A layer's Hessian made ready once for all linears that share it: damped, ordered, factored."""

    def __init__(self, H: Tensor, damp: float) -> None:
        diagonal = H.diagonal()
        H = H + torch.diag((diagonal == 0) * diagonal.mean().clamp(min=1e-12))  # dead inputs cost nothing
        self.order = torch.argsort(H.diagonal(), descending=True, stable=True)
        self.U, self.damp = inverse_factor(H[self.order][:, self.order], damp)
        self.H = damped(H, min(self.damp, 1.0))

    def importance(self) -> Tensor:
        """float32 [in]: how much an error in a column costs, between no feedback (diag H) and feedback (1 / U_jj^2)."""
        conditional = torch.empty_like(self.U.diagonal())
        conditional[self.order] = self.U.diagonal().square().reciprocal()
        return (conditional * self.H.diagonal()).sqrt()


def gptq(W: Tensor, curvature: Curvature, grid: Grid) -> tuple[QTensor, Tensor]:
    """Fit all blocks, round in falling diag H order with feedback, then polish codes and parameters in turn.

    Returns the tensor, and what rounding to nearest with the same fit would have given, float32 [out, in].
    """
    H, n = curvature.H, W.shape[1]
    params: Params = grid.fit(W, curvature.importance())
    plain = grid.decode(grid.encode(W, params), params)
    rounder = Rounder(W, H, grid, curvature.order)
    rounder.set_columns(grid.columns(params, n))
    rounder.feedback(curvature.U)
    rounder.polish(SWEEPS)
    for _ in range(ROUNDS if grid.factors else 0):
        params = refine(W, H, grid, rounder.result()[0], params)
        rounder.set_columns(grid.columns(params, n))
        rounder.polish(SWEEPS)
    return QTensor(grid, rounder.result()[0], params), plain


def permuted(tensor: QTensor, order: Tensor) -> QTensor:
    """A tensor quantised in the column order `order`, back in natural order, with g_idx to find its blocks."""
    back = torch.argsort(order)
    width = tensor.grid.block or len(order)
    g_idx = (torch.arange(len(order), device=order.device) // width)[back].to(torch.int32)
    return QTensor(tensor.grid, tensor.codes[:, back].contiguous(), tensor.params, g_idx)


def quantize(W: Tensor, stats: InputStats, grid: Grid, step: GptqStep) -> Outcome:
    """W float32 [out, in]. Linears that share `stats` share the factorisation too."""
    H = stats.hessian
    curvature = stats.derive(("gptq", step.damp), lambda: Curvature(H, step.damp))
    if step.act_order:  # groups follow the order, so neighbours are alike and share their scales well
        order = curvature.order
        ordered = stats.derive(("gptq act_order", step.damp), lambda: Curvature(H[order][:, order], step.damp))
        tensor, plain = gptq(W[:, order].contiguous(), ordered, grid)
        tensor, plain = permuted(tensor, order), plain[:, torch.argsort(order)]
    else:
        tensor, plain = gptq(W, curvature, grid)
    return Outcome(tensor, relative_error(W, tensor.dequantize(), H), relative_error(W, plain, H), curvature.damp)
