"""Continuous batching: at every step, who runs, and how many tokens of each.

Sequences are served by age (request, then child). Those that decode go first, one token and some guesses each; what is
left of the token budget feeds prompts in chunks; waiting sequences join when their whole prompt finds blocks. When
blocks run out, the youngest sequence gives its blocks back and is computed again later: no token is lost, for sampling
draws chance by position. The oldest sequence is never preempted for another, so there is always progress.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from formats.errors import ResourceError, UsageError
from runtime.blocks import BlockManager, BlockTable, Copies
from runtime.sampling import Filter, KeyedChance, SamplingParams
from runtime.speculative import Acceptance

if TYPE_CHECKING:
    from runtime.requests import Request


@dataclass(eq=False)
class Sequence:
    """One line of text under way. table.length tokens have keys and values; the others are still to be run.

    scored_from: index of the first token whose log-probability is asked (None: none is); parked: waits for the other
    beams of its request; drafted: tokens the draft model has seen.
    """

    request: "Request"
    child: int
    tokens: list[int]
    params: SamplingParams
    filter: Filter
    chance: KeyedChance
    table: BlockTable = field(default_factory=BlockTable)
    scored_from: int | None = None
    parked: bool = False
    drafted: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)

    @property
    def age(self) -> tuple[int, int]:
        return self.request.id, self.child

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.table.length


@dataclass
class Chunk:
    """`count` tokens of a sequence to run now, from table.length on; `guesses`: room reserved for as many guesses."""

    sequence: Sequence
    count: int
    guesses: int = 0


@dataclass
class Plan:
    chunks: list[Chunk] = field(default_factory=list)
    copies: Copies = field(default_factory=list)


class Scheduler:
    """Owns the queues. mode "static": a batch is admitted only when the one before has ended entirely (a baseline)."""

    def __init__(
        self,
        blocks: BlockManager,
        max_running: int = 64,
        max_batch_tokens: int = 512,
        mode: Literal["continuous", "static"] = "continuous",
    ) -> None:
        if mode not in ("continuous", "static"):
            raise UsageError(f'unknown batching mode "{mode}"', how_to_fix="continuous or static")
        if max_running < 1 or max_batch_tokens < 1:
            raise UsageError("max_running and max_batch_tokens must be at least 1", "scheduler")
        self.blocks, self.max_running, self.max_batch_tokens, self.mode = blocks, max_running, max_batch_tokens, mode
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = self.hit_tokens = self.asked_tokens = 0

    def check(self, length: int) -> None:
        """Refuse what could never run: a sequence of `length` tokens must fit into the pool alone."""
        room = self.blocks.num_blocks * self.blocks.block_size
        if length > room:
            raise ResourceError(
                f"a sequence of {length} tokens does not fit into the KV cache of {room}",
                how_to_fix="lower max_tokens, shorten the prompt, or give the cache more blocks",
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; one that owns blocks (a fork) goes on running."""
        insort(self.running if sequence.table.length else self.waiting, sequence, key=lambda s: s.age)

    def remove(self, sequence: Sequence) -> None:
        """A sequence ends: its blocks are free from now on."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.blocks.release(sequence.table)

    def plan(self, wanted: Callable[[list[Sequence]], list[int]] = lambda ready: [0] * len(ready)) -> Plan:
        """The next step. wanted(sequences that decode) -> how many guesses each would like to have verified."""
        plan, before = Plan(), self.preemptions
        ready = [s for s in self.running if s.pending == 1 and not s.parked and s.scored_from is None]
        for sequence, guesses in zip(ready, wanted(ready), strict=True):
            if sequence in self.running and not self._decode(plan, sequence, guesses):
                self._preempt(sequence)
        if self.preemptions == before:
            self._admit()
        for sequence in list(self.running):
            if (
                sequence in self.running
                and not sequence.parked
                and all(c.sequence is not sequence for c in plan.chunks)
            ):
                self._prefill(plan, sequence)
        return plan

    def _left(self, plan: Plan) -> int:
        return self.max_batch_tokens - sum(chunk.count + chunk.guesses for chunk in plan.chunks)

    def _decode(self, plan: Plan, sequence: Sequence, guesses: int) -> bool:
        """Schedule one token and the guesses for which there is room anyway. False: not even one block to be had."""
        left = self._left(plan)
        if left < 1:
            return True  # the budget is spent; it keeps its blocks
        guesses = min(guesses, left - 1)
        if self.blocks.needed(sequence.table, len(sequence.tokens) + guesses) > self.blocks.free:
            guesses = 0
        if not self._reserve(plan, sequence, len(sequence.tokens) + guesses):
            return False
        plan.chunks.append(Chunk(sequence, 1, guesses))
        return True

    def _prefill(self, plan: Plan, sequence: Sequence) -> None:
        """Schedule as much of a prompt as budget and blocks allow."""
        count = min(sequence.pending, self._left(plan))
        if count > 0 and self._reserve(plan, sequence, sequence.table.length + count):
            plan.chunks.append(Chunk(sequence, count))

    def _admit(self) -> None:
        """Move waiting sequences to the running ones, oldest first, while their whole text finds blocks."""
        if self.mode == "static" and self.running:
            return
        promised = sum(self.blocks.needed(s.table, len(s.tokens) + 1) for s in self.running if not s.parked)
        while len(self.running) < self.max_running:
            sequence = next((s for s in self.waiting if not s.parked), None)
            if sequence is None:
                return
            # a token is needed for the next one's logits, and a token whose log-probability is asked must be predicted
            limit = min(len(sequence.tokens), sequence.scored_from or len(sequence.tokens)) - 1
            table = self.blocks.match(sequence.tokens, limit)
            needed = self.blocks.needed(table, len(sequence.tokens))
            if promised + needed > self.blocks.free:
                self.blocks.release(table)
                if not self.running or not all(s.parked for s in self.running):
                    return
                self._preempt(self.running[-1])  # the parked wait for this one
                continue
            promised += needed
            self.hit_tokens, self.asked_tokens = (
                self.hit_tokens + table.length,
                self.asked_tokens + len(sequence.tokens),
            )
            sequence.table, sequence.drafted = table, 0
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda s: s.age)

    def _reserve(self, plan: Plan, sequence: Sequence, length: int) -> bool:
        """Make room up to `length`, at the cost of younger or parked sequences that are not in the plan."""
        while True:
            copies = self.blocks.reserve(sequence.table, length)
            if copies is not None:
                plan.copies += copies
                return True
            chosen = {id(chunk.sequence) for chunk in plan.chunks}
            victims = [s for s in self.running if (s.parked or s.age > sequence.age) and id(s) not in chosen]
            if not victims:
                return False
            self._preempt(victims[-1])

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self.blocks.release(sequence.table)
        insort(self.waiting, sequence, key=lambda s: s.age)
