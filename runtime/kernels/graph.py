"""All decoder blocks of a step in one compiled call: what a model costs on a CPU is memory traffic, not dispatch.

Every operation works row by row in a fixed order (reductions in 16 lanes), so a token's hidden state has the same bits
alone, in any batch and however its prompt was cut, in float32 and with int8 activations alike.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from runtime.kernels.attention_cpu import BFLOAT, HALF, INT8, KINDS, _attend, _attend_threaded, _exp, _store_int8
from runtime.kernels.compiled import compiled
from runtime.kernels.cpu import Activations, Stage, activations, multiply, quantise_row, threads

if TYPE_CHECKING:
    from runtime.blocks import KVBatch
    from runtime.model import Model

Array = Any  # numpy arrays and scalars inside compiled functions
SILU, GELU, GELU_TANH = range(3)
ACTIVATION_CODES = {"silu": SILU, "gelu": GELU, "gelu_new": GELU_TANH, "gelu_pytorch_tanh": GELU_TANH}
WORTH_THREADS = 8  # rows from which a parallel region saves more than it costs
WORTH_TILES = 256  # the same for tiles of keys, over all heads
LANES = 16
ATTENTION, MLP, POST_ATTENTION, POST_MLP = range(4)  # places of norms
ENTER, ROTATE, ATTENDED, MIDDLE, INSIDE = range(5)  # what happens to rows between products
PHASES = np.arange(5)  # passed by value from here: numba compiles again for every literal argument


class Weights(NamedTuple):
    """What is constant: per layer, stage descriptors [layers, linears, fields], thread bounds [layers, 4, threads + 1],
    biases [layers, columns] ([layers, 0] without), norms [layers, 4, 2, hidden] and qk_norms [layers, 2, head_dim]."""

    qkv: Array
    o: Array
    up: Array
    down: Array
    bounds: Array
    qkv_bias: Array
    o_bias: Array
    up_bias: Array
    down_bias: Array
    norms: Array
    qk_norms: Array
    final: Array
    windows: Array
    rotary: Array


class State(NamedTuple):
    """Room for the activations of a step: h [rows, hidden]; products qkv, y, u; q, k, v, attended [rows, heads, d].

    The inputs of the products travel beside it (compiled parallel loops accept no nested tuples): a (normed hidden
    states), b (attention output), d (inner activations).
    """

    h: Array
    qkv: Array
    q: Array
    k: Array
    v: Array
    attended: Array
    y: Array
    u: Array


class Paged(NamedTuple):
    """The cache and what `KVBatch` says of this step; cos, sin: float32 [tables, positions, d/2]."""

    k: Array
    v: Array
    k_scale: Array
    v_scale: Array
    tables: Array
    tiles: Array
    slots: Array
    positions: Array
    cos: Array
    sin: Array
    kind: int
    threaded: bool


class Constants(NamedTuple):
    """Numbers of the family. *_at: first column of k, v in the qkv output and of `up` in the gate/up output.

    integer: does any product need its inputs as int8? whole: with one scale per token?
    """

    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    k_at: int
    v_at: int
    up_at: int
    activation: int
    gated: bool
    layer_norm: bool
    sandwich: bool
    integer: bool
    whole: bool
    eps: Array
    scale: Array
    softcap: Array


def _emit_half(typingctx: Any, value: Any) -> Any:
    """The float16 nearest to a float32, as uint16 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


_to_half: Any = intrinsic(_emit_half)


def _emit_bits(typingctx: Any, value: Any) -> Any:
    """The bits of a float32, uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


_bits: Any = intrinsic(_emit_bits)


@compiled
def _norm(x: Array, weight: Array, bias: Array, layer_norm: bool, eps: Array, out: Array) -> None:
    """RMS or layer norm of one row, into out."""
    n = len(x)
    whole = n // LANES * LANES
    lanes = np.zeros(LANES, np.float32)
    mean = np.float32(0)
    if layer_norm:
        for k in range(0, whole, LANES):
            for i in range(LANES):
                lanes[i] += x[k + i]
        for k in range(whole, n):
            lanes[0] += x[k]
        for i in range(LANES):
            mean += lanes[i]
        mean = np.float32(mean / np.float32(n))
        lanes[:] = 0
    for k in range(0, whole, LANES):
        for i in range(LANES):
            lanes[i] += (x[k + i] - mean) * (x[k + i] - mean)
    for k in range(whole, n):
        lanes[0] += (x[k] - mean) * (x[k] - mean)
    total = np.float32(0)
    for i in range(LANES):
        total += lanes[i]
    factor = np.float32(1) / np.sqrt(total / np.float32(n) + eps)
    if layer_norm:
        for k in range(n):
            out[k] = (x[k] - mean) * factor * weight[k] + bias[k]
    else:
        for k in range(n):
            out[k] = x[k] * factor * weight[k]


@compiled(inline="always")
def _tanh(x: Array) -> Array:
    e = _exp(np.float32(-2) * abs(x))
    t = (np.float32(1) - e) / (np.float32(1) + e)
    return t if x >= 0 else -t


@compiled
def _activate(gate: Array, up: Array, kind: int, gated: bool, out: Array) -> None:
    """activation(gate) * up for one row."""
    one = np.float32(1)
    if kind == SILU:
        for k in range(len(gate)):
            x = gate[k]
            e = _exp(-abs(x))
            out[k] = x * (one if x >= 0 else e) / (one + e)
    elif kind == GELU_TANH:
        for k in range(len(gate)):
            x = gate[k]
            inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
            out[k] = np.float32(0.5) * x * (one + _tanh(inner))
    else:
        for k in range(len(gate)):
            x = gate[k]
            out[k] = np.float32(0.5) * x * (one + np.float32(math.erf(x * np.float32(math.sqrt(0.5)))))
    if gated:
        for k in range(len(gate)):
            out[k] = out[k] * up[k]


@compiled
def _store(new: Array, cache: Array, slot: int, kind: int) -> None:
    """One token's keys or values [kv_heads, d] into the cache [blocks, block_size, kv_heads, d] of floats."""
    block, offset = slot // cache.shape[1], slot % cache.shape[1]
    for h in range(new.shape[0]):
        for j in range(new.shape[1]):
            if kind == HALF:
                cache[block, offset, h, j] = _to_half(new[h, j])
            elif kind == BFLOAT:
                bits = _bits(new[h, j])
                rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
                cache[block, offset, h, j] = np.uint16(rounded >> np.uint32(16))
            else:
                cache[block, offset, h, j] = new[h, j]


@compiled
def _residual(m: int, layer: int, bias: Array, post: int, w: Array, c: Array, s: Array) -> None:
    """h += post-norm(y + bias) for token m, where the family has them."""
    h, y = s.h[m], s.y[m, : s.h.shape[1]]
    if bias.shape[1]:
        for j in range(len(h)):
            y[j] += bias[layer, j]
    if c.sandwich:
        _norm(y, w.norms[layer, post, 0], w.norms[layer, post, 1], c.layer_norm, c.eps, y)
    for j in range(len(h)):
        h[j] += y[j]


@compiled
def _normed(m: int, layer: int, which: int, w: Array, c: Array, s: Array, a: Array) -> None:
    """The normed hidden state of token m becomes the input of a stage."""
    norm = w.norms[layer, which]
    _norm(s.h[m], norm[0], norm[1], c.layer_norm, c.eps, a.x[m, : s.h.shape[1]])
    if c.integer:
        quantise_row(a.x[m], a.codes[m], a.scales[m], a.sums[m], c.whole)


@compiled
def _rotate(m: int, layer: int, w: Array, c: Array, s: Array, kv: Array) -> None:
    """From token m's row of the qkv product, by bias, norms and rotation, to q and the cache."""
    d, half, qkv = c.head_dim, c.head_dim // 2, s.qkv[m]
    if w.qkv_bias.shape[1]:
        for j in range(w.qkv_bias.shape[1]):
            qkv[j] += w.qkv_bias[layer, j]
    table = w.rotary[layer]
    for h in range(c.heads + c.kv_heads):
        is_q = h < c.heads
        at = h * d if is_q else c.k_at + (h - c.heads) * d
        row, into = qkv[at : at + d], s.q[m, h] if is_q else s.k[m, h - c.heads]
        if w.qk_norms.shape[0]:
            _norm(row, w.qk_norms[layer, 0 if is_q else 1], row, False, c.eps, row)
        if table < 0:
            for j in range(d):
                into[j] = row[j]
            continue
        cos, sin = kv.cos[table, kv.positions[m]], kv.sin[table, kv.positions[m]]
        for j in range(half):
            a, b = row[j], row[half + j]
            into[j] = a * cos[j] - b * sin[j]
            into[half + j] = b * cos[j] + a * sin[j]
    for h in range(c.kv_heads):
        for j in range(d):
            s.v[m, h, j] = qkv[c.v_at + h * d + j]
    if kv.kind != INT8:
        _store(s.k[m], kv.k[layer], kv.slots[m], kv.kind)
        _store(s.v[m], kv.v[layer], kv.slots[m], kv.kind)


@compiled
def _row(phase: int, m: int, layer: int, w: Array, c: Array, s: Array, a: Array, b: Array, d: Array, kv: Array) -> None:
    """What happens to one token between the products of a block."""
    if phase == ENTER:
        if layer:
            _residual(m, layer - 1, w.down_bias, POST_MLP, w, c, s)
        if layer < len(w.windows):
            _normed(m, layer, ATTENTION, w, c, s, a)
    elif phase == ROTATE:
        _rotate(m, layer, w, c, s, kv)
    elif phase == ATTENDED:
        for h in range(c.heads):
            for j in range(c.head_dim):
                b.x[m, h * c.head_dim + j] = s.attended[m, h, j]
        if c.integer:
            quantise_row(b.x[m], b.codes[m], b.scales[m], b.sums[m], c.whole)
    elif phase == MIDDLE:
        _residual(m, layer, w.o_bias, POST_ATTENTION, w, c, s)
        _normed(m, layer, MLP, w, c, s, a)
    else:
        u = s.u[m]
        if w.up_bias.shape[1]:
            for j in range(w.up_bias.shape[1]):
                u[j] += w.up_bias[layer, j]
        _activate(u[: c.inner], u[c.up_at : c.up_at + c.inner], c.activation, c.gated, d.x[m, : c.inner])
        if c.integer:
            quantise_row(d.x[m], d.codes[m], d.scales[m], d.sums[m], c.whole)


@compiled(parallel=True)
def _rows_threaded(
    phase: int, layer: int, rows: int, w: Array, c: Array, s: Array, a: Array, b: Array, d: Array, kv: Array
) -> None:
    for m in numba.prange(rows):
        _row(phase, int(m), layer, w, c, s, a, b, d, kv)  # m is unsigned here


@compiled
def _rows(
    phase: int, layer: int, rows: int, w: Array, c: Array, s: Array, a: Array, b: Array, d: Array, kv: Array
) -> None:
    if rows >= WORTH_THREADS and w.bounds.shape[2] > 2:
        _rows_threaded(phase, layer, rows, w, c, s, a, b, d, kv)
    else:
        for m in range(rows):
            _row(phase, m, layer, w, c, s, a, b, d, kv)


@compiled
def _run(rows: int, w: Array, c: Array, s: Array, a: Array, b: Array, d: Array, kv: Array) -> None:
    """All blocks: s.h [rows, hidden] goes in as embeddings and comes out before the final norm."""
    layers = len(w.windows)
    for layer in range(layers):
        _rows(PHASES[ENTER], layer, rows, w, c, s, a, b, d, kv)
        multiply(w.qkv[layer], w.bounds[layer, 0], a, s.qkv, rows)
        _rows(PHASES[ROTATE], layer, rows, w, c, s, a, b, d, kv)
        if kv.kind == INT8:
            _store_int8(s.k[:rows], kv.k[layer], kv.k_scale[layer], kv.slots)
            _store_int8(s.v[:rows], kv.v[layer], kv.v_scale[layer], kv.slots)
        attend = (
            kv.tiles, s.q, kv.k[layer], kv.v[layer], kv.k_scale[layer], kv.v_scale[layer], kv.tables, s.attended,
            c.scale, w.windows[layer], c.softcap, kv.kind,
        )  # fmt: skip
        if kv.threaded:
            _attend_threaded(*attend)
        else:
            _attend(*attend)
        _rows(PHASES[ATTENDED], layer, rows, w, c, s, a, b, d, kv)
        multiply(w.o[layer], w.bounds[layer, 1], b, s.y, rows)
        _rows(PHASES[MIDDLE], layer, rows, w, c, s, a, b, d, kv)
        multiply(w.up[layer], w.bounds[layer, 2], a, s.u, rows)
        _rows(PHASES[INSIDE], layer, rows, w, c, s, a, b, d, kv)
        multiply(w.down[layer], w.bounds[layer, 3], d, s.y, rows)
    _rows(PHASES[ENTER], layers, rows, w, c, s, a, b, d, kv)
    for m in range(rows):
        _norm(s.h[m], w.final[0], w.final[1], c.layer_norm, c.eps, s.h[m])


class Graph:
    """The compiled form of a model whose linears all run on `cpu` kernels."""

    def __init__(self, model: "Model") -> None:
        config, blocks = model.config, model.blocks
        stages = [[Stage.of(stage) for stage in block.stages()] for block in blocks]
        self.stages, self.config, self.rotary = stages, config, model.rotary
        first = stages[0]
        kernels = [kernel for layer in stages for stage in layer for kernel in stage.kernels]
        integer = [kernel.integer for kernel in kernels]
        qkv, up = first[0].starts, first[2].starts
        whole = len(qkv) == 2  # one fused linear
        inner = blocks[0].down.in_features
        heads, kv_heads, d = config.n_heads, config.n_kv_heads, config.head_dim
        self.constants = Constants(
            heads, kv_heads, d, inner,
            heads * d if whole else int(qkv[1]),
            (heads + kv_heads) * d if whole else int(qkv[2]),
            int(up[1]) if len(up) == 3 else 0,
            ACTIVATION_CODES[config.activation],
            len(up) == 3,
            model.norm.bias is not None,
            blocks[0].mlp_post is not None,
            any(integer),
            all(kernel.whole for kernel in kernels if kernel.integer) and any(integer),
            np.float32(config.eps), np.float32(config.attention_scale), np.float32(config.attention_softcap or 0),
        )  # fmt: skip

        def descriptors(i: int) -> np.ndarray:
            return np.stack([layer[i].descriptors for layer in stages])

        def biases(i: int) -> np.ndarray:
            linears = [block.stages()[i] for block in blocks]
            if linears[0][0].bias is None:
                return np.zeros((len(blocks), 0), np.float32)
            out = np.zeros((len(blocks), first[i].columns), np.float32)
            for layer, stage in enumerate(linears):
                for linear, start in zip(stage, first[i].starts, strict=False):
                    if linear.bias is not None:
                        out[layer, start : start + linear.out_features] = linear.bias.numpy()
            return out

        norms = np.zeros((len(blocks), 4, 2, config.hidden), np.float32)
        for layer, block in enumerate(blocks):
            for i, norm in enumerate((block.attention_norm, block.mlp_norm, block.attention_post, block.mlp_post)):
                if norm is not None:
                    norms[layer, i, 0] = norm.weight.numpy()
                    norms[layer, i, 1] = 0 if norm.bias is None else norm.bias.numpy()
        qk = [[n.weight.numpy() for n in (b.q_norm, b.k_norm) if n is not None] for b in blocks]
        final = np.stack(
            [model.norm.weight.numpy(), (model.norm.weight * 0 if model.norm.bias is None else model.norm.bias).numpy()]
        )
        d0, d1, d2, d3 = (descriptors(i) for i in range(4))
        b0, b1, b2, b3 = (biases(i) for i in range(4))
        self.weights = Weights(
            d0,
            d1,
            d2,
            d3,
            self._bounds(threads()),
            b0,
            b1,
            b2,
            b3,
            norms,
            np.array(qk, np.float32) if qk[0] else np.zeros((0, 2, d), np.float32),
            final,
            np.array([w or 0 for w in config.windows], np.int64),
            np.array([-1 if r is None else r for r in config.rotary], np.int64),
        )
        self.state, self.inputs = self._state(1)
        self.cos = self.sin = np.zeros((1, 1, 1), np.float32)

    def _bounds(self, count: int) -> np.ndarray:
        return np.stack([[stage.bounds(count) for stage in layer] for layer in self.stages])

    def _state(self, rows: int) -> tuple[State, list[Activations]]:
        c, first = self.constants, self.stages[0]

        def room(*shape: int) -> np.ndarray:
            return np.zeros((rows, *shape), np.float32)

        state = State(
            room(self.config.hidden), room(first[0].columns), room(c.heads, c.head_dim), room(c.kv_heads, c.head_dim),
            room(c.kv_heads, c.head_dim), room(c.heads, c.head_dim),
            room(max(first[1].columns, first[3].columns)), room(first[2].columns),
        )  # fmt: skip
        widths = (self.config.hidden, c.heads * c.head_dim, c.inner)
        return state, [activations(rows, width) for width in widths]

    def __call__(self, embedded: Tensor, batch: "KVBatch") -> Tensor:
        """embedded: float32 [N, hidden]. Returns hidden states after the final norm, float32 [N, hidden]."""
        rows, cache = len(embedded), batch.cache
        if rows > len(self.state.h):
            self.state, self.inputs = self._state(1 << (rows - 1).bit_length())
        self.state.h[:rows] = embedded.numpy()
        kind = KINDS[cache.dtype]
        k, v = (t.view(torch.uint16) if kind in (HALF, BFLOAT) else t for t in (cache.k, cache.v))
        if threads() != self.weights.bounds.shape[2] - 1:
            self.weights = self.weights._replace(bounds=self._bounds(threads()))
        if self.rotary and len(self.rotary[0].cos) != self.cos.shape[1]:
            self.cos = np.stack([r.cos.numpy() for r in self.rotary])
            self.sin = np.stack([r.sin.numpy() for r in self.rotary])
        paged = Paged(
            k.numpy(), v.numpy(), cache.k_scale.numpy(), cache.v_scale.numpy(), batch.block_tables.numpy(),
            batch.tiles.numpy(), batch.slots.numpy(), batch.positions.numpy(), self.cos, self.sin, kind,
            threads() > 1 and batch.work * cache.k.shape[3] >= WORTH_TILES,
        )  # fmt: skip
        a, b, d = self.inputs
        _run(rows, self.weights, self.constants, self.state, a, b, d, paged)
        return torch.from_numpy(self.state.h[:rows].copy())
