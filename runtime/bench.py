"""How fast, with how much memory: a model at several batch sizes, all techniques side by side, a draft's worth."""

import random
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from formats.errors import UsageError
from runtime.blocks import BlockManager, BlockTable, KVCache
from runtime.engine import Engine
from runtime.generate import guessing, load_draft, load_rounded
from runtime.model import BatchInfo, Model, load_model
from runtime.sampling import SamplingParams
from runtime.speculative import LengthController

Progress = Callable[[str], None]


def _quiet(line: str) -> None:
    pass


def weight_bytes(model: Model) -> int:
    return sum(linear.kernel.nbytes() for linear in model.linears())


def peak_rss_mb() -> float:
    """The most memory this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def random_prompts(model: Model, count: int, length: int, seed: int = 0) -> list[list[int]]:
    r = random.Random(seed)
    return [[r.randrange(model.config.vocab_size) for _ in range(length)] for _ in range(count)]


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def measure(
    model: Model, batch: int, prompt: int, generate: int, repetitions: int = 3, **options: Any
) -> dict[str, Any]:
    """One batch size: mean and deviation over repetitions, after a warm-up. Random prompts, greedy, nothing cached.

    Returns `batch prefill_tps prefill_sd decode_tps decode_sd ttft_ms inter_token_p50_ms inter_token_p95_ms`.
    """
    if prompt + generate > model.config.max_positions:
        raise UsageError(
            f"{prompt} + {generate} tokens exceed the model's {model.config.max_positions} positions",
            "bench",
            "lower --prompt or --generate",
        )
    params = SamplingParams(max_tokens=generate, temperature=0, ignore_eos=True)
    engine = Engine(model, kv_tokens=batch * (prompt + generate + 16), prefix_cache=False, max_running=batch, **options)
    engine.generate(random_prompts(model, batch, min(prompt, 32), 1), SamplingParams(max_tokens=4, temperature=0))
    prefill, decode, first, between = [], [], [], []
    for repetition in range(repetitions):
        for tokens in random_prompts(model, batch, prompt, 2 + repetition):
            engine.add_request(tokens, params)
        times, seen = [time.perf_counter()], set[int]()
        while len(seen) < batch:
            seen |= {output.request_id for output in engine.step()}
        times.append(time.perf_counter())
        early = engine.stats().generated_tokens
        while engine.has_work():
            engine.step()
            times.append(time.perf_counter())
        made, stats = engine.stats().generated_tokens - early, engine.stats()
        prefill.append(batch * prompt / (times[1] - times[0]))
        first += stats.ttft[-batch:]
        if made:
            decode.append(made / (times[-1] - times[1]))
            between += stats.inter_token[-made:]
    between.sort()
    return {
        "batch": batch,
        "prefill_tps": round(statistics.mean(prefill), 1),
        "prefill_sd": round(_deviation(prefill), 1),
        "decode_tps": round(statistics.mean(decode), 1) if decode else 0.0,
        "decode_sd": round(_deviation(decode), 1),
        "ttft_ms": round(1000 * statistics.median(first), 2),
        "inter_token_p50_ms": round(1000 * between[len(between) // 2], 3) if between else 0.0,
        "inter_token_p95_ms": round(1000 * between[len(between) * 95 // 100], 3) if between else 0.0,
    }


def bench(
    path: str | Path,
    prompt: int = 512,
    generate: int = 64,
    batches: Sequence[int] = (1,),
    repetitions: int = 3,
    kv_dtype: str = "float32",
    kernel: str = "fast",
    device: str = "cpu",
    progress: Progress = _quiet,
) -> dict[str, Any]:
    """`measure` for each batch size. The first one's figures are on top, beside `peak_rss_mb weights_mb kernel`."""
    if not batches or min(batches) < 1:
        raise UsageError("batch sizes must be at least 1", "bench")
    model = load_model(path, kernel=kernel, device=device)
    rows = []
    for batch in batches:
        progress(f"batch {batch}")
        rows.append(measure(model, batch, prompt, generate, repetitions, kv_dtype=kv_dtype))
    top = {key: value for key, value in rows[0].items() if key != "batch"}
    memory = {"peak_rss_mb": round(peak_rss_mb(), 1), "weights_mb": round(weight_bytes(model) / 1e6, 2)}
    return top | memory | {"kernel": model.kernel, "prompt": prompt, "generate": generate, "batches": rows}


@dataclass
class Rung:
    """One technique on the common workload. memory_mb: packed weights and the most keys and values held at once."""

    technique: str
    seconds: float
    tokens_per_second: float
    memory_mb: float
    speedup: float


def mixed_requests(
    model: Model, count: int, longest: int, seed: int = 0
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of lognormal output lengths up to `longest`, with prompts of a quarter of it that repeat a motif."""
    r, width = random.Random(seed), max(4, longest // 4)
    prompts, params = [], []
    for _ in range(count):
        motif = [r.randrange(model.config.vocab_size) for _ in range(width // 2)]
        prompts.append((motif * 2)[:width])
        length = min(longest, max(2, round(r.lognormvariate(0, 0.9) * longest / 5)))
        params.append(SamplingParams(max_tokens=length, temperature=0, ignore_eos=True))
    return prompts, params


def rectangular(params: Sequence[SamplingParams], width: int) -> list[SamplingParams]:
    """What static batching computes: in each batch of `width` requests, all run as long as the longest."""
    longest = [max(p.max_tokens for p in params[i - i % width :][:width]) for i in range(len(params))]
    return [replace(p, max_tokens=n) for p, n in zip(params, longest, strict=True)]


def compare(
    path: str | Path,
    requests: int = 16,
    longest: int = 128,
    draft: str = "ngram",
    kernel: str = "fast",
    device: str = "cpu",
    progress: Progress = _quiet,
) -> list[Rung]:
    """The same requests through every technique: each row changes what its name says against the rows before it.

    All but the batches run one request at a time; the batches a quarter of them at once, the static one as a rectangle.
    """
    load: dict[str, Any] = dict(kernel=kernel, device=device)
    model = load_model(path, **load)
    prompts, params = mixed_requests(model, requests, longest)
    whole = -(-(longest + len(prompts[0])) // 16) * 16
    total, running = sum(p.max_tokens for p in params), max(2, requests // 4)
    rungs: list[Rung] = []
    progress(f"{model.kernel} kernels")

    def add(name: str, work: Callable[[], float]) -> None:
        """work() does all requests and says how many bytes it held."""
        progress(name)
        started = time.perf_counter()
        held = work()
        seconds = time.perf_counter() - started
        slowest = rungs[0].seconds if rungs else seconds
        rungs.append(Rung(name, seconds, round(total / seconds, 1), round(held / 1e6, 3), round(slowest / seconds, 2)))

    def served(loaded: Model, **options: Any) -> Callable[[], float]:
        guesser = load_draft(path, options.pop("draft", None), **load)
        settings = dict(kv_tokens=whole * options.get("max_running", 1), prefix_cache=False, max_running=1) | options
        Engine(loaded, draft=guesser, **settings).generate(prompts[:1], SamplingParams(max_tokens=2))
        engine = Engine(loaded, draft=guesser, **settings)
        wanted = rectangular(params, running) if options.get("mode") == "static" else params
        return lambda: _drain(engine, prompts, wanted) + weight_bytes(loaded)

    add("no cache", lambda: _without_cache(model, prompts, params) + weight_bytes(model))
    add("KV cache", served(model, block_size=whole))
    add("paged", served(model))
    add("8-bit KV", served(model, kv_dtype="int8"))
    for name, grid in (("8-bit", "q8_0"), ("4-bit", "q4_0")):
        add(name, served(load_rounded(path, grid, **load)))
    add("static batch", served(model, max_running=running, mode="static"))
    add("continuous batch", served(model, max_running=running))
    add("speculative", served(model, draft=draft))
    return [replace(rung, seconds=round(rung.seconds, 3)) for rung in rungs]


def _without_cache(model: Model, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Every token runs its whole text again."""
    config = model.config
    for prompt, p in zip(prompts, params, strict=True):
        tokens = list(prompt)
        for _ in range(p.max_tokens):
            blocks, table = BlockManager(-(-len(tokens) // 16)), BlockTable()
            blocks.reserve(table, len(tokens))
            cache = KVCache(config.n_layers, blocks.num_blocks, config.n_kv_heads, config.head_dim, device=model.device)
            batch = cache.batch([table], [len(tokens)])
            flat = torch.tensor(tokens, device=batch.positions.device)
            hidden = model.forward(flat, batch.positions.long(), batch, BatchInfo(batch.sequence))
            tokens.append(int(model.logits(hidden[-1:])[0].argmax()))
    return 0.0


def _drain(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Run all requests; the most bytes of keys and values (and of a draft) held at once."""
    for prompt, p in zip(prompts, params, strict=True):
        engine.add_request(prompt, p)
    used = 0
    while engine.has_work():
        engine.step()
        used = max(used, engine.blocks.num_blocks - engine.blocks.free)
    held = engine.cache.nbytes() * used / engine.blocks.num_blocks
    return held + (engine.drafter.nbytes() if engine.drafter else 0)


def weigh_draft(
    path: str | Path,
    draft: str,
    texts: Sequence[str],
    generate: int = 128,
    temperature: float = 0.0,
    kernel: str = "fast",
    device: str = "cpu",
    progress: Progress = _quiet,
) -> dict[str, Any]:
    """Is guessing with `draft` worth it? First a short probe and its forecast, then plain and speculative runs.

    Returns `forecast` (expected speed-up), `worth_it`, `acceptance tokens_per_step speedup plain_tps speculative_tps
    identical` (greedy only, else None), `kernel` and memory of both in MB. The plain and speculative runs alternate.
    """
    load: dict[str, Any] = dict(kernel=kernel, device=device)
    model, guesser = load_model(path, **load), load_draft(path, draft, **load)
    prompts = [model.tokenizer.encode(text) for text in texts]
    room = max(map(len, prompts)) + generate + 16
    params = SamplingParams(max_tokens=generate, temperature=temperature, ignore_eos=True, seed=0)

    def engine(**options: Any) -> Engine:
        return Engine(model, model.tokenizer, kv_tokens=room, max_running=1, prefix_cache=False, **options)

    forecast = _forecast(engine, guesser, prompts[0], params)
    verdict = "worth it" if forecast > 1.05 else "not worth it"
    progress(f"forecast: {forecast:.2f} times as fast, {verdict}")
    seconds, tokens = {"plain": 0.0, "speculative": 0.0}, {}
    engines = {"plain": engine(), "speculative": engine(draft=guesser)}
    for repetition in range(3):  # the first is a warm-up
        for name, e in engines.items():
            started = time.perf_counter()
            tokens[name] = [c[0].tokens for c in e.generate(prompts, params)]
            seconds[name] += (time.perf_counter() - started) * (repetition > 0)
    drafter, made = engines["speculative"].drafter, 2 * generate * len(prompts)
    assert drafter is not None
    return {
        "forecast": round(forecast, 3),
        "worth_it": forecast > 1.05,
        **guessing(engines["speculative"]),
        "speedup": round(seconds["plain"] / seconds["speculative"], 3),
        "plain_tps": round(made / seconds["plain"], 1),
        "speculative_tps": round(made / seconds["speculative"], 1),
        "identical": tokens["plain"] == tokens["speculative"] if temperature == 0 else None,
        "kernel": model.kernel,
        "target_mb": round((weight_bytes(model) + engines["plain"].cache.nbytes()) / 1e6, 2),
        "draft_mb": round(drafter.nbytes() / 1e6, 2),
    }


def _forecast(engine: Callable[..., Engine], guesser: Any, prompt: list[int], params: SamplingParams) -> float:
    """Expected speed-up, by the measured cost of passes and guesses and the acceptance of the first few guesses."""
    controller = LengthController(adaptive=False)
    for guesses in (0, 1, 2, 4, 6):
        controller.longest = guesses
        probe = engine(draft=guesser)
        probe.controller = controller
        probe.generate([prompt], replace(params, max_tokens=min(24, params.max_tokens)))
    speeds = [controller.speed([controller.acceptance.rate], 1, guesses) for guesses in range(7)]
    return max(speeds) / speeds[0]
