"""What each tensor's error costs at the logits, without running the model once per choice.

Replacing W by W + D moves the mean KL divergence per token by 1/2 D^T F D, F the Fisher information. With labels drawn
from the model's own predictions, the gradient g_t of log p(label) at a linear's output is a sample of what its output
error does to the logits. With M = sum_t g_t x_t^T over a row of text, E <D, M>^2 / 2T is that cost for any D. Rounding
errors of different output channels are all but independent, so the cross terms between channels only add noise, and
1/(2T) sum_j (D_j . M_j)^2 estimates the cost of every D from one backward pass. The head's cost is the divergence
itself. The model goes by block by block, forth and back; between them only the hidden states at block boundaries are
kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, linear, log_softmax

from calib.walk import Block, Walk
from formats.checkpoint import Checkpoint
from formats.qtensor import Grid

Costs = dict[str, dict[str, float]]  # tensor name -> grid name -> nats per token
_CHANNELS = 256  # output channels of a linear that stand for all of them
_LOGIT_TOKENS = 512  # tokens whose logits are in memory at a time


def measure(
    checkpoint: Checkpoint,
    rows: Tensor,
    candidates: Mapping[str, Sequence[Grid]],
    *,
    seed: int = 0,
    device: str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Costs:
    """Estimated KL divergence (nats per token) that each candidate grid alone would cost, per tensor name.

    rows int64 [samples, length]; candidates by tensor name (with ".weight"). Errors are those of rounding with fits
    weighed by the mean squared input.
    """
    walk = Walk(checkpoint, rows, device=device, exact=True)
    boundaries = [walk.hidden.clone()]
    for i in range(walk.n_blocks):
        with walk.block(i) as block:
            block.propagate()
        boundaries.append(walk.hidden.clone())
    costs: Costs = {}
    head = Head(walk)
    gradient, costs = head.measure(boundaries.pop(), candidates, seed)
    total = walk.n_blocks + 1
    progress(1, total)
    for i in reversed(range(walk.n_blocks)):
        with walk.block(i) as block:
            gradient = _backward(block, boundaries.pop(), gradient, candidates, costs)
        progress(total - i, total)
    embedding = f"{checkpoint.arch.embedding}.weight"
    if embedding in candidates:
        weight = checkpoint.read_dense(embedding)
        _lookup_costs(weight, rows, gradient * walk.embed_scale, candidates[embedding], costs, embedding)
    return costs


class Head:
    """Final norm and head of a walk's model."""

    def __init__(self, walk: Walk) -> None:
        arch, names = walk.arch, walk.checkpoint.names()
        self.norm, self.batches = walk.final_norm(), walk.batches
        untied = f"{arch.head}.weight"
        self.name = untied if untied in names else f"{arch.embedding}.weight"
        self.weight = walk.checkpoint.read_dense(self.name).to(walk.device)
        self.softcap = walk.checkpoint.config.get("final_logit_softcapping")

    def log_probabilities(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """x [tokens, hidden] after the final norm -> float32 [tokens, vocab]."""
        logits = linear(x, self.weight if weight is None else weight)
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return log_softmax(logits, -1)

    def measure(self, hidden: Tensor, candidates: Mapping[str, Sequence[Grid]], seed: int) -> tuple[Tensor, Costs]:
        """(gradient of sum log p(label) at `hidden`, the head's own costs)."""
        generator = torch.Generator().manual_seed(seed)
        grids = candidates.get(self.name, ())
        with torch.no_grad():
            seen = torch.cat([self.norm(h).flatten(0, 1) for h in hidden.split(1)])
            importance = seen.square().mean(0)
        replaced = {g.name: _rounded(g, self.weight, importance) for g in grids}
        costs = {self.name: dict.fromkeys(replaced, 0.0)} if grids else {}
        gradient = torch.empty_like(hidden)
        flat_in, flat_out, tokens = hidden.flatten(0, 1), gradient.view(-1, hidden.shape[-1]), hidden[..., 0].numel()
        for part in torch.arange(tokens).split(_LOGIT_TOKENS):
            h = flat_in[part].requires_grad_()
            x = self.norm(h)
            log_p = self.log_probabilities(x)
            p = log_p.detach().exp()
            label = torch.multinomial(p.cpu(), 1, generator=generator).to(p.device)
            (flat_out[part],) = torch.autograd.grad(log_p.gather(1, label).sum(), h)
            with torch.no_grad():
                for name, weight in replaced.items():
                    log_q = self.log_probabilities(x, weight)
                    costs[self.name][name] += float(kl_div(log_q, log_p, reduction="sum", log_target=True)) / tokens
        return gradient, costs


def _rounded(grid: Grid, weight: Tensor, importance: Tensor | None) -> Tensor:
    params = grid.fit(weight, importance)
    return grid.decode(grid.encode(weight, params), params)


@contextmanager
def _recorded(block: Block, names: Sequence[str]) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """While open, notes (input, gradient at the output) of the named linears for each backward pass."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}

    def forward(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            x = args[0].detach()
            output.register_hook(lambda g: seen[name].append((x, g.detach())))

        return hook

    handles = [block.linear(name).register_forward_hook(forward(name)) for name in names]
    yield seen
    for handle in handles:
        handle.remove()


def _backward(
    block: Block, hidden: Tensor, gradient: Tensor, candidates: Mapping[str, Sequence[Grid]], costs: Costs
) -> Tensor:
    """Add the costs of one block's linears; returns the gradient at the block's input."""
    walk = block.walk
    full = {name: f"{block.prefix}.{name}.weight" for stage in block.stages for name in stage}
    names = [name for name in full if full[name] in candidates]
    out = torch.empty_like(hidden)
    with _recorded(block, names) as seen:
        for at in walk.batches():
            h = hidden[at].to(walk.device).requires_grad_()
            y = walk.call(block.module, block.index, h)
            (out[at],) = torch.autograd.grad(y, h, gradient[at].to(walk.device))
    tokens = hidden[..., 0].numel()
    for name in names:
        costs[full[name]] = dict.fromkeys((g.name for g in candidates[full[name]]), 0.0)
        if not seen[name]:  # an expert without a token
            continue
        weight, width = block.weight(name), seen[name][0][0].shape[-1]
        some = slice(None, None, max(1, len(weight) // _CHANNELS))
        scale = len(weight) / len(weight[some]) / (2 * tokens)
        weight = weight[some]
        importance = torch.cat([x.reshape(-1, width) for x, _ in seen[name]]).square().mean(0)
        errors = {grid.name: _rounded(grid, weight, importance) - weight for grid in candidates[full[name]]}
        for x, g in seen[name]:
            rows = zip(x, g, strict=True) if x.ndim == 3 else [(x, g)]  # an expert's tokens have lost their rows
            for one_x, one_g in rows:
                M = one_g[:, some].T @ one_x
                for grid_name, error in errors.items():
                    costs[full[name]][grid_name] += scale * float((error * M).sum(1).square().sum())
    return out


def _lookup_costs(
    weight: Tensor, rows: Tensor, gradient: Tensor, grids: Sequence[Grid], costs: Costs, name: str
) -> None:
    """Add what an error in the embedding costs as a lookup (it may have cost something as a tied head already)."""
    M = torch.zeros_like(weight).index_add_(0, rows.flatten(), gradient.flatten(0, 1).to(weight.device))
    mine = costs.setdefault(name, {})
    for grid in grids:
        error = _rounded(grid, weight, None) - weight
        mine[grid.name] = mine.get(grid.name, 0.0) + float((error * M).sum(1).square().sum()) / (2 * rows.numel())


def end_to_end(checkpoint: Checkpoint, rows: Tensor, grids: Mapping[str, Grid], *, device: str = "cpu") -> float:
    """The mean KL divergence (nats per token) with all `grids` rounded at once: what `measure` predicts."""
    outputs = []
    for quantise in (False, True):
        walk = Walk(checkpoint, rows, device=device, exact=True)
        for i in range(walk.n_blocks):
            with walk.block(i) as block:
                for stage in block.stages if quantise else ():
                    stats = block.collect(stage)
                    for name in stage:
                        grid = grids.get(f"{block.prefix}.{name}.weight")
                        if grid is not None:
                            block.replace(name, _rounded(grid, block.weight(name), stats[name].importance))
                    block.done(stage)
                block.propagate()
        outputs.append((Head(walk), walk.hidden))
    (head, reference), (_, hidden) = outputs
    grid = grids.get(head.name)
    total = 0.0
    with torch.no_grad():
        importance = torch.cat([head.norm(h).flatten(0, 1) for h in reference.split(1)]).square().mean(0)
        weight = None if grid is None else _rounded(grid, head.weight, importance)
        parts = (h.flatten(0, 1).split(_LOGIT_TOKENS) for h in (reference, hidden))
        for a, b in zip(*parts, strict=True):
            log_p = head.log_probabilities(head.norm(a))
            log_q = head.log_probabilities(head.norm(b), weight)
            total += float(kl_div(log_q, log_p, reduction="sum", log_target=True))
    return total / rows.numel()
