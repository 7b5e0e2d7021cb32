"""GPTQ (Frantar et al. 2022, arXiv:2210.17323) on any grid.

Symbols: W float32 [out, in]; H float32 [in, in], mean of x x^T over calibration inputs; U upper triangular with
H^-1 = U^T U; Q the quantised W. Columns are rounded one at a time; the error of column j, divided by U[j, j], is spread
over the columns not yet rounded along U[j, j+1:] (eq. 3). The loss is trace((W - Q) H (W - Q)^T), per output row.
"""

import torch
from torch import Tensor

from calib.stats import InputStats
from compress.algorithms import Outcome, relative_error
from compress.algorithms.rounding import LANES, descend, round_forward
from compress.recipe import GptqStep
from formats.qtensor import Columns, Grid, IntegerLevels, Params, QTensor


def inverse_factor(H: Tensor, damp: float) -> tuple[Tensor, float]:
    """U upper triangular with (H + damp * mean(diag H) * I)^-1 = U^T U, and the damping that was needed.

    damp grows tenfold until the factorisation succeeds; past 1 the eigenvalues are clamped instead.
    """
    n, mean = len(H), H.diagonal().mean().clamp(min=1e-12)
    while damp <= 1:
        damped = H + damp * mean * torch.eye(n, device=H.device)
        L, info = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not info and bool(torch.isfinite(L).all()):
            R = L.flip(0, 1)  # damped = R R^T with R upper, so that U = R^-1
            return torch.linalg.solve_triangular(R, torch.eye(n, device=H.device), upper=True), damp
        damp = max(damp, 1e-4) * 10
    values, vectors = torch.linalg.eigh(H.double())
    clamped = (vectors * values.clamp(min=float(mean) * 0.01)) @ vectors.T
    L = torch.linalg.cholesky(clamped.flip(0, 1))
    U = torch.linalg.solve_triangular(L.flip(0, 1), torch.eye(n, dtype=L.dtype, device=H.device), upper=True)
    return U.float(), float("inf")


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


class Rounder:
    """Rounds a matrix to given columns of a grid, by feedback (GPTQ) or by coordinate descent."""

    def __init__(self, W: Tensor, H: Tensor, grid: Grid, order: Tensor) -> None:
        self.W, self.H, self.grid, self.order = W, H, grid, order
        self.lanes = Lanes(len(W), order)
        levels, self.rank = grid.level_table.sort()
        self.levels = levels.numpy()
        self.middles = ((levels[1:] + levels[:-1]) / 2).numpy()
        self.integer = isinstance(grid, IntegerLevels)

    def set_columns(self, columns: Columns) -> None:
        like = lambda t: torch.zeros_like(self.W) if t is None else t  # noqa: E731
        self.scale, self.shift, self.zero = (
            self.lanes.pack(like(t)) for t in (columns.scale, columns.offset, columns.zero)
        )

    @property
    def _grid(self):  # type: ignore[no-untyped-def]
        return self.scale, self.shift, self.zero, self.levels, self.middles, self.integer

    def feedback(self, U: Tensor) -> None:
        w = self.lanes.pack(self.W)
        self.index, self.values = torch.empty(w.shape, dtype=torch.uint8).numpy(), w.copy()
        round_forward(w, U.contiguous().numpy(), *self._grid, self.index, self.values)

    def polish(self, sweeps: int) -> None:
        H = self.H[self.order][:, self.order].contiguous()
        G = self.lanes.pack((self.W - self.result()[1]) @ self.H)
        descend(G, H.numpy(), *self._grid, self.index, self.values, sweeps)

    def result(self) -> tuple[Tensor, Tensor]:
        """Codes uint8 and values float32, [out, in]."""
        index = self.lanes.unpack(self.index)
        codes = index if self.integer else self.rank.to(torch.uint8)[index.long()]
        return codes, self.lanes.unpack(self.values)


class Curvature:
    """A layer's Hessian made ready once for all linears that share it: dead inputs, order, factor."""

    def __init__(self, H: Tensor, damp: float) -> None:
        diagonal = H.diagonal()
        self.H = H + torch.diag((diagonal == 0) * diagonal.mean().clamp(min=1e-12))  # dead inputs cost nothing
        self.order = torch.argsort(self.H.diagonal(), descending=True, stable=True)
        self.U, self.damp = inverse_factor(self.H[self.order][:, self.order], damp)


def gptq(W: Tensor, curvature: Curvature, grid: Grid, sweeps: int = 0) -> tuple[QTensor, Tensor]:
    """Static-groups GPTQ: fit all blocks, then round in falling diag H order. Returns the tensor and its values."""
    params: Params = grid.fit(W, curvature.H.diagonal())
    rounder = Rounder(W, curvature.H, grid, curvature.order)
    rounder.set_columns(grid.columns(params, W.shape[1]))
    rounder.feedback(curvature.U)
    if sweeps:
        rounder.polish(sweeps)
    codes, values = rounder.result()
    return QTensor(grid, codes, params), values


def quantize(W: Tensor, stats: InputStats, grid: Grid, step: GptqStep) -> Outcome:
    """W float32 [out, in]. Linears that share `stats` share the factorisation too."""
    key = f"gptq curvature, damp {step.damp}"
    curvature: Curvature = stats.derived.setdefault(key, None) or Curvature(stats.hessian, step.damp)
    stats.derived[key] = curvature
    tensor, values = gptq(W, curvature, grid)
    plain = grid.decode(grid.encode(W, tensor.params), tensor.params)
    H = curvature.H
    return Outcome(tensor, relative_error(W, values, H), relative_error(W, plain, H), curvature.damp)
