"""Beam search as bookkeeping over forked sequences: which candidates survive, and when searching on is pointless."""

from dataclasses import dataclass

from runtime.sampling import Array, SamplingParams, log_softmax, top_tokens
from runtime.scheduler import Sequence


@dataclass
class Hypothesis:
    """A finished beam. tokens: its output, an end token included; score: log-probability / length ** penalty."""

    tokens: list[int]
    score: float
    reason: str


class BeamSearch:
    """The beams of one request. live: sum of log-probabilities of each sequence still growing."""

    def __init__(self, params: SamplingParams, prompt_length: int, ends: frozenset[int]) -> None:
        self.params, self.prompt_length, self.ends = params, prompt_length, ends
        self.live: dict[Sequence, float] = {}
        self.done: list[Hypothesis] = []
        self._offers: dict[Sequence, list[tuple[int, float]]] = {}

    def offer(self, sequence: Sequence, logits: Array) -> bool:
        """Note the best continuations of one beam; True once all beams have theirs."""
        logprobs = log_softmax(sequence.filter.adjust(logits))
        self._offers[sequence] = top_tokens(logprobs, self.params.beam_width + len(self.ends))
        return len(self._offers) == len(self.live)

    def select(self) -> list[tuple[Sequence, int, float]]:
        """The survivors (parent, token, sum), best first; finished beams move to `done`. Empty: the search is over."""
        candidates = [
            (self.live[parent] + logprob, parent, token)
            for parent, pairs in self._offers.items()
            for token, logprob in pairs
        ]
        candidates.sort(key=lambda c: (-c[0], c[1].age, c[2]))
        self._offers.clear()
        survivors: list[tuple[Sequence, int, float]] = []
        for total, parent, token in candidates:
            output = [*parent.tokens[self.prompt_length :], token]
            if token in self.ends or len(output) == self.params.max_tokens:
                reason = "stop" if token in self.ends else "length"
                self.done.append(Hypothesis(output, self._score(total, len(output)), reason))
            elif len(survivors) < self.params.beam_width:
                survivors.append((parent, token, total))
        self.done.sort(key=lambda h: -h.score)
        del self.done[self.params.beam_width :]
        return [] if self._settled(survivors) else survivors

    def _settled(self, survivors: list[tuple[Sequence, int, float]]) -> bool:
        """Can no survivor overtake the worst of a full set of finished beams? Sums only fall from here on."""
        if not survivors or len(self.done) < self.params.beam_width:
            return not survivors
        parent, _, best = survivors[0]
        length = len(parent.tokens) + 1 - self.prompt_length
        longest = self.params.max_tokens if self.params.length_penalty > 0 else length
        return self._score(best, longest) <= self.done[-1].score

    def _score(self, total: float, length: int) -> float:
        return total / float(length) ** self.params.length_penalty
