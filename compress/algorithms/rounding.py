"""The column loops of GPTQ and of coordinate descent, compiled for the CPU.

Rows are independent, so a chunk of LANES rows is kept transposed, [in, LANES], and every step is one vector operation.
The torch versions in `compress/algorithms/gptq.py` say the same more plainly, and serve other devices.
"""

from typing import Any

import numba
import numpy as np
import torch

LANES = 16

_wanted = torch.get_num_threads()
numba.get_num_threads()  # starts numba's threads, which resets the OpenMP setting that torch reads
torch.set_num_threads(_wanted)

_jit: Any = numba.njit(cache=True, parallel=True, fastmath={"contract", "nsz", "arcp"}, error_model="numpy")


@numba.njit(cache=True, inline="always", error_model="numpy")
def _nearest(x, levels, middles, integer):  # type: ignore[no-untyped-def]
    """Index of the level nearest to x: arithmetic when levels are consecutive integers, else a scan of the middles."""
    if integer:
        c = np.rint(x - levels[0])
        return np.int32(min(max(c, np.float32(0.0)), np.float32(len(levels) - 1)))
    c = np.int32(0)
    for m in middles:
        c += np.int32(x > m)
    return c


@_jit
def round_forward(W, U, scale, shift, zero, levels, middles, integer, index, values):  # type: ignore[no-untyped-def]
    """GPTQ: W float32 [chunks, in, LANES] in processing order is consumed; index uint8 and values float32 are filled.

    U float32 [in, in] upper; scale, shift, zero as W: a weight may be `scale * (level - zero) - shift`.
    """
    chunks, n, lanes = W.shape
    for c in numba.prange(chunks):
        w, err = W[c], np.empty(lanes, np.float32)
        for j in range(n):
            d = np.float32(1.0) / U[j, j]
            for r in range(lanes):
                s = scale[c, j, r]
                x = (w[j, r] + shift[c, j, r]) / s + zero[c, j, r] if s != 0 else np.float32(0.0)
                k = _nearest(x, levels, middles, integer)
                index[c, j, r] = k
                v = s * (levels[k] - zero[c, j, r]) - shift[c, j, r]
                values[c, j, r] = v
                err[r] = (w[j, r] - v) * d
            for k in range(j + 1, n):
                u = U[j, k]
                for r in range(lanes):
                    w[k, r] -= u * err[r]


@_jit
def descend(G, H, scale, shift, zero, levels, middles, integer, index, values, sweeps):  # type: ignore[no-untyped-def]
    """Coordinate descent on the codes: each weight in turn moves to its best level while the others stay.

    G float32 [chunks, in, LANES] holds ((W - values) H)^T and is kept up to date; index, values are improved in place.
    """
    chunks, n, lanes = G.shape
    for c in numba.prange(chunks):
        g, step = G[c], np.empty(lanes, np.float32)
        for _ in range(sweeps):
            moved = 0
            for j in range(n):
                h = np.float32(1.0) / H[j, j]
                any_step = False
                for r in range(lanes):
                    s = scale[c, j, r]
                    v = values[c, j, r]
                    step[r] = np.float32(0.0)
                    if s != 0:
                        x = (v + g[j, r] * h + shift[c, j, r]) / s + zero[c, j, r]
                        k = _nearest(x, levels, middles, integer)
                        if k != index[c, j, r]:
                            new = s * (levels[k] - zero[c, j, r]) - shift[c, j, r]
                            step[r] = new - v
                            index[c, j, r] = k
                            values[c, j, r] = new
                            any_step = True
                if any_step:
                    moved += 1
                    for k in range(n):
                        u = H[j, k]
                        for r in range(lanes):
                            g[k, r] -= u * step[r]
            if moved == 0:
                break
