"""The oracles in plain torch: dequantise and multiply, and attention over a contiguous cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from formats.qtensor import QTensor
from runtime.linear import Kernel


class ReferenceKernel(Kernel):
    """Dequantises on every call and multiplies in torch. Slow, and what the others are compared with."""

    def __init__(self, weight: "Tensor | QTensor", device: str, dtype: torch.dtype) -> None:
        self.dtype = dtype
        if isinstance(weight, QTensor):
            params = {name: value.to(device) for name, value in weight.params.items()}
            g_idx = None if weight.g_idx is None else weight.g_idx.to(device)
            self.weight: Tensor | QTensor = QTensor(weight.grid, weight.codes.to(device), params, g_idx)
        else:
            self.weight = weight.to(device, dtype)

    def dense(self) -> Tensor:
        """The weight as a dense [out, in]."""
        return self.weight.dequantize(self.dtype) if isinstance(self.weight, QTensor) else self.weight

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.dense().T

    def rows(self, ids: Tensor) -> Tensor:
        if not isinstance(self.weight, QTensor):
            return self.weight[ids]
        w = self.weight
        return QTensor(w.grid, w.codes[ids], {k: p[ids] for k, p in w.params.items()}, w.g_idx).dequantize(self.dtype)

    def nbytes(self) -> int:
        if isinstance(self.weight, Tensor):
            return self.weight.nbytes
        return self.weight.codes.nbytes + sum(p.nbytes for p in self.weight.params.values())

    def describe(self, m: int) -> str:
        return "reference: dequantise + matmul"


@dataclass
class ContiguousView:
    """The part of a ContiguousKV that one batch writes and reads."""

    cache: "ContiguousKV"
    positions: Tensor
    sequence: Tensor

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        keys, values = self.cache.k[layer], self.cache.v[layer]
        rows = self.sequence.long()
        keys[rows, self.positions], values[rows, self.positions] = k.to(keys.dtype), v.to(values.dtype)
        share = q.shape[1] // k.shape[1]
        out = torch.empty_like(q)
        for t in range(len(q)):
            last = int(self.positions[t]) + 1
            first = max(0, last - window) if window else 0
            kt, vt = keys[rows[t], first:last].to(q.dtype), values[rows[t], first:last].to(q.dtype)
            scores = torch.einsum("hd,lhd->hl", q[t], kt.repeat_interleave(share, dim=1)) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out[t] = torch.einsum("hl,lhd->hd", scores.float().softmax(-1).to(q.dtype), vt.repeat_interleave(share, 1))
        return out


class ContiguousKV:
    """A cache of fixed rectangles: k, v [layers, sequences, positions, kv_heads, head_dim]."""

    def __init__(
        self,
        layers: int,
        sequences: int,
        positions: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        shape = (layers, sequences, positions, kv_heads, head_dim)
        self.k = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.v = torch.full(shape, float("nan"), dtype=dtype, device=device)

    def view(self, positions: Tensor, sequence: Tensor) -> ContiguousView:
        """positions int64 [N], sequence int32 [N] of the tokens about to be run."""
        return ContiguousView(self, positions, sequence)
