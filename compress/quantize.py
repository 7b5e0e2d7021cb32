"""Choosing the codes: every tensor of a plan, block by block, with calibration where the recipe asks for it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from calib.stats import InputStats, diagonal_stats
from calib.walk import Block, Walk
from compress.algorithms import ALGORITHMS, PREPARATIONS, Outcome
from compress.plan import Plan
from compress.recipe import RtnStep
from compress.work import IMPORTANCE, Parts, Work
from formats.checkpoint import Checkpoint
from formats.containers.imatrix import Imatrix, read_imatrix
from formats.qtensor import Grid

OnLayer = Callable[[str, Grid, Outcome, float], None]  # name, grid, outcome, seconds
OUTSIDE = "outside"
_PLAIN = RtnStep(algorithm="rtn")


def too_few(tokens: int, width: int) -> bool:
    """Whether a linear of that many inputs saw too little of the text: a Hessian of such rank only misleads."""
    return tokens < width // 4


@dataclass
class Quantizer:
    """Runs the steps of a plan. Finished blocks go to `work`, so that a later call goes on where this one stopped.

    rows: int64 [samples, length], or None where no step looks at text.
    """

    plan: Plan
    checkpoint: Checkpoint
    work: Work
    on_layer: OnLayer
    rows: Tensor | None = None
    device: str = "cpu"
    spill_dir: Path | None = None

    def run(self) -> None:
        """Bring every part into `work`: each block's tensors, then those outside the blocks."""
        if self.rows is None:
            self._without_text()
            return
        walk = Walk(self.checkpoint, self.rows, device=self.device, spill_dir=self.spill_dir)
        for i in range(walk.n_blocks):
            part = f"block-{i:04d}"
            with walk.block(i) as block:
                if self.work.has(part):
                    block.restore(self.work.load(part))
                else:
                    self.work.save(part, self._block(block))
                block.propagate()
        if self._outside_names() and not self.work.has(OUTSIDE):
            self.work.save(OUTSIDE, self._outside(walk.head_stats()))

    def _block(self, block: Block) -> Parts:
        """All steps on one block."""
        steps = self.plan.recipe.steps
        grids = {name: self.plan.grids.get(f"{block.prefix}.{name}.weight") for stage in block.stages for name in stage}
        done: Parts = {}
        for step in steps:
            if step.algorithm in PREPARATIONS:
                done |= PREPARATIONS[step.algorithm](block, {n: g for n, g in grids.items() if g}, step)
        for stage in block.stages:
            wanted = [name for name in stage if grids[name]]
            if wanted:
                stats = block.collect(stage)
                for name in wanted:
                    grid = grids[name]
                    assert grid is not None
                    full = f"{block.prefix}.{name}.weight"
                    outcome = self._tensor(full, block.weight(name), stats[name], grid, steps[-1])
                    block.replace(name, outcome.tensor.dequantize())
                    done[full] = outcome.tensor
                    done[f"{full}{IMPORTANCE}"] = stats[name].importance.clone()
                    done[f"{full}|tokens"] = torch.tensor(stats[name].tokens)
            block.done(stage)
        return done

    def _tensor(self, name: str, weight: Tensor, stats: InputStats | None, grid: Grid, step: object) -> Outcome:
        start = time.perf_counter()
        if stats is None or too_few(stats.tokens, weight.shape[1]):
            stats, step = None, _PLAIN
        outcome: Outcome = ALGORITHMS[step.algorithm](weight, stats, grid, step)  # type: ignore[attr-defined]
        self.on_layer(name.removesuffix(".weight"), grid, outcome, time.perf_counter() - start)
        return outcome

    def _without_text(self) -> None:
        step = self.plan.recipe.steps[-1]
        known = Imatrix()
        if isinstance(step, RtnStep) and step.imatrix is not None:
            known = read_imatrix(Path(step.imatrix), self.checkpoint.arch)
        for name, grid in self.plan.grids.items():
            if self.work.has(name):
                continue
            stats = None
            if name in known.mean_squares:
                stats = diagonal_stats(known.mean_squares[name], known.tokens[name])
            outcome = self._tensor(name, self.checkpoint.read_linear(name), stats, grid, step)
            self.work.save(name, {name: outcome.tensor})

    def _outside_names(self) -> list[str]:
        arch = self.checkpoint.arch
        return [n for n in (f"{arch.embedding}.weight", f"{arch.head}.weight") if n in self.plan.grids]

    def _outside(self, stats: InputStats) -> Parts:
        """Embedding and head: rounded by importance where they act as the head, else plainly."""
        tied = f"{self.checkpoint.arch.head}.weight" not in self.checkpoint.names()
        done: Parts = {}
        for name in self._outside_names():
            is_head = tied or name == f"{self.checkpoint.arch.head}.weight"
            step = RtnStep(algorithm="rtn", importance=True)
            done[name] = self._tensor(
                name, self.checkpoint.read_linear(name), stats if is_head else None, self.plan.grids[name], step
            ).tensor
        return done
