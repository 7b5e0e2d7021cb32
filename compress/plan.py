"""What a recipe will do to a model, tensor by tensor, before anything is done."""

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from calib.precision import matmul_dtype
from compress.recipe import Recipe, with_bits
from formats.arch import Arch, is_transposed
from formats.checkpoint import Checkpoint, Container
from formats.containers import CONTAINERS
from formats.errors import UsageError
from formats.grids import parse_grid
from formats.qtensor import Grid
from formats.targets import problems

_FLOAT_BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}
_ACTIVATION_BUDGET = 2 << 30  # bytes of hidden states that calibration keeps in memory
_BASE_MEMORY = 500 << 20  # the interpreter and its libraries, bytes


@dataclass(frozen=True)
class Row:
    """One tensor. shape is Hugging Face's; linear is [out, in] (they differ for Conv1D).

    asked, grid  the grid the recipe asks for and the one the container will hold; None: stays float
    bits, nbytes stored bits per weight and bytes
    group        tensors with the same group must share a grid; None: not a quantisable tensor
    pinned       an override decided
    """

    name: str
    shape: tuple[int, ...]
    linear: tuple[int, ...]
    asked: Grid | None
    grid: Grid | None
    bits: float
    nbytes: int
    group: str | None
    pinned: bool = False
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """A checked recipe applied to a model. Grids are keyed by tensor name ("model.layers.0.mlp.up_proj.weight")."""

    recipe: Recipe
    arch: Arch
    config: Mapping[str, Any]
    container: Container
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    float_bits: Mapping[str, int] = field(default_factory=dict, repr=False)

    @cached_property
    def grids(self) -> dict[str, Grid]:
        """The grid of every tensor that will be quantised."""
        return {row.name: row.grid for row in self.rows if row.grid is not None}

    @property
    def options(self) -> dict[str, Any]:
        """What `Container.open_writer` takes besides the grids."""
        output = self.recipe.output
        return {"dtype": output.dtype, "shard_size": output.shard_size, "activations": output.activations}

    @property
    def parameters(self) -> int:
        return sum(prod(row.shape) for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(row.nbytes for row in self.rows)

    @property
    def bits_per_weight(self) -> float:
        """Over all tensors, embeddings included."""
        return 8 * self.nbytes / self.parameters

    @cached_property
    def allocatable(self) -> dict[str, list[str]]:
        """Groups of tensors whose grid may be chosen: group -> tensor names. Members must share a grid."""
        groups: dict[str, list[str]] = {}
        for row in self.rows:
            if row.group is not None and row.asked is not None and not row.pinned:
                groups.setdefault(row.group, []).append(row.name)
        return groups

    def substitute(self, name: str, grid: Grid) -> Grid:
        """The grid the container holds for a tensor when asked for `grid`; UsageError when it cannot."""
        return self.container.substitute(name, self._row[name].linear, grid)

    def nbytes_of(self, name: str, grid: Grid) -> int:
        """Bytes of a tensor stored on a grid."""
        linear = self._row[name].linear
        return round(grid.bits_per_weight(linear[1]) * prod(linear) / 8)

    def with_grids(self, grids: Mapping[str, Grid]) -> "Plan":
        """The plan with other grids asked for some tensors (after an allocation)."""
        rows = tuple(
            self._settled(replace(row, asked=grids[row.name])) if row.name in grids else row for row in self.rows
        )
        changed = replace(self, rows=rows)
        changed.check()
        return changed

    def check(self) -> None:
        """Raises UsageError where a grid cannot be stored at all, a group is torn, or the target engine objects."""
        _check_storable(self)
        _check_groups(self)
        target = self.recipe.output.target
        found = problems(target, self.container.name, self.grids, self.arch, self.config) if target else []
        if found:
            raise UsageError("\n".join(found), f"output.target {target}", "change the grids, or leave the target out")

    @cached_property
    def _row(self) -> dict[str, Row]:
        return {row.name: row for row in self.rows}

    def _settled(self, row: Row) -> Row:
        """The row with the container's answer to what is asked; a tensor that it cannot store stays float."""
        grid, note = row.asked, ""
        if row.asked is not None:
            try:
                grid = self.container.substitute(row.name, row.linear, row.asked)
                note = f"instead of {row.asked}" if grid != row.asked else ""
            except UsageError as error:
                grid, note = None, f"stays float: {error.what}"
        stored = grid if self.container.name != "safetensors" else None
        bits = stored.bits_per_weight(row.linear[1]) if stored else float(self.float_bits[row.name])
        return replace(row, grid=grid, bits=bits, nbytes=round(bits * prod(row.shape) / 8), note=note)

    def peak_memory(self) -> int:
        """Estimated peak resident bytes: calibration (one block, its statistics, the hidden states) or evaluation."""
        matrices = [row for row in self.rows if row.group is not None]
        embedding = max((prod(r.shape) for r in matrices if r.group in ("embedding", "head")), default=0)
        blocks = Counter[str]()
        for row in matrices:
            blocks[_block_of(row)] += prod(row.shape)
        block = max((n for key, n in blocks.items() if key), default=0)
        widest = max((max(r.linear) for r in matrices if _block_of(r)), default=0)
        peak = 4 * (embedding + 2 * block)
        if self.recipe.needs_text:
            spec, hidden = self.recipe.calibration, min((r.linear[1] for r in matrices), default=0)
            states = min(4 * spec.samples * spec.length * hidden, _ACTIVATION_BUDGET)
            peak += states + 4 * 4 * widest**2 + 4 * 4 * 8192 * widest
        if self.recipe.evaluate:
            peak = max(peak, 4 * self.parameters + 3 * 4 * 512 * max((r.linear[0] for r in matrices), default=0))
        return _BASE_MEMORY + peak

    def seconds(self) -> float:
        """A rough estimate of the run's duration on this machine's CPU, from the speed of two small matrix products."""
        tokens = self.recipe.calibration.samples * self.recipe.calibration.length if self.recipe.needs_text else 0
        linears = [row for row in self.rows if row.grid is not None]
        inputs = {row.group: row.linear[1] for row in linears}
        forwards = 2 * 2 * tokens * sum(prod(row.shape) for row in linears)
        work = tokens * sum(n**2 for n in inputs.values())  # Hessians
        work += sum(4 * (r.linear[0] * r.linear[1] ** 2 + r.linear[1] ** 3) for r in linears) if tokens else 0
        if self.recipe.evaluate:
            spec = self.recipe.evaluate.perplexity
            work += 2 * 2 * spec.length * spec.chunks * self.parameters
        dtype = matmul_dtype(torch.device("cpu"))
        return 10 + forwards / _flops_per_second(dtype) + work / _flops_per_second(torch.float32)

    def summary(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {
            "container": self.container.name,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "peak_memory_bytes": self.peak_memory(),
            "estimated_seconds": round(self.seconds()),
            "notes": list(self.notes),
            "tensors": [
                {
                    "name": row.name,
                    "shape": list(row.shape),
                    "asked": row.asked and row.asked.name,
                    "grid": row.grid and row.grid.name,
                    "bits": round(row.bits, 4),
                    "bytes": row.nbytes,
                    "note": row.note,
                }
                for row in self.rows
            ],
        }

    def condensed(self) -> list[tuple[str, int, str, float, int, str]]:
        """Rows that differ only in their indices, together: (pattern, tensors, grid, bits, bytes, note)."""
        groups: dict[tuple[str, str, float, str], tuple[int, int]] = {}
        for row in self.rows:
            key = (re.sub(r"\.\d+\.", ".*.", row.name), row.grid.name if row.grid else "float", row.bits, row.note)
            count, nbytes = groups.get(key, (0, 0))
            groups[key] = (count + 1, nbytes + row.nbytes)
        return [(name, n, grid, bits, size, note) for (name, grid, bits, note), (n, size) in groups.items()]


def make_plan(recipe: Recipe, checkpoint: Checkpoint) -> Plan:
    """Apply a recipe to an open model. Reads shapes only.

    Embedding and head stay float in Hugging Face layouts and become q8_0 in GGUF, unless an override says otherwise;
    with `allocate`, every tensor starts from one candidate and embedding and head take part where the container can
    store them. Raises UsageError where nothing is left to quantise, and as `Plan.check` does.
    """
    container: Container = CONTAINERS[recipe.output.format]()
    arch = checkpoint.arch
    roles = _Roles(arch, container.name)
    float_bits = {name: _float_bits(recipe, container.name, checkpoint, name) for name in checkpoint.names()}
    empty = Plan(recipe, arch, checkpoint.config, container, (), float_bits=float_bits)
    rows, used = [], set()
    for name in checkpoint.names():
        shape = checkpoint.shape(name)
        module = name.removesuffix(".weight")
        group = roles.group(module) if name.endswith(".weight") and len(shape) == 2 else None
        linear = shape[::-1] if is_transposed(arch, module) else shape
        asked, pinned = (None, False) if group is None else _asked(recipe, container.name, module, group)
        override = recipe.override(module)
        if group is not None and override is not None:
            used.add(override.match)
        rows.append(empty._settled(Row(name, shape, linear, asked, None, 0.0, 0, group, pinned)))
    plan = replace(empty, rows=tuple(rows), notes=_unused_overrides(recipe, used, arch, checkpoint.names()))
    if not any(row.asked for row in rows):
        raise UsageError("nothing to quantise: every tensor is skipped", "overrides", "let some linears keep a grid")
    plan = _one_grid(plan) if container.name == "awq" else plan
    plan.check()
    return plan


def _one_grid(plan: Plan) -> Plan:
    """AWQ stores one grid per model: the finest that any tensor needs, for all. Different wishes cannot be met."""
    if len(wishes := {row.asked.name for row in plan.rows if row.asked}) > 1:
        raise UsageError(f"AWQ stores one grid per model, not {', '.join(sorted(wishes))}", "output.format awq")
    if not plan.grids:
        return plan
    finest = min(plan.grids.values(), key=lambda grid: grid.block or 1 << 30)
    rows = (
        replace(plan._settled(replace(row, asked=finest)), asked=row.asked, note=f"instead of {row.asked}")
        if row.grid not in (None, finest)
        else row
        for row in plan.rows
    )
    return replace(plan, rows=tuple(rows))


def _asked(recipe: Recipe, container: str, module: str, group: str) -> tuple[Grid | None, bool]:
    """(grid asked for a quantisable module, did an override decide)."""
    base = recipe.grid or _middle(recipe)
    override = recipe.override(module)
    if override is not None:
        name = None if override.skip else override.grid or with_bits(base, override.bits or 0)
        return (None if name is None else parse_grid(name)), True
    if group not in ("embedding", "head"):
        return parse_grid(base), False
    if container != "gguf":
        return None, False
    return parse_grid("q8_0" if recipe.allocate is None else base), False


def _middle(recipe: Recipe) -> str:
    """The candidate that an allocation starts from: the largest within target_bpw, or the middle one."""
    assert recipe.allocate is not None, "checked by the recipe"
    candidates = sorted(recipe.allocate.candidates, key=lambda g: parse_grid(g).bits_per_weight(4096))
    target = recipe.allocate.target_bpw
    if target is None:
        return candidates[len(candidates) // 2]
    within = [g for g in candidates if parse_grid(g).bits_per_weight(4096) <= target]
    return within[-1] if within else candidates[0]


class _Roles:
    """Which tensors can be quantised, and which of them must share a grid."""

    def __init__(self, arch: Arch, container: str) -> None:
        self.arch = arch
        self.patterns: list[tuple[re.Pattern[str], str]] = []
        fused = {name: "+".join(names) for names in arch.fused for name in names} if container != "gguf" else {}
        for linear in (name for stage in arch.stages for name in stage):
            path = re.escape(f"{arch.block}.{linear}").replace(r"\{i\}", r"(\d+)").replace(r"\{e\}", r"\d+")
            self.patterns.append((re.compile(path), fused.get(linear, linear)))

    def group(self, module: str) -> str | None:
        """The group of a quantisable module, else None: "embedding", "head", or "{block}:{linears}".

        Engines fuse q/k/v and gate/up; GGUF stores the experts of a block in one tensor.
        """
        if module in (self.arch.embedding, self.arch.head):
            return "embedding" if module == self.arch.embedding else "head"
        for pattern, members in self.patterns:
            if match := pattern.fullmatch(module):
                return f"{match[1]}:{members}"
        return None


def _block_of(row: Row) -> str:
    """The block's index, or "" outside the blocks."""
    return row.group.partition(":")[0] if row.group and ":" in row.group else ""


def _float_bits(recipe: Recipe, container: str, checkpoint: Checkpoint, name: str) -> int:
    """Stored bits of a tensor that stays float."""
    if container == "gguf" and len(checkpoint.shape(name)) == 1:
        return 32
    if recipe.output.dtype:
        return _FLOAT_BITS[recipe.output.dtype]
    stored = checkpoint.stored_as(name)
    return _FLOAT_BITS.get(stored, 16) if isinstance(stored, str) and container in ("gguf", "safetensors") else 16


def _unused_overrides(recipe: Recipe, used: set[str], arch: Arch, names: Sequence[str]) -> tuple[str, ...]:
    notes = []
    for override in recipe.overrides:
        if override.match in used:
            continue
        tied = override.match == arch.head and f"{arch.head}.weight" not in names
        reason = "the head is tied to the embedding" if tied else "no quantisable module is left for it"
        notes.append(f'override "{override.match}" changes nothing: {reason}')
    return tuple(notes)


def _check_storable(plan: Plan) -> None:
    """Each grid asked for can be stored for at least one of the tensors it is asked for."""
    stored = {row.asked for row in plan.rows if row.grid is not None}
    for row in plan.rows:
        if row.asked is not None and row.asked not in stored:
            plan.substitute(row.name, row.asked)  # raises the container's own words


def _check_groups(plan: Plan) -> None:
    """Members of a group share a grid, or the file cannot be stored (GGUF's experts) or served (fused matrices)."""
    if plan.container.name == "safetensors":
        return
    groups: dict[str, dict[str, str]] = {}
    for row in plan.rows:
        if row.group is not None:
            groups.setdefault(row.group, {})[row.name] = row.grid.name if row.grid else "float"
    for members in groups.values():
        if len(set(members.values())) > 1:
            listed = ", ".join(f"{name.removesuffix('.weight')}: {grid}" for name, grid in list(members.items())[:6])
            raise UsageError(
                f"engines fuse these matrices, so they must share a grid ({listed})",
                where=f"output.format {plan.container.name}",
                how_to_fix="let one override match all of them",
            )


def _flops_per_second(dtype: torch.dtype) -> float:
    """This machine's speed at a matrix product, measured for some milliseconds."""
    x, w = torch.rand(2048, 768, dtype=dtype), torch.rand(768, 768, dtype=dtype)
    best = float("inf")
    for _ in range(4):  # the first one also starts the threads
        start = time.perf_counter()
        x @ w.T
        best = min(best, time.perf_counter() - start)
    return 2 * x.numel() * len(w) / best
