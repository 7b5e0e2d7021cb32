"""The scheduler as a state machine without a model: progress, fairness, budgets, and no token lost."""

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from formats.errors import ResourceError, UsageError
from runtime.blocks import BlockManager
from runtime.sampling import Filter, KeyedChance, SamplingParams
from runtime.scheduler import Scheduler, Sequence


def sequence(number: int, prompt: list[int], child: int = 0) -> Sequence:
    params = SamplingParams()
    request: Any = SimpleNamespace(id=number)
    return Sequence(request, child, prompt, params, Filter(params, (), ()), KeyedChance(0, 0))


class Machine(RuleBasedStateMachine):
    """Sequences of random lengths come, run, are forked and leave under a pool of 10 blocks of 4."""

    @initialize(running=st.integers(1, 6), budget=st.integers(1, 12), mode=st.sampled_from(["continuous", "static"]))
    def begin(self, running: int, budget: int, mode: Any) -> None:
        self.scheduler = Scheduler(BlockManager(10, 4), running, budget, mode)
        self.ends: dict[Sequence, int] = {}
        self.next = 0
        self.mode = mode

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20), more=st.integers(1, 18))
    def arrive(self, prompt: list[int], more: int) -> None:
        s = sequence(self.next, list(prompt))
        self.next += 1
        self.ends[s] = len(prompt) + more
        self.scheduler.check(self.ends[s])
        self.scheduler.add(s)

    @rule(pick=st.integers(0, 5), child=st.integers(1, 99))
    def fork(self, pick: int, child: int) -> None:
        running = [s for s in self.scheduler.running if s.table.length]
        if running:
            parent = running[pick % len(running)]
            twin = sequence(parent.request.id, list(parent.tokens), child)
            if all(s.age != twin.age for s in self.ends):
                twin.table = self.scheduler.blocks.fork(parent.table)
                self.ends[twin] = self.ends[parent]
                self.scheduler.add(twin)

    @rule(pick=st.integers(0, 5))
    def cancel(self, pick: int) -> None:
        if self.ends:
            s = list(self.ends)[pick % len(self.ends)]
            del self.ends[s]
            self.scheduler.remove(s)

    def run_plan(self, guesses: int) -> None:
        """What the engine does with a plan: store tokens, keep at most half of the guesses, end what is complete."""
        blocks, running = self.scheduler.blocks, list(self.scheduler.running)
        oldest = min(self.ends, key=lambda s: s.age, default=None)
        plan = self.scheduler.plan(lambda ready: [guesses] * len(ready))
        assert sum(c.count + c.guesses for c in plan.chunks) <= self.scheduler.max_batch_tokens
        if self.mode == "static" and running:
            assert set(self.scheduler.running) <= set(running)
        assert len(self.scheduler.running) <= max(self.scheduler.max_running, len(running))
        assert len({c.sequence for c in plan.chunks}) == len(plan.chunks)
        if oldest and self.mode == "continuous":
            assert plan.chunks, "work waits, and nothing runs"
        for chunk in plan.chunks:
            s = chunk.sequence
            last = s.table.length + chunk.count + chunk.guesses
            assert len(s.table.blocks) * blocks.block_size >= last and s in self.scheduler.running
            for i in range(s.table.length // blocks.block_size, -(-last // blocks.block_size)):
                assert blocks.references[s.table.blocks[i]] == 1, "two would write one block"
            s.table.length += chunk.count
            if s.pending == 0:
                s.tokens += [0] * (1 + chunk.guesses // 2)
                s.table.length = len(s.tokens) - 1
                blocks.truncate(s.table, s.table.length)
            blocks.publish(s.table, s.tokens)
            if len(s.tokens) >= self.ends[s]:
                del self.ends[s]
                self.scheduler.remove(s)

    @rule(guesses=st.integers(0, 3))
    def step(self, guesses: int) -> None:
        self.run_plan(guesses)

    @rule()
    def drain(self) -> None:
        """Everything ends within as many steps as there are tokens to compute, even one at a time, twice over."""
        steps = 0
        while self.ends:
            self.run_plan(0)
            steps += 1
            assert steps < 2000, "no progress"
        assert self.scheduler.blocks.free == self.scheduler.blocks.num_blocks

    @invariant()
    def queues_are_disjoint_and_ordered(self) -> None:
        if hasattr(self, "scheduler"):
            waiting, running = self.scheduler.waiting, self.scheduler.running
            assert {*waiting, *running} == set(self.ends) and len(waiting) + len(running) == len(self.ends)
            assert [s.age for s in waiting] == sorted(s.age for s in waiting)
            assert [s.age for s in running] == sorted(s.age for s in running)
            assert all(not s.table.blocks for s in waiting)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_decoding_goes_before_prompts_and_prompts_are_cut_to_the_budget() -> None:
    scheduler = Scheduler(BlockManager(64, 4), max_batch_tokens=10)
    old, new = sequence(0, [1] * 5), sequence(1, [2] * 30)
    scheduler.add(old)
    scheduler.plan()
    old.table.length = 4
    scheduler.add(new)
    assert [(c.sequence, c.count) for c in scheduler.plan().chunks] == [(old, 1), (new, 9)]


def test_the_youngest_is_preempted_and_comes_back() -> None:
    scheduler = Scheduler(BlockManager(4, 4, prefix_cache=False))
    old, new = sequence(0, [1] * 8), sequence(1, [2] * 8)
    for s in (old, new):
        scheduler.add(s)
    for chunk in scheduler.plan().chunks:
        chunk.sequence.table.length = 8
        chunk.sequence.tokens.append(0)
    assert [c.sequence for c in scheduler.plan().chunks] == [old]
    assert scheduler.waiting == [new] and scheduler.preemptions == 1 and len(new.tokens) == 9
    scheduler.remove(old)
    assert [(c.sequence, c.count) for c in scheduler.plan().chunks] == [(new, 9)]


def test_what_can_never_run_is_refused() -> None:
    with pytest.raises(ResourceError, match="41 tokens does not fit"):
        Scheduler(BlockManager(10, 4)).check(41)
    with pytest.raises(UsageError, match="batching mode"):
        Scheduler(BlockManager(10, 4), mode="dynamic")  # type: ignore[arg-type]
