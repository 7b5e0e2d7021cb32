"""The knapsack against brute force, and an allocation end to end."""

import itertools
import random

import pytest

from compress.allocate import Choice, solve
from formats.errors import UsageError


def groups_at_random(seed: int, groups: int = 5, choices: int = 4) -> dict[str, list[Choice]]:
    r = random.Random(seed)
    return {
        f"g{g}": [Choice({}, str(c), r.randint(10, 500), r.random() * 10 ** r.randint(-3, 0)) for c in range(choices)]
        for g in range(groups)
    }


@pytest.mark.parametrize("seed", range(25))
def test_no_other_choice_is_better(seed: int) -> None:
    groups = groups_at_random(seed)
    smallest = sum(min(c.nbytes for c in choices) for choices in groups.values())
    budget = smallest + random.Random(seed).randint(0, 800)
    found = solve(groups, budget)
    assert sum(c.nbytes for c in found.values()) <= budget
    feasible = [p for p in itertools.product(*groups.values()) if sum(c.nbytes for c in p) <= budget]
    best = min(sum(c.cost for c in p) for p in feasible)
    assert sum(c.cost for c in found.values()) == pytest.approx(best, rel=1e-6)


def test_the_same_question_has_the_same_answer() -> None:
    groups = groups_at_random(3, groups=40)
    assert solve(groups, 12_000) == solve(groups, 12_000)


def test_a_target_that_cannot_be_met_is_refused() -> None:
    with pytest.raises(UsageError, match="smallest candidates need"):
        solve(groups_at_random(1), 3)
