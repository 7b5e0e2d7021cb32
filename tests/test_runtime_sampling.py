"""Filters against their definitions, chance by key, and text that never shows what a stop string takes back."""

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from scipy import stats

from formats.errors import UsageError
from runtime.sampling import Filter, KeyedChance, SamplingParams, TextStream, log_softmax, token_logprob, top_tokens


def distribution(logits: list[float], prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **params: Any) -> Any:
    f = Filter(SamplingParams(**params), prompt, ())
    for token in output:
        f.push(token)
    return f.distribution(np.array(logits, np.float32))


def by_definition(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
    p = np.exp(np.array(logits, np.float32).astype(float) / temperature)
    order = sorted(range(len(p)), key=lambda i: (-logits[i], i))
    kept = order[:top_k] if top_k else order
    p = np.array([p[i] if i in kept else 0.0 for i in range(len(p))])
    p /= p.sum()
    nucleus, mass = [], 0.0
    for i in kept:
        if mass >= top_p:
            break
        nucleus.append(i)
        mass += p[i]
    p = np.array([p[i] if i in nucleus else 0.0 for i in range(len(p))])
    p[p < min_p * p.max()] = 0
    return p / p.sum()


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(-12, 12).map(lambda i: i / 4), min_size=1, max_size=12),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.integers(0, 13),
    st.sampled_from([0.31, 0.77, 0.9, 1.0]),
    st.sampled_from([0.0, 0.13, 0.61]),
)
def test_filters_are_what_they_say(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    ours = distribution(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = by_definition(logits, temperature, top_k, top_p, min_p)
    np.testing.assert_allclose(ours, expected, atol=1e-12)


def test_temperature_zero_is_greedy_with_the_first_of_equals() -> None:
    assert distribution([1.0, 3.0, 3.0], temperature=0).tolist() == [0, 1, 0]


def test_penalties_and_bias_change_the_logits_as_documented() -> None:
    f = Filter(SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25), [0, 1], ())
    for token in (2, 2, 1):
        f.push(token)
    adjusted = f.adjust(np.array([4.0, -4.0, 4.0, 4.0], np.float32))
    assert adjusted.tolist() == [2.0, -8.0 - 0.5 - 0.25, 2.0 - 1.0 - 0.25, 4.0]
    f.pop([2, 1])
    assert f.adjust(np.array([4.0, -4.0, 4.0, 4.0], np.float32)).tolist() == [2.0, -8.0, 2.0 - 0.75, 4.0]
    biased = Filter(SamplingParams(logit_bias={1: -100, 3: 2.5}), (), ())
    assert biased.adjust(np.zeros(4, np.float32)).tolist() == [0, -100, 0, 2.5]


def test_ends_are_forbidden_before_min_tokens() -> None:
    f = Filter(SamplingParams(min_tokens=1, max_tokens=4), (), ends=[2])
    assert f.best(np.array([0, 1, 5], np.float32)) == 1
    f.push(1)
    assert f.best(np.array([0, 1, 5], np.float32)) == 2


@pytest.mark.parametrize(
    "wrong",
    [dict(temperature=-1), dict(temperature=float("nan")), dict(top_p=0), dict(n=0), dict(stop=("",)), dict(min_p=2),
     dict(n=3, beam_width=2), dict(min_tokens=9, max_tokens=3), dict(logit_bias={99: 1}), dict(max_tokens=0)],
)  # fmt: skip
def test_meaningless_values_are_usage_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SamplingParams(**wrong).check(vocab_size=10)


def test_chance_is_uniform_reproducible_and_different_per_seed_child_position_and_draw() -> None:
    a, b = KeyedChance(5, 0), KeyedChance(5, 0)
    drawn = [a.at(i).uniform() for i in range(4000)]
    assert drawn == [b.at(i).uniform() for i in range(4000)]
    keys = [KeyedChance(s, c).at(p).uniform() for s in range(6) for c in range(6) for p in range(6)]
    draws = [a.uniform() for _ in range(50)]
    assert len({*keys, *draws}) == 6**3 + 50
    assert stats.kstest(drawn, "uniform").pvalue > 1e-3


def test_choose_follows_the_distribution_and_never_takes_the_impossible() -> None:
    p = np.array([0.0, 0.2, 0.0, 0.5, 0.3, 0.0])
    chance = KeyedChance(1, 0)
    seen = Counter(chance.at(i).choose(p) for i in range(20000))
    assert set(seen) == {1, 3, 4}
    assert stats.chisquare([seen[1], seen[3], seen[4]], [4000, 10000, 6000]).pvalue > 1e-3


def test_logprobs_are_of_the_unfiltered_model() -> None:
    logits = np.array([1.0, 3.0, 2.0, 3.0], np.float32)
    assert np.exp(log_softmax(logits)).sum() == pytest.approx(1)
    entry = token_logprob(logits, 0, 2)
    assert entry.logprob == pytest.approx(1 - np.log(np.exp([1, 3, 2, 3]).sum()))
    assert [t for t, _ in entry.top] == [1, 3] and token_logprob(logits, 0, 0).top == []
    assert [t for t, _ in top_tokens(logits, 9)] == [1, 3, 2, 0]


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def stream(text: str, stop: tuple[str, ...]) -> tuple[list[str], bool]:
    """Feed a text byte by byte; the pieces released, and whether it stopped."""
    s, pieces = TextStream(decode, stop), []
    for byte in text.encode():
        pieces.append(s.push(byte))
        if s.stopped:
            break
    return [*pieces, s.finish()], s.stopped


@settings(max_examples=300, deadline=None)
@given(st.text("abé€", max_size=14), st.lists(st.text("abé€", min_size=1, max_size=4), max_size=3).map(tuple))
def test_streamed_text_ends_exactly_before_the_first_stop_string(text: str, stop: tuple[str, ...]) -> None:
    pieces, stopped = stream(text, stop)
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert stopped == bool(ends)
    first = min(ends)[0] if ends else 0  # the one complete first, as text grows
    assert "".join(pieces) == (text if not ends else text[: min(at for end, at in ends if end == first)])


def test_text_is_released_as_soon_as_it_is_safe() -> None:
    pieces, stopped = stream("a stop ston\u20ac", ("stone",))
    assert not stopped and "".join(pieces) == "a stop ston\u20ac"
    assert pieces[:6] == ["a", " ", "", "", "", "stop"[:4]] or pieces[5] == "stop"
    assert pieces[-2] == "ston\u20ac" and "\ufffd" not in "".join(pieces)


def test_an_unfinished_character_is_shown_at_the_end_only() -> None:
    s = TextStream(decode)
    assert s.push(0xE2) == "" and s.push(0x82) == "" and s.finish() == "\ufffd"
