"""The engine: requests in, tokens out, one step at a time, on paged memory with continuous batching.

Not thread-safe: one thread calls it. With kernels whose rows do not depend on each other ("exact" ones) and a float
cache, a request's result has the same bits alone, in any batch, chunked, preempted, or served from the prefix cache.
Under speculation a greedy result is still the same; a sampled one has the same distribution.
"""

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from formats.errors import UsageError
from runtime.beam import BeamSearch, Hypothesis
from runtime.blocks import BlockManager, KVCache
from runtime.model import BatchInfo
from runtime.requests import Completion, Output, Request, Score, Stats
from runtime.sampling import (
    Array,
    Filter,
    KeyedChance,
    SamplingParams,
    TextStream,
    log_softmax,
    token_logprob,
)
from runtime.scheduler import Chunk, Plan, Scheduler
from runtime.scheduler import Sequence as Seq
from runtime.speculative import Drafter, Guess, LengthController, ModelDrafter, NgramDrafter, check_vocabularies, verify

if TYPE_CHECKING:
    from runtime.model import Model

LOGIT_ROWS = 64  # rows of logits held at a time when a whole text is scored


class Engine:
    """Serves one model. See `SamplingParams` for what a request may ask, `Stats` for what is counted.

    tokenizer: for text, stop strings and the end token; without it requests are tokens only. end_tokens: more of them.
    kv_tokens: size of the cache, rounded up to blocks. draft: a Model with the same vocabulary, or "ngram"; guesses:
    the most tokens guessed at once, always as many unless `adaptive`. seed: makes unseeded requests reproducible.
    """

    def __init__(
        self,
        model: "Model",
        tokenizer: Any = None,
        end_tokens: Sequence[int] = (),
        kv_tokens: int = 16384,
        kv_dtype: str = "float32",
        block_size: int = 16,
        prefix_cache: bool = True,
        max_running: int = 64,
        max_batch_tokens: int = 512,
        mode: Literal["continuous", "static"] = "continuous",
        draft: "Model | Literal['ngram'] | None" = None,
        guesses: int = 6,
        adaptive: bool = True,
        attention: str = "auto",
        seed: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self.vocab_size = model, tokenizer, model.config.vocab_size
        own_end = [] if tokenizer is None or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.end_tokens = frozenset([*end_tokens, *own_end])
        blocks = -(-kv_tokens // block_size)
        config, storage = model.config, dict(dtype=kv_dtype, device=str(model.device), kernel=attention)
        self.blocks = BlockManager(blocks, block_size, prefix_cache)
        self.cache = KVCache(config.n_layers, blocks, config.n_kv_heads, config.head_dim, block_size, **storage)
        self.scheduler = Scheduler(self.blocks, max_running, max_batch_tokens, mode)
        self.drafter: Drafter | None = None
        self.longest_draft = model.config.max_positions
        if draft == "ngram":
            self.drafter = NgramDrafter(self.vocab_size)
        elif draft is not None:
            assert not isinstance(draft, str)
            if tokenizer is not None:
                check_vocabularies(tokenizer.get_vocab(), draft.tokenizer.get_vocab(), str(draft.path))
            self.drafter = ModelDrafter(draft, self.vocab_size, blocks, block_size, **storage)
            self.longest_draft = min(self.longest_draft, draft.config.max_positions)
        self.controller = LengthController(guesses, adaptive)
        self._seeds, self._next = random.Random(seed), 0
        self._requests: dict[int, Request] = {}
        self._stash: list[Output] = []
        self._prompt_tokens = self._generated = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=64)
        self._ttft: deque[float] = deque(maxlen=1024)
        self._inter_token: deque[float] = deque(maxlen=4096)

    # -- asking

    def add_request(self, prompt_tokens: Sequence[int], params: SamplingParams | None = None) -> int:
        """Queue a prompt; its outputs will come out of `step` under the id returned."""
        params = params or SamplingParams()
        params.check(self.vocab_size)
        if params.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer", "sampling", "pass stop_token_ids, or a tokenizer")
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_tokens)
        return self._enqueue(list(prompt_tokens), params, ends, None)

    def add_score(self, prompt_tokens: Sequence[int], choices: Sequence[Sequence[int]]) -> int:
        """Queue the question how likely each of `choices` is after the prompt; one Output with a Score per choice."""
        if not choices or not all(choices):
            raise UsageError("a choice to score has no tokens", "score")
        longest = max(map(len, choices))
        return self._enqueue(
            list(prompt_tokens), SamplingParams(max_tokens=longest), frozenset(), [list(c) for c in choices]
        )

    def _enqueue(
        self, prompt: list[int], params: SamplingParams, ends: frozenset[int], choices: list[list[int]] | None
    ) -> int:
        if not prompt:
            raise UsageError("the prompt has no tokens", how_to_fix="begin with the model's start token")
        if not all(0 <= t < self.vocab_size for t in (*prompt, *(t for c in choices or () for t in c))):
            raise UsageError(f"a token id is outside the vocabulary of {self.vocab_size}")
        length = len(prompt) + params.max_tokens
        if length > self.model.config.max_positions:
            raise UsageError(
                f"{len(prompt)} prompt tokens and {params.max_tokens} more exceed the model's "
                f"{self.model.config.max_positions} positions",
                how_to_fix="shorten the prompt or lower max_tokens",
            )
        self.scheduler.check(length)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        request = Request(self._next, prompt, params, ends, seed, choices)
        self._next += 1
        self._requests[request.id] = request
        text = prompt if choices is None else prompt[:-1]  # a choice runs the last itself
        root = Seq(request, 0, list(text), params, Filter(params, prompt, ends), KeyedChance(seed, 0))
        root.acceptance = self.controller.fresh()
        request.sequences.append(root)
        self.scheduler.add(root)
        if not text:
            self._spread_choices(root)
        self._prompt_tokens += len(prompt)
        return request.id

    def cancel(self, request_id: int) -> None:
        """Drop a request; what it held is free at once. Unknown and finished ids are ignored."""
        request = self._requests.pop(request_id, None)
        for sequence in request.sequences if request else ():
            self.scheduler.remove(sequence)
            self._stash.append(Output(request_id, sequence.child, [], finish_reason="cancelled"))

    def has_work(self) -> bool:
        return bool(self._requests or self._stash)

    # -- running

    def step(self) -> list[Output]:
        """One pass of the model over what the scheduler picked; what became known by it."""
        outputs, self._stash = self._stash, []
        return outputs + self._run()

    def _run(self) -> list[Output]:
        plan = self.scheduler.plan(self._wanted)
        if not plan.chunks:
            assert not self._requests, "requests wait, but none can run"
            return []
        self.cache.copy(plan.copies)
        for chunk in plan.chunks:
            chunk.sequence.chance.at(len(chunk.sequence.tokens))
        guesses = self._propose(plan)
        rows = self._forward(plan, guesses)
        outputs: list[Output] = []
        for chunk, guess, logits in zip(plan.chunks, guesses, rows, strict=True):
            outputs += self._advance(chunk, guess, logits)
        self._recent.append((time.perf_counter(), sum(len(output.tokens) for output in outputs)))
        return outputs

    def _wanted(self, ready: list[Seq]) -> list[int]:
        """How many guesses each decoding sequence should have verified."""
        if self.drafter is None or not ready:
            return [0] * len(ready)
        lengths = self.controller.lengths([s.acceptance for s in ready])
        wanted = []
        for s, length in zip(ready, lengths, strict=True):
            alone = s.request.choices is None and s.params.beam_width == 0 and (s.request.spread or s.params.n == 1)
            end = min(len(s.request.prompt) + s.params.max_tokens, self.longest_draft)
            wanted.append(max(0, min(length, end - len(s.tokens) - 1)) if alone else 0)
        return wanted

    def _propose(self, plan: Plan) -> list[Guess]:
        if self.drafter is None:
            return [Guess() for _ in plan.chunks]
        self.drafter.copy(plan.copies)
        lengths = [chunk.guesses for chunk in plan.chunks]
        if not any(lengths):
            return [Guess() for _ in plan.chunks]
        caught_up = all(len(c.sequence.tokens) - c.sequence.drafted <= 2 for c in plan.chunks if c.guesses)
        started = time.perf_counter()
        guesses = self.drafter.propose([chunk.sequence for chunk in plan.chunks], lengths)
        if caught_up:  # else the time is that of reading a prompt
            self.controller.measured_guess((time.perf_counter() - started) / max(lengths))
        return guesses

    def _forward(self, plan: Plan, guesses: list[Guess]) -> list[Array]:
        """Run the plan; for each chunk the logits [rows, V] that `_needed` says, empty when it needs none."""
        started, tables, new, rows = time.perf_counter(), [], [], []
        for chunk, guess in zip(plan.chunks, guesses, strict=True):
            s, start = chunk.sequence, chunk.sequence.table.length
            tables.append(s.table)
            new.append(s.tokens[start : start + chunk.count] + guess.tokens)
        first = np.cumsum([0, *map(len, new)])
        batch = self.cache.batch(tables, [len(tokens) for tokens in new])
        flat = torch.tensor([token for tokens in new for token in tokens], device=batch.positions.device)
        hidden = self.model.forward(flat, batch.positions.long(), batch, BatchInfo(batch.sequence))
        for i, chunk in enumerate(plan.chunks):
            low, high = _needed(chunk, len(new[i]))
            rows.append(range(first[i] + low, first[i] + high))
        scoring = [chunk.sequence.scored_from is not None for chunk in plan.chunks]
        plain = [row for part, scored in zip(rows, scoring, strict=True) if not scored for row in part]
        logits = self.model.logits(hidden[plain]).cpu().numpy() if plain else np.empty((0, self.vocab_size), np.float32)
        if all(chunk.count == 1 and not scored for chunk, scored in zip(plan.chunks, scoring, strict=True)):
            self.controller.measured_pass(len(flat), time.perf_counter() - started)
        parts, at = [], 0
        for chunk, part, scored in zip(plan.chunks, rows, scoring, strict=True):
            if scored:
                self._score_rows(chunk, hidden[part.start : part.stop])
            parts.append(logits[at : at + len(part) * (not scored)])
            at += len(part) * (not scored)
        return parts

    # -- advancing

    def _advance(self, chunk: Chunk, guess: Guess, logits: Array) -> list[Output]:
        s, request = chunk.sequence, chunk.sequence.request
        if len(logits) == 0:  # a part of a prompt, or a choice being scored
            s.table.length += chunk.count
            self.blocks.publish(s.table, s.tokens)
            if s.pending:
                return []
            return self._finish_score(s) if s.scored_from is not None else self._spread_choices(s)
        if s.params.beam_width:
            return self._advance_beam(s, logits[0])
        if not request.spread and s.params.n > 1:
            s.table.length += chunk.count
            self.blocks.publish(s.table, s.tokens)
            children = [s, *(self._fork(s) for _ in range(1, s.params.n))]
            request.spread = True
            return [output for child in children for output in self._sample(child, Guess(), logits)]
        return self._sample(s, guess, logits)

    def _sample(self, s: Seq, guess: Guess, logits: Array) -> list[Output]:
        """Append what the logits [1 + guesses, V] decide."""
        if s.params.temperature == 0:
            new = _greedy(s.filter, guess.tokens, logits)
        else:
            considered: list[int] = []

            def target(i: int) -> Array:
                if i:
                    s.filter.push(guess.tokens[i - 1])
                    considered.append(guess.tokens[i - 1])
                return s.filter.distribution(logits[i])

            new = verify(guess.tokens, guess.q, target, s.chance)
            s.filter.pop(considered)
        if guess.tokens:
            self.controller.record(s.acceptance, len(guess.tokens), len(new) - 1)
        if s.request.spread or s.params.n == 1:
            self.controller.steps += 1
            self.controller.emitted += len(new)
        output = Output(s.request.id, s.child, [])
        for row, token in zip(logits, new, strict=False):
            self._append(s, token, row, output)
            if output.finish_reason:
                break
        self._settle(s)
        self._clock(s, output)
        if output.finish_reason:
            self._end(s)
        return [output]

    def _append(self, s: Seq, token: int, logits: Array, output: Output) -> None:
        """One token more; sets output.finish_reason when it is the last."""
        s.tokens.append(token)
        s.filter.push(token)
        output.tokens.append(token)
        length = len(s.tokens) - len(s.request.prompt)
        if s.params.logprobs is not None:
            output.logprobs.append(token_logprob(logits, token, s.params.logprobs))
        if token in s.request.ends:
            output.finish_reason = "stop"
        if self.tokenizer is not None:
            stream = s.request.texts.setdefault(s.child, TextStream(self._decode, s.params.stop))
            if not output.finish_reason:
                output.text += stream.push(token, may_stop=length >= s.params.min_tokens)
            if stream.stopped:
                output.finish_reason = "stop"
            elif output.finish_reason or length == s.params.max_tokens:
                output.text += stream.finish()
        if length == s.params.max_tokens and not output.finish_reason:
            output.finish_reason = "length"

    def _settle(self, s: Seq) -> None:
        """All tokens but the last have keys and values now; those of refused guesses are forgotten."""
        s.table.length = len(s.tokens) - 1
        self.blocks.truncate(s.table, s.table.length)
        s.drafted = min(s.drafted, s.table.length)
        self.blocks.publish(s.table, s.tokens)

    def _clock(self, s: Seq, output: Output) -> None:
        now, last = time.perf_counter(), s.request.last.get(s.child)
        self._generated += len(output.tokens)
        if last is not None:
            self._inter_token += [(now - last) / len(output.tokens)] * len(output.tokens)
        elif s.child == 0:
            self._ttft.append(now - s.request.arrived)
        s.request.last[s.child] = now

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _end(self, s: Seq) -> None:
        """Take a sequence out; with the last one its request ends."""
        self.scheduler.remove(s)
        s.request.sequences.remove(s)
        if not s.request.sequences:
            self._requests.pop(s.request.id, None)

    def _fork(self, s: Seq, more: Sequence[int] = ()) -> Seq:
        """A twin of `s` that shares its blocks, has its own chance, and goes on with `more`."""
        request = s.request
        request.children += 1
        chance = KeyedChance(request.seed, request.children)
        twin = Seq(request, request.children, [*s.tokens, *more], s.params, s.filter.fork(), chance)
        twin.table, twin.drafted = self.blocks.fork(s.table), s.drafted
        twin.acceptance = self.controller.fresh()
        for token in more:
            twin.filter.push(token)
        request.sequences.append(twin)
        self.scheduler.add(twin)
        return twin

    def _spread_choices(self, root: Seq) -> list[Output]:
        """The prompt is stored: one fork per choice."""
        request = root.request
        assert request.choices is not None
        for choice in request.choices:
            twin = self._fork(root, [request.prompt[-1], *choice])
            twin.scored_from = len(request.prompt)
            request.scores[twin.child] = Score()
        self._end(root)
        return []

    def _score_rows(self, chunk: Chunk, hidden: torch.Tensor) -> None:
        """Log-probabilities of the tokens that follow the rows `hidden`, LOGIT_ROWS at a time."""
        s, score = chunk.sequence, chunk.sequence.request.scores[chunk.sequence.child]
        assert s.scored_from is not None
        for part in hidden.split(LOGIT_ROWS):
            for row in self.model.logits(part).cpu().numpy() if len(part) else ():
                token = s.tokens[s.scored_from + len(score.logprobs)]
                score.logprobs.append(float(log_softmax(row)[token]))
                score.greedy &= int(np.argmax(row)) == token

    def _finish_score(self, s: Seq) -> list[Output]:
        request = s.request
        self._end(s)
        output = Output(request.id, s.child - 1, [], finish_reason="stop", score=request.scores[s.child])
        return [output]

    def _advance_beam(self, s: Seq, logits: Array) -> list[Output]:
        """Park a beam whose continuations are known; once all are, fork the best and drop the others."""
        request = s.request
        s.table.length = len(s.tokens)
        self.blocks.publish(s.table, s.tokens)
        if request.beams is None:
            request.beams = BeamSearch(s.params, len(request.prompt), request.ends)
            request.beams.live[s] = 0.0
        s.parked = True
        if not request.beams.offer(s, logits):
            return []
        parents, survivors = list(request.sequences), request.beams.select()
        request.beams.live = {self._fork(parent, [token]): total for parent, token, total in survivors}
        for parent in parents:
            self._end(parent)
        return [] if survivors else [self._beam_output(request, i) for i in range(s.params.n)]

    def _beam_output(self, request: Request, i: int) -> Output:
        assert request.beams is not None
        hypothesis: Hypothesis = request.beams.done[i]
        tokens = hypothesis.tokens[: -1 if hypothesis.reason == "stop" else None]
        self._generated += len(hypothesis.tokens)
        text = self._decode(tokens) if self.tokenizer is not None else ""
        return Output(request.id, i, hypothesis.tokens, text, [], hypothesis.reason, hypothesis.score)

    # -- whole requests

    def _until_done(self, ids: set[int]) -> Iterator[Output]:
        """Outputs of some requests until they end; those of others are kept for `step`."""
        while ids & self._requests.keys():
            for output in self._run():
                if output.request_id in ids:
                    yield output
                else:
                    self._stash.append(output)

    def encode(self, prompt: "str | Sequence[int]") -> list[int]:
        """Tokens of a text, special ones as the tokenizer adds them."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise UsageError("a text prompt needs a tokenizer", how_to_fix="pass tokens")
        return list(self.tokenizer.encode(prompt))

    def generate(
        self,
        prompts: "Sequence[str | Sequence[int]]",
        params: "SamplingParams | Sequence[SamplingParams] | None" = None,
    ) -> list[list[Completion]]:
        """For each prompt its n completions."""
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        ids = [self.add_request(self.encode(prompt), p) for prompt, p in zip(prompts, each, strict=True)]
        results = {i: [Completion() for _ in range(p.n)] for i, p in zip(ids, each, strict=True)}
        for output in self._until_done(set(ids)):
            results[output.request_id][output.index].add(output)
        return [results[i] for i in ids]

    def stream(self, prompt: "str | Sequence[int]", params: SamplingParams | None = None) -> Iterator[Output]:
        """Outputs of one prompt as they come; closing the iterator cancels the request."""
        request_id = self.add_request(self.encode(prompt), params)
        try:
            yield from self._until_done({request_id})
        finally:
            if request_id in self._requests:
                self.cancel(request_id)

    def score(self, prompt: "str | Sequence[int]", choices: "Sequence[str | Sequence[int]]") -> list[Score]:
        """How likely each choice is after the prompt, which is run once (and may come from the prefix cache).

        Log-probabilities are always computed, never cached. Text choices are tokenised without special tokens.
        """
        if any(isinstance(choice, str) for choice in choices) and self.tokenizer is None:
            raise UsageError("a text choice needs a tokenizer", how_to_fix="pass tokens")
        tokens = [
            self.tokenizer.encode(c, add_special_tokens=False) if isinstance(c, str) else list(c) for c in choices
        ]
        scores: dict[int, Score] = {}
        for output in self._until_done({self.add_score(self.encode(prompt), tokens)}):
            assert isinstance(output.score, Score)
            scores[output.index] = output.score
        return [scores[i] for i in range(len(choices))]

    def stats(self) -> Stats:
        scheduler, controller = self.scheduler, self.controller
        span = self._recent[-1][0] - self._recent[0][0] if len(self._recent) > 1 else 0.0
        return Stats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            blocks_used=self.blocks.num_blocks - self.blocks.free,
            blocks_total=self.blocks.num_blocks,
            cache_hit_rate=scheduler.hit_tokens / max(scheduler.asked_tokens, 1),
            preemptions=scheduler.preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            tokens_per_second=sum(n for _, n in list(self._recent)[1:]) / span if span else 0.0,
            ttft=list(self._ttft),
            inter_token=list(self._inter_token),
            acceptance=controller.kept / controller.guessed if controller.guessed else None,
            tokens_per_step=controller.emitted / controller.steps if self.drafter and controller.steps else None,
        )


def _needed(chunk: Chunk, rows: int) -> tuple[int, int]:
    """Which of a chunk's rows [low, high) must become logits: the last and the guesses', or those that score tokens."""
    s, end = chunk.sequence, chunk.sequence.table.length + chunk.count
    if s.scored_from is not None:
        known = s.scored_from + len(s.request.scores[s.child].logprobs)
        low = max(0, known - 1 - s.table.length)
        return low, max(low, chunk.count - (end == len(s.tokens)))
    if s.request.choices is not None or end < len(s.tokens):
        return 0, 0
    return chunk.count - 1, rows


def _greedy(filter: Filter, guesses: list[int], logits: Array) -> list[int]:
    """The greedy tokens: as many as the guesses foresaw, and one more."""
    new: list[int] = []
    for row, guess in zip(logits, [*guesses, None], strict=True):
        new.append(filter.best(row))
        filter.push(new[-1])
        if new[-1] != guess:
            break
    filter.pop(new)
    return new
