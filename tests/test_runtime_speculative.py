"""Speculation is exact: enumerated, sampled, and token by token in the engine; and biased variants are caught."""

import functools
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
from scipy import stats
from toy_model import ToyModel

from formats.errors import UsageError
from runtime.engine import Engine
from runtime.sampling import Array, Chance, Filter, KeyedChance, SamplingParams
from runtime.speculative import Acceptance, LengthController, NgramDrafter, check_vocabularies, verify

VOCAB, LENGTH = 4, 4
PARAMS = SamplingParams(temperature=0.7, top_k=3, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.2)
Text = tuple[int, ...]


def logits(seed: int, text: Text) -> Array:
    """What a random language model says after `text`."""
    return np.random.default_rng([seed, len(text), *text]).normal(0, 2, VOCAB).astype(np.float32)


@functools.cache
def filtered(seed: int, text: Text) -> Array:
    f = Filter(PARAMS, (1,), ())
    for token in text:
        f.push(token)
    return f.distribution(logits(seed, text))


@functools.cache
def plain(seed: int, text: Text) -> Array:
    return Filter(SamplingParams(), (), ()).distribution(logits(seed, text))


def speculate(chance: Chance, guesses: int, mutant: str = "") -> Text:
    """LENGTH tokens by drafting from model 1 and verifying with model 0."""
    text: Text = ()
    while len(text) < LENGTH:
        drafted: list[int] = []
        q: list[Array] = []
        for _ in range(guesses):
            after = text + tuple(drafted)
            q.append(filtered(1, after))
            drawn_from = plain(1, after) if mutant == "wrong q" else q[-1]
            drafted.append(int(np.argmax(q[-1])) if mutant == "greedy draft" else chance.choose(drawn_from))
            if q[-1][drafted[-1]] == 0:
                q[-1] = np.full(VOCAB, 1 / VOCAB)  # the mutant's guess was impossible under its q
        target = plain if mutant == "filters on one side" else filtered
        text += tuple(verify(drafted, q, lambda i, t=text, d=drafted, p=target: p(0, t + tuple(d[:i])), chance))
    return text[:LENGTH]


class Branches:
    """A Chance that walks all outcomes: replays a path, then takes the first branch and notes the others."""

    def __init__(self, path: list[int], pending: list[list[int]]) -> None:
        self.path, self.pending, self.at, self.weight = path, pending, 0, 1.0

    def _branch(self, weights: list[float]) -> int:
        possible = [i for i, w in enumerate(weights) if w > 0]
        if self.at == len(self.path):
            self.pending += [[*self.path, i] for i in possible[1:]]
            self.path = [*self.path, possible[0]]
        taken = self.path[self.at]
        self.at, self.weight = self.at + 1, self.weight * weights[taken]
        return taken

    def accept(self, probability: float) -> bool:
        return self._branch([1 - probability, probability]) == 1

    def choose(self, distribution: Array) -> int:
        return self._branch(distribution.tolist())


def enumerate_outcomes(process: Callable[[Chance], Hashable]) -> Counter[Any]:
    pending: list[list[int]] = [[]]
    outcomes: Counter[Any] = Counter()
    while pending:
        branches = Branches(pending.pop(), pending)
        outcome = process(branches)
        outcomes[outcome] += branches.weight  # type: ignore[assignment]
    return outcomes


def target_distribution() -> dict[Text, float]:
    texts: dict[Text, float] = {(): 1.0}
    for _ in range(LENGTH):
        texts = {(*t, x): w * p for t, w in texts.items() for x, p in enumerate(filtered(0, t)) if p > 0}
    return texts


def error(outcomes: Counter[Any]) -> float:
    expected = target_distribution()
    return max(abs(outcomes[t] - expected.get(t, 0)) for t in {*outcomes, *expected})


@pytest.mark.parametrize("guesses", [0, 1, 2])
def test_the_enumerated_distribution_is_the_targets(guesses: int) -> None:
    outcomes = enumerate_outcomes(lambda chance: speculate(chance, guesses))
    assert sum(outcomes.values()) == pytest.approx(1, abs=1e-12)
    assert error(outcomes) < 1e-12


@pytest.mark.parametrize("mutant", ["greedy draft", "wrong q", "filters on one side"])
def test_enumeration_catches_biased_variants(mutant: str) -> None:
    assert error(enumerate_outcomes(lambda chance: speculate(chance, 1, mutant))) > 1e-3


class PooledChance(KeyedChance):
    """The product's decisions on uniform numbers drawn in bulk."""

    def __init__(self, seed: int) -> None:
        super().__init__(0, 0)
        self._numbers = iter(np.random.default_rng(seed).random(4_000_000).tolist())

    def uniform(self) -> float:
        return next(self._numbers)


def first_token_pvalue(samples: int, mutant: str = "") -> float:
    """Chi-square of the token that one guess and its verification give, on Zipf-like distributions of 40 tokens."""
    rng, params = np.random.default_rng(3), SamplingParams(temperature=0.8, top_p=0.9)
    base = -1.1 * np.log(np.arange(1, 41))
    both = [(base + rng.normal(0, 0.7, 40)).astype(np.float32) for _ in range(2)]
    p, q = (Filter(params, (), ()).distribution(x) for x in both)
    raw_p, raw_q = (Filter(SamplingParams(), (), ()).distribution(x) for x in both)
    target = raw_p if mutant == "filters on one side" else p
    drawn_from = raw_q if mutant == "wrong q" else q
    claimed = np.maximum(q, 1e-3) if mutant == "wrong q" else q
    chance, counts, best = PooledChance(11), np.zeros(40), int(np.argmax(q))
    for _ in range(samples):
        guess = best if mutant == "greedy draft" else chance.choose(drawn_from)
        counts[verify([guess], [claimed], lambda i: target, chance)[0]] += 1
    possible = p > 0
    if counts[~possible].any():
        return 0.0
    return float(stats.chisquare(counts[possible], p[possible] * samples).pvalue)


def test_a_million_samples_follow_the_target() -> None:
    assert first_token_pvalue(1_000_000) > 1e-3


@pytest.mark.parametrize("mutant", ["greedy draft", "wrong q", "filters on one side"])
def test_samples_catch_biased_variants(mutant: str) -> None:
    assert first_token_pvalue(50_000, mutant) < 1e-9


TARGET = ToyModel(vocab=11, sharpness=2.5)
DRAFTS: dict[str, dict[str, Any]] = {
    "same model": dict(draft=TARGET, guesses=3, adaptive=False),
    "other model": dict(draft=ToyModel(vocab=11, seed=9, sharpness=2.5), guesses=2, adaptive=False),
    "padded vocabulary": dict(draft=ToyModel(vocab=13, seed=9), guesses=3),
    "smaller vocabulary": dict(draft=ToyModel(vocab=8, seed=9), guesses=3, adaptive=False),
    "ngram": dict(draft="ngram", guesses=4, adaptive=False),
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_tokens_are_identical_inside_continuous_batching(draft: str) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 8, n).tolist() for n in (1, 5, 17, 30, 44, 3)]
    params = [SamplingParams(max_tokens=12 + 5 * i, temperature=0, repetition_penalty=1 + 0.1 * i) for i in range(6)]
    expected = Engine(TARGET, max_running=1).generate(prompts, params)
    engine = Engine(TARGET, kv_tokens=16 * 14, max_running=4, max_batch_tokens=23, **DRAFTS[draft])
    ours = engine.generate(prompts, params)
    assert [c[0].tokens for c in ours] == [c[0].tokens for c in expected]
    assert engine.stats().acceptance is not None and engine.blocks.free == engine.blocks.num_blocks
    if draft == "same model":
        assert engine.stats().acceptance == 1.0


@pytest.mark.parametrize("draft", ["same model", "other model", "smaller vocabulary", "ngram"])
def test_sampled_texts_follow_the_target_in_the_engine(draft: str) -> None:
    samples, prompt = 2000, [1, 2, 1, 2, 1]
    params = SamplingParams(temperature=0.9, top_k=4, top_p=0.9)
    engine = Engine(TARGET, max_running=64, seed=5, **DRAFTS[draft])
    one = [SamplingParams(temperature=0.9, top_k=4, top_p=0.9, max_tokens=3)] * samples
    counts = Counter(tuple(c[0].tokens) for c in engine.generate([prompt] * samples, one))
    expected: dict[Text, float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*t, x): w * p
            for t, w in expected.items()
            for x, p in enumerate(Filter(params, (), ()).distribution(TARGET.alone([*prompt, *t])[-1].numpy()))
            if p > 0
        }
    assert set(counts) <= set(expected)
    common = [t for t, w in expected.items() if w * samples >= 5]
    seen, weights = [counts[t] for t in common], [expected[t] for t in common]
    rest = [samples - sum(seen), 1 - sum(weights)]
    assert rest[1] * samples >= 5 or rest[0] < 20
    seen, weights = (seen + rest[:1], weights + rest[1:]) if rest[1] * samples >= 5 else (seen, weights)
    assert stats.chisquare(seen, np.array(weights) / sum(weights) * sum(seen)).pvalue > 1e-4


def test_prompt_lookup_finds_the_latest_longest_match() -> None:
    lookup = NgramDrafter(100).lookup
    assert lookup([1, 2, 3, 4, 9, 1, 2, 3, 5, 7, 2, 3], 3) == [5, 7, 2]
    assert lookup([9, 1, 2, 3, 4, 8, 8, 2, 3, 5, 1, 2, 3], 2) == [4, 8]
    assert lookup([1, 2, 3, 4], 3) == [] and lookup([5], 3) == [] and lookup([5, 5, 5], 4) == [5]
    assert lookup([256, 1, 65536, 257, 1, 256, 1], 2) == [65536, 257]  # matches at token borders only


def test_vocabularies_are_compared() -> None:
    ours = {"a": 0, "b": 1, "c": 2}
    check_vocabularies(ours, ours | {"<pad>": 3})
    check_vocabularies(ours | {"<extra>": 3}, ours)
    with pytest.raises(UsageError, match="token 1 is 'c' there, 'b' in the target"):
        check_vocabularies(ours, {"a": 0, "c": 1, "b": 2})
    with pytest.raises(UsageError, match="nothing in common"):
        check_vocabularies(ours, {"x": 7})


def test_the_length_follows_cost_and_acceptance() -> None:
    controller = LengthController(longest=5)
    for rows in range(1, 7):
        controller.measured_pass(rows, 1 + 0.02 * rows)
    controller.measured_guess(0.05)
    assert controller.lengths([Acceptance(9.5, 10)]) == [5]
    assert 1 <= controller.lengths([Acceptance(5, 10)])[0] <= 3
    assert controller.lengths([Acceptance(0.2, 10)]) == [0]
    assert controller.lengths([Acceptance(0.2, 10, wait=3), Acceptance(9, 10)]) == [0, 5]
    for rows in range(1, 7):
        controller.pass_seconds[rows] = rows  # a machine on which every row costs the same: nothing to gain
    assert controller.lengths([Acceptance(9, 10)]) == [0]


def test_a_hopeless_draft_is_given_up_and_tried_again_ever_more_rarely() -> None:
    controller, estimate, steps = LengthController(), Acceptance(), []
    for rows, seconds in ((1, 1.0), (2, 1.1), (7, 1.6)):
        controller.measured_pass(rows, seconds)
    controller.measured_guess(0.2)
    for step in range(1000):
        length = controller.lengths([estimate])[0]
        if length:
            steps.append(step)
            controller.record(estimate, length, 0)
    assert len(steps) < 25 and steps[4] < 100
    last = np.diff(steps)
    assert last.max() > 200 and last.max() == last[-3:].max()
