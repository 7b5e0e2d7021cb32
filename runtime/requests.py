"""What goes into the engine and comes out of it: requests under way, outputs, completions, scores, statistics."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.sampling import SamplingParams, TextStream, TokenLogprob
from runtime.scheduler import Sequence as Seq

if TYPE_CHECKING:
    from runtime.beam import BeamSearch


@dataclass
class Score:
    """How likely a continuation is: log-probability of each of its tokens, and whether greedy decoding would say it."""

    logprobs: list[float] = field(default_factory=list)
    greedy: bool = True

    @property
    def total(self) -> float:
        return sum(self.logprobs)


@dataclass
class Output:
    """News of one sequence. tokens, text, logprobs: new ones only. finish_reason: "stop", "length", "cancelled", None.

    index: which of the request's n. score: of a finished beam (length-penalised sum) or a scored choice.
    """

    request_id: int
    index: int
    tokens: list[int]
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    score: "Score | float | None" = None


@dataclass
class Completion:
    """All of one sequence, put together from its outputs."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    score: "Score | float | None" = None

    def add(self, output: Output) -> None:
        self.tokens += output.tokens
        self.text += output.text
        self.logprobs += output.logprobs
        self.finish_reason, self.score = output.finish_reason, output.score


@dataclass(eq=False)
class Request:
    """What was asked, and what is under way for it."""

    id: int
    prompt: list[int]
    params: SamplingParams
    ends: frozenset[int]
    seed: int
    choices: list[list[int]] | None = None
    sequences: list[Seq] = field(default_factory=list)
    texts: dict[int, TextStream] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    beams: "BeamSearch | None" = None
    children: int = 0  # forks made so far
    spread: bool = False  # have n > 1 children, beams or choices been forked off?
    last: dict[int, float] = field(default_factory=dict)  # child -> time of its latest tokens
    arrived: float = field(default_factory=time.perf_counter)


@dataclass
class Stats:
    """Counters since the engine started, and the present state. Times in seconds, of the latest requests or tokens."""

    waiting: int
    running: int
    blocks_used: int
    blocks_total: int
    cache_hit_rate: float
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    tokens_per_second: float
    ttft: list[float] = field(repr=False)
    inter_token: list[float] = field(repr=False)
    acceptance: float | None
    tokens_per_step: float | None
