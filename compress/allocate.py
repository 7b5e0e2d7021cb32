"""Mixed bitrates: the measured cost of each choice and a budget in, a grid per tensor out (exact, deterministic)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor

from compress.plan import Plan, make_plan
from compress.progress import Progress
from compress.recipe import AllocateSpec, Recipe
from compress.report import source_hashes
from formats.checkpoint import Checkpoint
from formats.errors import DataError, UsageError
from formats.grids import parse_grid
from formats.qtensor import Grid

FILE = "sensitivity.json"
ROWS = 8  # calibration rows that costs are measured on


@dataclass(frozen=True)
class Choice:
    """One grid for all tensors of a group: its size in bytes and its estimated cost in nats per token."""

    grids: Mapping[str, Grid]
    asked: str
    nbytes: int
    cost: float


def options_of(plan: Plan) -> dict[str, dict[str, dict[str, Grid]]]:
    """group -> candidate name -> tensor name -> the grid the container would use; each distinct outcome once."""
    assert plan.recipe.allocate is not None
    options: dict[str, dict[str, dict[str, Grid]]] = {}
    for group, names in plan.allocatable.items():
        seen: dict[str, dict[str, Grid]] = {}
        for candidate in plan.recipe.allocate.candidates:
            try:
                grids = {name: plan.substitute(name, parse_grid(candidate)) for name in names}
            except UsageError:
                continue
            if grids not in seen.values():
                seen[candidate] = grids
        if seen:
            options[group] = seen
    return options


def solve(groups: Mapping[str, list[Choice]], budget: int) -> dict[str, Choice]:
    """The choices of least total cost whose bytes sum to at most `budget`: a multiple-choice knapsack, solved exactly.

    Raises UsageError when even the smallest choices are too large.
    """
    flat = [(group, choice) for group, choices in groups.items() for choice in choices]
    smallest = sum(min(choice.nbytes for choice in choices) for choices in groups.values())
    if smallest > budget:
        raise UsageError(
            f"the smallest candidates need {smallest / 1e6:.1f} MB, {max(budget, 0) / 1e6:.1f} MB are left for them",
            where="allocate",
            how_to_fix="add a smaller candidate, or raise the target",
        )
    order = list(groups)
    one_each = np.zeros((len(groups), len(flat)))
    for column, (group, _) in enumerate(flat):
        one_each[order.index(group), column] = 1
    cost = np.array([choice.cost for _, choice in flat])
    sizes = np.array([[choice.nbytes for _, choice in flat]], float)
    found = milp(
        cost / max(cost.max(), 1e-30),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(sizes, 0, budget)],
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0},
    )
    assert found.x is not None, found.message
    return {group: choice for (group, choice), x in zip(flat, found.x, strict=True) if x > 0.5}


def measurement(
    plan: Plan, checkpoint: Checkpoint, tokens: Tensor, source: Mapping[str, Any], device: str, progress: Progress
) -> dict[str, Any]:
    """What `sensitivity.json` holds: the cost of every candidate for every tensor, and where it was measured.

    `check` compares the linear model with the truth: all tensors rounded at once to the grids the plan starts from.
    """
    from calib.sensitivity import end_to_end, measure

    wanted: dict[str, dict[str, Grid]] = {}
    for candidates in options_of(plan).values():
        for grids in candidates.values():
            for name, grid in grids.items():
                wanted.setdefault(name, {})[grid.name] = grid
    rows = tokens[:ROWS]
    progress.start("measure sensitivity", 1)
    costs = measure(
        checkpoint,
        rows,
        {name: list(grids.values()) for name, grids in wanted.items()},
        seed=plan.recipe.seed,
        device=device,
        progress=progress.update,
    )
    start = {name: grid for name, grid in plan.grids.items() if name in costs}
    check = {
        "predicted": sum(costs[name].get(grid.name, 0.0) for name, grid in start.items()),
        "measured": end_to_end(checkpoint, rows, start, device=device),
    }
    about = {"version": 1, "source": dict(source), "rows": list(rows.shape), "unit": "nats per token"}
    return {**about, "check": check, "costs": costs}


def load_measurement(path: Path, source: Mapping[str, Any]) -> dict[str, Any]:
    """A saved measurement, checked to be of this model."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        data["costs"], data["source"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"not a measurement: {error}", str(path), f"give the {FILE} of an earlier output") from error
    if data["source"] != dict(source):
        raise DataError("measured on another model", str(path), "leave allocate.measurement out to measure again")
    return dict(data)


def choices(plan: Plan, costs: Mapping[str, Mapping[str, float]]) -> dict[str, list[Choice]]:
    """Sizes and costs of all options. Raises DataError when a measurement lacks one of them."""
    groups: dict[str, list[Choice]] = {}
    for group, candidates in options_of(plan).items():
        for asked, grids in candidates.items():
            missing = [name for name, grid in grids.items() if grid.name not in costs.get(name, {})]
            if missing:
                raise DataError(
                    f"the measurement lacks {grids[missing[0]]} for {missing[0]}",
                    where="allocate",
                    how_to_fix="leave allocate.measurement out to measure again",
                )
            nbytes = sum(plan.nbytes_of(name, grid) for name, grid in grids.items())
            cost = sum(costs[name][grid.name] for name, grid in grids.items())
            groups.setdefault(group, []).append(Choice(grids, asked, nbytes, cost))
    return groups


def budget_of(plan: Plan, spec: AllocateSpec) -> int:
    """Bytes for all tensors of the file."""
    return spec.target_size if spec.target_size is not None else int((spec.target_bpw or 0) * plan.parameters / 8)


def allocated(plan: Plan, data: Mapping[str, Any]) -> tuple[Plan, list[tuple[int, float]]]:
    """(the plan with the best grids for its target, points (bytes of the file, cost) of the size/quality curve)."""
    assert plan.recipe.allocate is not None
    groups = choices(plan, data["costs"])
    chosen_names = {name for options in groups.values() for name in options[0].grids}
    fixed = sum(row.nbytes for row in plan.rows if row.name not in chosen_names)
    solution = solve(groups, budget_of(plan, plan.recipe.allocate) - fixed)
    low = sum(min(c.nbytes for c in options) for options in groups.values())
    high = sum(max(c.nbytes for c in options) for options in groups.values())
    curve = []
    for budget in np.linspace(low, high, 24).astype(int).tolist():
        best = solve(groups, budget).values()
        curve.append((fixed + sum(c.nbytes for c in best), sum(c.cost for c in best)))
    grids = {name: grid for choice in solution.values() for name, grid in choice.grids.items()}
    return plan.with_grids(grids), curve


def planned(recipe: Recipe, checkpoint: Checkpoint) -> Plan:
    """The plan as far as it is known before a run: allocated already where the recipe has a measurement."""
    plan = make_plan(recipe, checkpoint)
    if recipe.allocate is None or recipe.allocate.measurement is None:
        return plan
    return allocated(plan, load_measurement(Path(recipe.allocate.measurement), source_hashes(checkpoint)))[0]


def allocate(
    plan: Plan,
    checkpoint: Checkpoint,
    tokens: Tensor,
    source: Mapping[str, Any],
    folder: Path,
    *,
    device: str,
    progress: Progress,
) -> tuple[Plan, list[tuple[int, float]]]:
    """Measure, or take the recipe's measurement or that of the run being resumed; leave it in `folder`; choose."""
    assert plan.recipe.allocate is not None
    given, path = plan.recipe.allocate.measurement, folder / FILE
    if given is None and path.exists():
        data = load_measurement(path, source)
    else:
        if given is not None:
            data = load_measurement(Path(given), source)
        else:
            data = measurement(plan, checkpoint, tokens, source, device, progress)
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        aside.rename(path)
    return allocated(plan, data)
