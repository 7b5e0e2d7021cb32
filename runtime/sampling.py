"""From logits to tokens: filters, seeded chance, log-probabilities, and text that stops at stop strings.

Chance is drawn by key, not in sequence: (seed, child, position, draw) always gives the same number, whatever else is
in the batch and however often a request was preempted.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from formats.errors import UsageError

Array = np.ndarray


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    temperature 0 is greedy. Filters apply in this order: logit_bias, repetition penalty (over prompt and output;
    divides positive logits, multiplies negative ones), frequency and presence penalties (over the output), temperature,
    top_k (0: off), top_p, min_p. stop: strings, cut from the text; stop_token_ids and the model's end tokens end a
    sequence too. min_tokens: none of these before. logprobs: how many alternatives to report per token (0: the
    token's own), from the unfiltered model; None: nothing. n: independent samples; with beam_width: the best n beams,
    by sum of log-probabilities / length ** length_penalty. seed None: a fresh one.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    beam_width: int = 0
    length_penalty: float = 1.0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def check(self, vocab_size: int) -> None:
        """Raise UsageError for values that mean nothing."""
        rules = [
            (self.max_tokens >= 1, "max_tokens", "at least 1"),
            (0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens"),
            (0 <= self.temperature < float("inf"), "temperature", "0 (greedy) or above"),
            (self.top_k >= 0, "top_k", "0 (off) or above"),
            (0 < self.top_p <= 1, "top_p", "above 0, at most 1"),
            (0 <= self.min_p <= 1, "min_p", "between 0 and 1"),
            (self.repetition_penalty > 0, "repetition_penalty", "above 0"),
            (abs(self.frequency_penalty) <= 100, "frequency_penalty", "a finite number"),
            (abs(self.presence_penalty) <= 100, "presence_penalty", "a finite number"),
            (all(0 <= t < vocab_size for t in self.logit_bias), "logit_bias", f"token ids below {vocab_size}"),
            (self.n >= 1, "n", "at least 1"),
            (self.beam_width == 0 or self.n <= self.beam_width, "n", "at most beam_width"),
            (all(self.stop), "stop", "strings that are not empty"),
            (
                not (self.beam_width and self.stop),
                "stop",
                "empty with beam search, which compares tokens: use stop_token_ids",
            ),
            (self.logprobs is None or 0 <= self.logprobs <= vocab_size, "logprobs", "between 0 and the vocabulary"),
        ]
        for good, name, allowed in rules:
            if not good:
                raise UsageError(f"{name} is {getattr(self, name)!r}", "sampling", f"{name} must be {allowed}")


class Chance(Protocol):
    """A source of decisions. Tests replace it by one that enumerates them."""

    def accept(self, probability: float) -> bool: ...
    def choose(self, distribution: Array) -> int: ...


class KeyedChance:
    """Decisions for one sequence. `at(position)` starts the draws that belong to a position of its text."""

    def __init__(self, seed: int, child: int) -> None:
        self._key = struct.pack("<Qq", seed % 2**64, child)
        self._position = self._draw = 0

    def at(self, position: int) -> "KeyedChance":
        self._position, self._draw = position, 0
        return self

    def uniform(self) -> float:
        """In [0, 1), 53 bits."""
        message = struct.pack("<qq", self._position, self._draw)
        self._draw += 1
        digest = hashlib.blake2b(message, key=self._key, digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

    def accept(self, probability: float) -> bool:
        return self.uniform() < probability

    def choose(self, distribution: Array) -> int:
        """A token by inversion; tokens of probability 0 are never chosen."""
        cumulative = np.cumsum(distribution)
        token = int(np.searchsorted(cumulative, self.uniform() * cumulative[-1], side="right"))
        return token if token < len(distribution) else int(np.flatnonzero(distribution)[-1])


class Filter:
    """The distribution that a request allows after its logits: the same object filters target and draft.

    prompt: its tokens; ends: token ids forbidden before min_tokens.
    """

    def __init__(self, params: SamplingParams, prompt: Iterable[int], ends: Iterable[int]) -> None:
        self.params, self.ends = params, sorted(ends)
        self.seen = Counter(prompt) if params.repetition_penalty != 1 else Counter()
        self.output: Counter[int] = Counter()
        self.plain = not params.logit_bias and params.repetition_penalty == 1
        self.plain &= params.frequency_penalty == 0 and params.presence_penalty == 0

    def fork(self) -> "Filter":
        twin = Filter(self.params, (), self.ends)
        twin.seen, twin.output = Counter(self.seen), Counter(self.output)
        return twin

    def push(self, token: int) -> None:
        """One more token of output."""
        self.output[token] += 1

    def pop(self, tokens: Iterable[int]) -> None:
        """Take back tokens that were only considered."""
        self.output -= Counter(tokens)

    def adjust(self, logits: Array) -> Array:
        """Logits [V] after bias and penalties; float64 unless nothing applies."""
        p = self.params
        early = self.output.total() < p.min_tokens and self.ends
        if self.plain and not early:
            return logits
        x = logits.astype(np.float64)
        if p.logit_bias:
            x[list(p.logit_bias)] += list(p.logit_bias.values())
        if p.repetition_penalty != 1:
            ids = list(self.seen | self.output)
            x[ids] = np.where(x[ids] > 0, x[ids] / p.repetition_penalty, x[ids] * p.repetition_penalty)
        if self.output and (p.frequency_penalty or p.presence_penalty):
            x[list(self.output)] -= p.frequency_penalty * np.array(list(self.output.values())) + p.presence_penalty
        if early:
            x[self.ends] = -np.inf
        return x

    def best(self, logits: Array) -> int:
        """The greedy token."""
        return int(np.argmax(self.adjust(logits)))

    def distribution(self, logits: Array) -> Array:
        """Probabilities float64 [V], summing to 1."""
        x, p = self.adjust(logits), self.params
        if p.temperature == 0:
            return one_hot(int(np.argmax(x)), len(x))
        x = x.astype(np.float64) / p.temperature
        if 0 < p.top_k < len(x):
            x[~_largest(x, p.top_k)] = -np.inf
        y = np.exp(x - x.max())
        y /= y.sum()
        if p.top_p < 1:
            y[~_nucleus(y, p.top_p)] = 0
        if p.min_p > 0:
            y[y < p.min_p * y.max()] = 0
        return y / y.sum()


def one_hot(token: int, size: int) -> Array:
    y = np.zeros(size)
    y[token] = 1.0
    return y


def _largest(x: Array, k: int) -> Array:
    """Mask of the k largest values; of equal ones the first."""
    threshold = np.partition(x, len(x) - k)[len(x) - k]
    mask = x > threshold
    mask[np.flatnonzero(x == threshold)[: k - int(mask.sum())]] = True
    return mask


def _nucleus(y: Array, top_p: float) -> Array:
    """Mask of the smallest set of most probable tokens that reaches top_p; of equal ones the first."""
    candidates = np.flatnonzero(y >= (1 - top_p) / len(y))  # all others together weigh less than 1 - top_p
    order = candidates[np.argsort(-y[candidates], kind="stable")]
    size = int(np.searchsorted(np.cumsum(y[order]), top_p)) + 1
    mask = np.zeros(len(y), bool)
    mask[order[:size]] = True
    return mask


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its log-probability, and the most probable alternatives (token, log-probability), best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def log_softmax(logits: Array) -> Array:
    """Float64 log-probabilities [V] of one row."""
    x = logits.astype(np.float64)
    x -= x.max()
    return x - np.log(np.exp(x).sum())


def top_tokens(logprobs: Array, k: int) -> list[tuple[int, float]]:
    """The k most probable (token, log-probability), best first; equal ones by id."""
    ids = np.flatnonzero(_largest(logprobs, k)) if 0 < k < len(logprobs) else np.arange(len(logprobs))[: k or 0]
    return sorted(((int(i), float(logprobs[i])) for i in ids), key=lambda pair: (-pair[1], pair[0]))


def token_logprob(logits: Array, token: int, k: int) -> TokenLogprob:
    logprobs = log_softmax(logits)
    return TokenLogprob(token, float(logprobs[token]), top_tokens(logprobs, k))


class TextStream:
    """Text of a growing token sequence, released as soon as later tokens cannot change or withdraw it.

    decode: tokens -> text, with U+FFFD for an incomplete character at the end. `push` returns newly safe text; once a
    stop string is complete, `stopped` is true and the text ends before it.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._tokens: list[int] = []
        self._start = self._read = 0  # tokens before _start are settled; those before _read are in the text
        self._held = ""
        self.stopped = False

    def push(self, token: int, may_stop: bool = True) -> str:
        self._tokens.append(token)
        before, after = self._decode(self._tokens[self._start : self._read]), self._decode(self._tokens[self._start :])
        if after.endswith("\ufffd"):
            return ""
        self._held += after[len(before) :]
        self._start, self._read = self._read, len(self._tokens)
        return self._release(may_stop)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        before, after = self._decode(self._tokens[self._start : self._read]), self._decode(self._tokens[self._start :])
        text = "" if self.stopped else self._held + after[len(before) :]
        self._held, self._start = "", len(self._tokens)
        return text

    def _release(self, may_stop: bool) -> str:
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0] if may_stop else []
        if found:
            self.stopped = True
            return self._held[: min(found)]
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` starts with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
