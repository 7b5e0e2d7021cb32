"""The engine: results that depend on nothing but the request, under every load; scoring, beams, stops, streams."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_model import ToyModel

from formats.errors import ResourceError, UsageError
from runtime.engine import Engine
from runtime.sampling import SamplingParams as Params

MODEL = ToyModel()


class Letters:
    """A tokenizer of 29 tokens, several letters long, two of which are halves of one character."""

    eos_token_id = 0
    words = [b"", b"ab", b"c", b" the", b"\xe2\x82", b"\xac", *(bytes([i]) * (1 + i % 2) for i in range(100, 123))]

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.words[t] for t in tokens).decode(errors="replace")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [self.words.index(text.encode())]

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(29)}


def random_requests(count: int, seed: int = 0) -> tuple[list[list[int]], list[Params]]:
    r = random.Random(seed)
    shared = [r.randrange(29) for _ in range(40)]
    prompts = [
        shared[: r.choice([0, 16, 33, 40])] + [r.randrange(29) for _ in range(r.randrange(1, 30))] for _ in range(count)
    ]
    return prompts, [
        Params(max_tokens=r.randrange(1, 40), temperature=r.choice([0, 0.9]), top_p=0.95, seed=i, n=r.choice([1, 1, 3]))
        for i in range(count)
    ]


def tokens_of(results: Any) -> list[list[list[int]]]:
    return [[c.tokens for c in completions] for completions in results]


def test_hundreds_of_requests_in_a_tiny_pool_get_what_they_get_alone() -> None:
    prompts, params = random_requests(300)
    crowded = Engine(MODEL, kv_tokens=16 * 16, max_running=24, max_batch_tokens=64)
    alone = Engine(MODEL, max_running=1, max_batch_tokens=512, prefix_cache=False)
    together = crowded.generate(prompts, params)
    assert tokens_of(together) == [tokens_of(alone.generate([q], p))[0] for q, p in zip(prompts, params, strict=True)]
    stats = crowded.stats()
    assert stats.preemptions > 50 and stats.cache_hit_rate > 0.1
    assert stats.blocks_used == stats.running == stats.waiting == 0
    assert stats.generated_tokens == sum(len(c.tokens) for completions in together for c in completions)
    assert [len(c.tokens) for completions in together for c in completions] == [
        p.max_tokens for p in params for _ in range(p.n)
    ]


def logprobs(engine: Engine, prompts: list[list[int]], count: int = 12) -> list[Any]:
    params = Params(max_tokens=count, temperature=0, logprobs=3)
    return [c[0].logprobs for c in engine.generate(prompts, params)]


@pytest.mark.parametrize(
    "setting",
    [dict(max_running=1), dict(max_batch_tokens=3), dict(max_batch_tokens=17, max_running=5), dict(prefix_cache=False),
     dict(block_size=4), dict(mode="static", max_running=3), dict(kv_tokens=160)],
)  # fmt: skip
def test_logits_have_the_same_bits_however_they_are_computed(setting: dict[str, Any]) -> None:
    prompts, _ = random_requests(12, seed=1)
    expected = logprobs(Engine(MODEL), prompts)
    engine = Engine(MODEL, **setting)
    assert logprobs(engine, prompts) == expected
    assert logprobs(engine, prompts) == expected  # now with prefixes from the cache


def test_the_prefix_cache_saves_work() -> None:
    model, prompt = ToyModel(), list(range(20)) * 3
    engine = Engine(model)
    engine.generate([prompt], Params(max_tokens=1))
    first = sum(model.calls)
    engine.generate([prompt], Params(max_tokens=1))
    assert (first, sum(model.calls) - first) == (60, 12)


def test_scores_are_the_log_probabilities_and_never_stale() -> None:
    prompt, choices = [3, 1, 4, 1, 5] * 8, [[9, 2], [6], [5, 3, 5]]
    engine = Engine(MODEL, max_batch_tokens=16)
    expected = []
    for choice in choices:
        rows = MODEL.alone(prompt + choice).double().log_softmax(-1)
        expected.append([rows[len(prompt) - 1 + i, token].item() for i, token in enumerate(choice)])
    first = engine.score(prompt, choices)
    for score, values in zip(first, expected, strict=True):
        assert score.logprobs == pytest.approx(values, abs=1e-9)
    engine.generate([prompt + choices[2]], Params(max_tokens=8))  # everything is cached now
    assert engine.score(prompt, choices) == first
    whole = engine.score(prompt[:1], [prompt[1:]])[0]
    rows = MODEL.alone(prompt).double().log_softmax(-1)
    assert whole.logprobs == pytest.approx([rows[i, t].item() for i, t in enumerate(prompt[1:])], abs=1e-9)
    assert engine.score(prompt[:1], [prompt[1:]])[0] == whole
    best = MODEL.greedy(prompt, 3)
    assert [s.greedy for s in engine.score(prompt, [best, best[:1], [(best[0] + 1) % 29]])] == [True, True, False]
    assert engine.blocks.free == engine.blocks.num_blocks


def test_scoring_survives_preemption() -> None:
    prompt = [2, 7, 1, 8] * 9
    choices = [[i] * 20 for i in range(12)]
    engine = Engine(MODEL, kv_tokens=16 * 5, max_batch_tokens=24)
    assert engine.score(prompt, choices) == Engine(MODEL).score(prompt, choices)
    assert engine.stats().preemptions > 0


def test_children_differ_and_do_not_depend_on_their_number() -> None:
    prompt = [1, 2, 3]
    many, few = (Engine(MODEL).generate([prompt], Params(max_tokens=24, seed=7, n=n))[0] for n in (8, 3))
    assert len({tuple(c.tokens) for c in many}) == 8
    assert [c.tokens for c in few] == [c.tokens for c in many[:3]]
    other = Engine(MODEL).generate([prompt], Params(max_tokens=24, seed=8))[0]
    assert other[0].tokens != many[0].tokens


def test_unseeded_requests_differ_unless_the_engine_has_a_seed() -> None:
    runs = [tokens_of(Engine(MODEL, seed=s).generate([[1, 2]] * 2, Params(max_tokens=24))) for s in (1, 1, 2, None)]
    assert runs[0] == runs[1] and len({str(r) for run in runs[1:] for r in run}) == 6


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_wide_beam_search_finds_what_brute_force_finds(penalty: float) -> None:
    model, prompt, length = ToyModel(vocab=5, sharpness=3.0), [1, 2, 3], 3
    scored = []
    for text in itertools.chain.from_iterable(itertools.product(range(5), repeat=n) for n in (1, 2, 3)):
        if 0 in text[:-1] or (len(text) < length and text[-1] != 0):
            continue  # token 0 ends a text, and only it or the limit does
        rows = model.alone([*prompt, *text]).double().log_softmax(-1)
        total = sum(rows[len(prompt) - 1 + i, t].item() for i, t in enumerate(text))
        scored.append((total / len(text) ** penalty, list(text)))
    scored.sort(reverse=True)
    for kv_tokens in (4096, 16 * 6):  # the small pool makes beams give way to each other
        engine = Engine(model, end_tokens=[0], kv_tokens=kv_tokens, block_size=4)
        found = engine.generate([prompt], Params(max_tokens=length, beam_width=25, n=6, length_penalty=penalty))[0]
        assert [c.tokens for c in found] == [text for _, text in scored[:6]]
        assert [c.score for c in found] == pytest.approx([score for score, _ in scored[:6]], abs=1e-6)
        assert engine.blocks.free == engine.blocks.num_blocks


def test_a_narrow_beam_is_at_least_as_good_as_greedy() -> None:
    engine, prompt = Engine(MODEL), [4, 4, 2]
    greedy = sum(engine.score(prompt, [MODEL.greedy(prompt, 10)])[0].logprobs)
    (beam,) = engine.generate([prompt], Params(max_tokens=10, beam_width=4, length_penalty=0))[0]
    assert beam.score is not None and float(beam.score) >= greedy - 1e-6  # type: ignore[arg-type]
    assert engine.score(prompt, [beam.tokens])[0].total == pytest.approx(beam.score, abs=1e-6)


def test_ends_stops_and_limits() -> None:
    prompt = [5, 6]
    free = MODEL.greedy(prompt, 20)
    end = free[6]
    first = free.index(end)
    engine = Engine(MODEL, end_tokens=[end])

    def run(**params: Any) -> Any:
        return engine.generate([prompt], Params(**dict(temperature=0, max_tokens=20) | params))[0][0]

    assert (run().tokens, run().finish_reason) == (free[: first + 1], "stop")
    assert (run(ignore_eos=True).tokens, run(ignore_eos=True).finish_reason) == (free, "length")
    late = run(min_tokens=first + 1, max_tokens=first + 1)
    assert late.finish_reason == "length" and end not in late.tokens
    assert run(stop_token_ids=[free[1]]).tokens == free[: free.index(free[1]) + 1]


def test_stop_strings_across_tokens_are_never_shown() -> None:
    engine = Engine(MODEL, tokenizer=Letters(), end_tokens=[])
    params = dict(temperature=0.9, seed=3, max_tokens=30, ignore_eos=True)
    whole = engine.generate([[7, 8]], Params(**params))[0][0]  # type: ignore[arg-type]
    assert whole.text == Letters().decode(whole.tokens)
    stop = whole.text[9:13]
    pieces = list(engine.stream([7, 8], Params(**params, stop=("never there", stop))))  # type: ignore[arg-type]
    text = "".join(piece.text for piece in pieces)
    assert text == whole.text[: whole.text.index(stop)] and pieces[-1].finish_reason == "stop"
    shown = ""
    for piece in pieces:
        shown += piece.text
        assert text.startswith(shown)
    assert sum(len(piece.tokens) for piece in pieces) < 30


def test_cancelling_frees_at_once_and_disturbs_nobody() -> None:
    engine = Engine(MODEL, kv_tokens=640)
    keep, drop = (engine.add_request([1, 2, i], Params(max_tokens=30, temperature=0, n=2)) for i in (3, 4))
    outputs = [o for _ in range(6) for o in engine.step()]
    engine.cancel(drop)
    engine.cancel(drop)
    engine.cancel(999)
    while engine.has_work():
        outputs += engine.step()
    of = {i: [o for o in outputs if o.request_id == i] for i in (keep, drop)}
    assert {o.finish_reason for o in of[drop] if o.finish_reason} == {"cancelled"}
    for child in (0, 1):
        assert [t for o in of[keep] if o.index == child for t in o.tokens] == MODEL.greedy([1, 2, 3], 30)
    assert engine.blocks.free == engine.blocks.num_blocks


def test_an_abandoned_stream_is_cancelled_and_others_keep_their_outputs() -> None:
    engine = Engine(MODEL)
    other = engine.add_request([1, 2, 3], Params(max_tokens=9, temperature=0))
    stream = engine.stream([4, 5], Params(max_tokens=50))
    for _ in range(4):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert [t for o in outputs if o.request_id == other for t in o.tokens] == MODEL.greedy([1, 2, 3], 9)


def test_mistakes_are_explained() -> None:
    engine = Engine(MODEL, kv_tokens=64)
    for wrong, message in (
        (lambda: engine.add_request([]), "no tokens"),
        (lambda: engine.add_request([29]), "outside the vocabulary"),
        (lambda: engine.add_request([1] * 5000), "positions"),
        (lambda: engine.add_request([1], Params(stop=("x",))), "tokenizer"),
        (lambda: engine.score([1], [[]]), "no tokens"),
        (lambda: engine.generate(["text"]), "tokenizer"),
    ):
        with pytest.raises(UsageError, match=message):
            wrong()
    with pytest.raises(ResourceError, match="does not fit"):
        engine.add_request([1] * 60, Params(max_tokens=5))
    assert not engine.has_work()


def test_statistics() -> None:
    engine = Engine(MODEL)
    engine.add_request([1] * 20, Params(max_tokens=5))
    engine.step()
    assert (engine.stats().running, engine.stats().blocks_used, engine.stats().prompt_tokens) == (1, 2, 20)
    while engine.has_work():
        engine.step()
    stats = engine.stats()
    assert len(stats.ttft) == 1 and len(stats.inter_token) == 4 and stats.generated_tokens == 5
    assert stats.tokens_per_second > 0 and stats.acceptance is None


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_a_real_model_agrees_with_transformers_and_with_itself(family: str, tiny_model: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    from runtime.model import load_model

    path = tiny_model(family)
    theirs, ours = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), load_model(path, kernel="cpu")
    prompts = [[5, 9, 17, 250], list(range(3, 60)), [8] * 20]
    engine = Engine(ours, max_batch_tokens=32)
    for prompt, (completion,) in zip(
        prompts, engine.generate(prompts, Params(max_tokens=8, temperature=0)), strict=True
    ):
        rows = theirs(torch.tensor([[*prompt, *completion.tokens]])).logits[0].double().log_softmax(-1)
        score = engine.score(prompt, [completion.tokens])[0]
        expected = [rows[len(prompt) - 1 + i, t].item() for i, t in enumerate(completion.tokens)]
        assert score.greedy and score.logprobs == pytest.approx(expected, abs=1e-3)
    exact = logprobs(Engine(ours, max_running=1, prefix_cache=False), prompts)
    assert logprobs(engine, prompts) == exact and logprobs(Engine(ours, max_batch_tokens=7), prompts) == exact
