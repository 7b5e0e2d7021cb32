"""Speculative decoding: cheap guesses, verified by the target in one pass, with the target's exact distribution.

Leviathan et al. 2023 (arXiv 2211.17192): guess x ~ q is kept with probability min(1, p(x) / q(x)); the first refused
one is replaced by a sample of max(p - q, 0) normalised; if all are kept, one more comes from p. p and q are the
distributions after the request's filters. Nothing here depends on where the guesses come from.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from formats.errors import UsageError
from runtime.blocks import Copies, KVCache
from runtime.model import BatchInfo
from runtime.sampling import Array, Chance, one_hot

if TYPE_CHECKING:
    from runtime.model import Model
    from runtime.scheduler import Sequence as Seq


def residual(p: Array, q: Array) -> Array:
    """What to sample from after a refusal: max(p - q, 0), normalised."""
    rest = np.maximum(p - q, 0)
    total = rest.sum()
    return rest / total if total > 0 else p  # p == q up to rounding: refusals have probability 0


def verify(guesses: Sequence[int], q: Sequence[Array], p: Callable[[int], Array], chance: Chance) -> list[int]:
    """The kept guesses and one token more. q[i], p(i): distributions after guesses[:i]; p is asked in order."""
    kept: list[int] = []
    for i, guess in enumerate(guesses):
        target = p(i)
        if not chance.accept(min(1.0, target[guess] / q[i][guess])):
            return [*kept, chance.choose(residual(target, q[i]))]
        kept.append(guess)
    return [*kept, chance.choose(p(len(guesses)))]


@dataclass
class Guess:
    """Proposed tokens and the distributions they were drawn from (empty for greedy requests)."""

    tokens: list[int] = field(default_factory=list)
    q: list[Array] = field(default_factory=list)


class Drafter(Protocol):
    """Where guesses come from."""

    def propose(self, sequences: "list[Seq]", lengths: list[int]) -> list[Guess]:
        """At most lengths[i] tokens after each sequence."""

    def copy(self, copies: Copies) -> None:
        """Follow the target's copies of blocks."""

    def nbytes(self) -> int:
        """Memory held beside the target's."""


class NgramDrafter:
    """Prompt lookup: what followed the last earlier occurrence of the final `longest` .. `shortest` tokens."""

    def __init__(self, vocab_size: int, longest: int = 4, shortest: int = 2) -> None:
        self.vocab_size, self.longest, self.shortest = vocab_size, longest, shortest

    def propose(self, sequences: "list[Seq]", lengths: list[int]) -> list[Guess]:
        guesses = []
        for sequence, length in zip(sequences, lengths, strict=True):
            tokens = self.lookup(sequence.tokens, length) if length else []
            q = [] if sequence.params.temperature == 0 else [one_hot(t, self.vocab_size) for t in tokens]
            guesses.append(Guess(tokens, q))
        return guesses

    def lookup(self, tokens: Sequence[int], length: int) -> list[int]:
        text = array("i", tokens).tobytes()
        for n in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            at = text.rfind(text[-4 * n :], 0, len(text) - 4)
            while at % 4 and at > 0:
                at = text.rfind(text[-4 * n :], 0, at + 4 * n - 1)
            if at >= 0 and at % 4 == 0:
                return list(tokens[at // 4 + n : at // 4 + n + length])
        return []

    def copy(self, copies: Copies) -> None:
        pass

    def nbytes(self) -> int:
        return 0


class ModelDrafter:
    """A smaller model guesses. Its cache has the target's blocks and block tables, so one allocator plans for both.

    `Sequence.drafted` says how much of a sequence the draft has seen; the rest is caught up when it is asked. A shared
    block may then be written again, with the very same content.
    """

    CHUNK = 512  # tokens per catching-up pass

    def __init__(self, model: "Model", vocab_size: int, num_blocks: int, block_size: int, **cache: Any) -> None:
        config = model.config
        self.model, self.vocab_size = model, vocab_size
        self.cache = KVCache(config.n_layers, num_blocks, config.n_kv_heads, config.head_dim, block_size, **cache)

    def propose(self, sequences: "list[Seq]", lengths: list[int]) -> list[Guess]:
        guesses = [Guess() for _ in sequences]
        active = [i for i, length in enumerate(lengths) if length]
        for i in active:
            self._catch_up(sequences[i])
        for step in range(max(lengths, default=0)):
            active = [i for i in active if lengths[i] > step]
            rows = self._forward([sequences[i] for i in active], [guesses[i].tokens for i in active])
            for i, row in zip(active, rows, strict=True):
                self._guess(sequences[i], guesses[i], row)
        for i, guess in enumerate(guesses):
            sequences[i].filter.pop(guess.tokens)
        return guesses

    def _guess(self, sequence: "Seq", guess: Guess, logits: Array) -> None:
        if sequence.params.temperature == 0:
            token = sequence.filter.best(logits)
        else:
            q = sequence.filter.distribution(logits)
            token = sequence.chance.choose(q)
            guess.q.append(q)
        guess.tokens.append(token)
        sequence.filter.push(token)

    def _catch_up(self, sequence: "Seq") -> None:
        """All but the last CHUNK tokens; the rest goes with the first guess."""
        while len(sequence.tokens) - sequence.drafted > self.CHUNK:
            self._run([sequence], [sequence.tokens[sequence.drafted : sequence.drafted + self.CHUNK]])

    def _forward(self, sequences: "list[Seq]", guesses: list[list[int]]) -> list[Array]:
        new = [(s.tokens + g)[s.drafted :] for s, g in zip(sequences, guesses, strict=True)]
        hidden = self._run(sequences, new)
        last = np.cumsum([len(tokens) for tokens in new]) - 1
        logits = self.model.logits(hidden[last.tolist()]).cpu().numpy()
        rows = np.full((len(new), self.vocab_size), -np.inf, np.float32)  # tokens only the target has: never guessed
        width = min(self.vocab_size, logits.shape[1])
        rows[:, :width] = logits[:, :width]
        return list(rows)

    def _run(self, sequences: "list[Seq]", tokens: list[list[int]]) -> torch.Tensor:
        tables = [s.table.at(s.drafted) for s in sequences]
        batch = self.cache.batch(tables, [len(t) for t in tokens])
        known = self.model.config.vocab_size  # for a token that only the target has, the draft reads another
        flat = torch.tensor([min(token, known - 1) for part in tokens for token in part], device=self.cache.k.device)
        hidden = self.model.forward(flat, batch.positions.long(), batch, BatchInfo(batch.sequence))
        for sequence, part in zip(sequences, tokens, strict=True):
            sequence.drafted += len(part)
        return hidden

    def copy(self, copies: Copies) -> None:
        self.cache.copy(copies)

    def nbytes(self) -> int:
        return self.cache.nbytes() + sum(linear.kernel.nbytes() for linear in self.model.linears())


def check_vocabularies(target: dict[str, int], draft: dict[str, int], where: str = "") -> None:
    """Refuse a draft whose tokens mean other texts. Ids that only one of the two has (padding, extras) are tolerated.

    target, draft: token -> id, as `tokenizer.get_vocab()` gives.
    """
    theirs = {i: token for token, i in draft.items()}
    for token, i in sorted(target.items(), key=lambda pair: pair[1]):
        if i in theirs and theirs[i] != token:
            raise UsageError(
                f"the draft's vocabulary differs: token {i} is {theirs[i]!r} there, {token!r} in the target",
                where,
                "use a draft with the target's tokenizer, or speculate by n-gram",
            )
    if not set(target.items()) & set(draft.items()):
        raise UsageError("the draft's vocabulary has nothing in common with the target's", where)


@dataclass
class Acceptance:
    """A running estimate of the probability that a guess is kept; old evidence fades."""

    kept: float = 2.0
    tried: float = 3.0
    wait: int = 0  # steps until guessing is tried again, once it was given up
    patience: int = 32
    probes: int = 0  # steps that guess whatever the estimates say, to measure them

    FADE = 0.95

    @property
    def rate(self) -> float:
        return self.kept / self.tried

    def update(self, kept: int, guessed: int) -> None:
        """`kept` of `guessed` were kept; what follows a refusal was not tried."""
        self.kept = self.kept * self.FADE + kept
        self.tried = self.tried * self.FADE + min(kept + 1, guessed)


class LengthController:
    """How many tokens to guess: the length with the most expected tokens per second, 0 when guessing loses.

    It measures the seconds of a verifying pass by its rows and of a guess, and knows each sequence's acceptance.
    """

    def __init__(self, longest: int = 6, adaptive: bool = True) -> None:
        self.longest, self.adaptive = longest, adaptive
        self.pass_seconds: dict[int, float] = {}
        self.guess_seconds = 0.0
        self.acceptance = Acceptance()
        self.guessed = self.kept = self.steps = self.emitted = 0

    def lengths(self, estimates: Sequence[Acceptance]) -> list[int]:
        """One length for each sequence of the next pass."""
        if not self.adaptive:
            return [self.longest] * len(estimates)
        for estimate in estimates:
            if estimate.wait:
                estimate.wait -= 1
                if estimate.wait == 0:
                    estimate.kept, estimate.tried, estimate.probes = 0.5, 1.0, 1
        rates = [e.rate for e in estimates if e.wait == 0]
        best = max(range(self.longest + 1), key=lambda k: self.speed(rates, len(estimates), k))
        return [self._length(estimate, best) for estimate in estimates]

    def _length(self, estimate: Acceptance, best: int) -> int:
        """`best` for a sequence that tries, 1 for a probe; giving up, for ever longer, where guessing loses."""
        if estimate.wait:
            return 0
        if estimate.probes:
            estimate.probes -= 1
            return min(1, self.longest)
        if best == 0:
            estimate.wait = estimate.patience
            estimate.patience = self.acceptance.patience = min(2 * estimate.patience, 1024)
        return best

    def speed(self, rates: Sequence[float], sequences: int, k: int) -> float:
        """Expected tokens per second when len(rates) of the sequences guess k tokens each."""
        tokens = sequences + sum(sum(rate**i for i in range(1, k + 1)) for rate in rates)
        return tokens / (self.seconds(sequences + k * len(rates)) + k * self.guess_seconds)

    def seconds(self, rows: int) -> float:
        """Seconds of a pass: measured, between its measured neighbours, or hopefully little above the one below."""
        if rows in self.pass_seconds or not self.pass_seconds:
            return self.pass_seconds.get(rows, 1.0)
        below = max((r for r in self.pass_seconds if r < rows), default=0)
        above = min((r for r in self.pass_seconds if r > rows), default=0)
        if not below or not above:
            return self.pass_seconds[below or above] * (1 + 0.03 * (rows - below) if below else 1)
        share = (rows - below) / (above - below)
        return self.pass_seconds[below] * (1 - share) + self.pass_seconds[above] * share

    def measured_pass(self, rows: int, seconds: float) -> None:
        self.pass_seconds[rows] = _smooth(self.pass_seconds.get(rows, seconds), seconds)

    def measured_guess(self, seconds: float) -> None:
        self.guess_seconds = _smooth(self.guess_seconds or seconds, seconds)

    def record(self, estimate: Acceptance, guessed: int, kept: int) -> None:
        """The outcome of one sequence's guesses."""
        estimate.update(kept, guessed)
        self.acceptance.update(kept, guessed)
        if kept:
            self.acceptance.patience = Acceptance.patience
        self.guessed, self.kept = self.guessed + guessed, self.kept + kept

    def fresh(self) -> Acceptance:
        """For a new sequence: what was seen so far, as weak evidence."""
        probes, patience = 0 if self.guessed else 2, self.acceptance.patience
        return Acceptance(3 * self.acceptance.rate, 3.0, patience=patience, probes=probes)


def _smooth(known: float, seconds: float) -> float:
    """A running estimate that forgets a slow start (compilation) at once and ignores hiccups."""
    if seconds > 3 * known:
        return known
    return seconds if seconds < 0.7 * known else known + 0.2 * (seconds - known)
