"""Better grid parameters for given codes, against the whole Hessian.

A value is linear in each of its grid's factors (scale, minimum, their sub-block integers) while the others stay. For
the columns S that share one, Q_S = s L + m M, and the loss trace((W - Q) H (W - Q)^T) is a quadratic in (s, m) per row:
with G = (W - Q) H and b = G_S + Q_S H_SS, its minimum solves [L H L, L H M; M H L, M H M] (s, m) = (L b, M b). Groups
are taken in turn; a solution is kept in the rows where it still lowers the loss once rounded to what can be stored.
"""

import torch
from torch import Tensor

from formats.qtensor import Factor, Grid, Params


def refine(W: Tensor, H: Tensor, grid: Grid, codes: Tensor, params: Params) -> Params:
    """One pass over all factors of the grid. W float32 [out, in], H [in, in], codes uint8 [out, in]."""
    params = {name: tensor.clone() for name, tensor in params.items()}
    n = W.shape[1]
    for factor in grid.factors:
        Q = grid.decode(codes, params)
        G = (W - Q) @ H
        L, M = grid.derivatives(factor, codes, params)
        width = factor.width or n
        for k, a in enumerate(range(0, n, width)):
            S = slice(a, min(a + width, n))
            Hs = H[S, S]
            old = _Group(factor, params, k)
            scale, minimum = _solve(Q[:, S] @ Hs + G[:, S], Hs, L[:, S], None if M is None else M[:, S], old)
            new = scale[:, None] * L[:, S]
            if M is not None and minimum is not None:
                new = new + minimum[:, None] * M[:, S]
            change = new - Q[:, S]
            better = ((change @ Hs - 2 * G[:, S]) * change).sum(1) < 0
            old.keep(scale, minimum, better)
            change *= better[:, None]
            Q[:, S] += change
            G -= change @ H[S]
    return params


class _Group:
    """One group's values of a factor: views into the parameters, [out]."""

    def __init__(self, factor: Factor, params: Params, k: int) -> None:
        self.factor = factor
        self.scale = params[factor.scale].flatten(1)[:, k]
        self.minimum = params[factor.minimum].flatten(1)[:, k] if factor.minimum else None

    def keep(self, scale: Tensor, minimum: Tensor | None, better: Tensor) -> None:
        self.scale[better] = scale[better].to(self.scale.dtype)
        if self.minimum is not None and minimum is not None:
            self.minimum[better] = minimum[better].to(self.minimum.dtype)


def _solve(b: Tensor, Hs: Tensor, L: Tensor, M: Tensor | None, old: _Group) -> tuple[Tensor, Tensor | None]:
    """Storable (scale, minimum) nearest to the optimum, [out]; the minimum is solved again for the stored scale."""
    LH = L @ Hs
    ll, lb = (LH * L).sum(1), (L * b).sum(1)
    if M is None:
        return old.factor.store_scale(_ratio(lb, ll, old.scale.float())), None
    MH = M @ Hs
    lm, mm, mb = (LH * M).sum(1), (MH * M).sum(1), (M * b).sum(1)
    determinant = ll * mm - lm * lm
    safe = determinant > 1e-7 * ll * mm  # else L and M are all but parallel in these rows
    scale = torch.where(safe, (lb * mm - mb * lm) / determinant, old.scale.float())
    scale = old.factor.store_scale(scale)
    assert old.minimum is not None
    return scale, old.factor.store_minimum(_ratio(mb - scale * lm, mm, old.minimum.float()))


def _ratio(a: Tensor, b: Tensor, otherwise: Tensor) -> Tensor:
    return torch.where(b > 0, a / b, otherwise)
