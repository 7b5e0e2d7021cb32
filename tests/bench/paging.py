"""What paging and continuous batching are worth: python tests/bench/paging.py [--model DIR] [--requests N]

1. Memory: 1,500 requests of lognormal lengths on the real allocator with a budget of 65,536 tokens, in blocks of 16,
   next to a server that reserves the longest possible text for each request. Nothing is computed.
2. Throughput: requests of mixed lengths really run on a model: batch after batch, where all compute until the longest
   has ended (static batching as frameworks do it) or where finished ones cost nothing (ragged); or continuously.
Exits with 1 when waste is 4% or more, concurrency under 3.5 times, or throughput under 2 times the static one.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from runtime.bench import rectangular
from runtime.blocks import BlockManager, BlockTable
from runtime.engine import Engine
from runtime.model import load_model
from runtime.sampling import SamplingParams

BUDGET, LONGEST, REQUESTS = 65536, 2048, 1500
QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart/model"


def lengths(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and output tokens of each request, lognormal, together at most LONGEST."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(5.0, 0.9, REQUESTS), 4, LONGEST // 2).astype(int)
    outputs = np.clip(rng.lognormal(5.0, 0.8, REQUESTS), 4, LONGEST // 2).astype(int)
    return prompts, outputs


def paged(block_size: int = 16) -> tuple[float, float, int]:
    """One token per running request and step, first come first served, the youngest preempted when blocks run out.

    Returns (mean share of the taken memory that holds no token, mean requests running, preemptions).
    """
    prompts, outputs = lengths()
    blocks = BlockManager(BUDGET // block_size, block_size, prefix_cache=False)
    waiting, running, made = list(range(REQUESTS)), [], [0] * REQUESTS
    tables = [BlockTable() for _ in range(REQUESTS)]
    waste, concurrency, preemptions = [], [], 0
    while waiting or running:
        while waiting and blocks.needed(tables[waiting[0]], prompts[waiting[0]] + made[waiting[0]] + 1) <= blocks.free:
            i = waiting.pop(0)
            blocks.reserve(tables[i], int(prompts[i] + made[i]))
            tables[i].length = int(prompts[i] + made[i])
            running.append(i)
        for i in list(running):
            while i in running and blocks.reserve(tables[i], tables[i].length + 1) is None:
                youngest = max(running)
                blocks.release(tables[youngest])
                running.remove(youngest)
                waiting.insert(0, youngest)
                preemptions += 1
            if i in running:
                tables[i].length += 1
                made[i] += 1
        stored = sum(tables[i].length for i in running)
        waste.append(1 - stored / ((blocks.num_blocks - blocks.free) * block_size))
        concurrency.append(len(running))
        for i in [i for i in running if made[i] >= outputs[i]]:
            blocks.release(tables[i])
            running.remove(i)
    assert blocks.free == blocks.num_blocks and made == outputs.tolist()
    return float(np.mean(waste)), float(np.mean(concurrency)), preemptions


def reserved() -> tuple[float, float]:
    """The same with LONGEST tokens set aside for each request: (waste, mean requests running)."""
    prompts, outputs = lengths()
    waiting, running, made = list(range(REQUESTS)), [], [0] * REQUESTS
    waste, concurrency = [], []
    while waiting or running:
        while waiting and len(running) < BUDGET // LONGEST:
            running.append(waiting.pop(0))
        for i in running:
            made[i] += 1
        stored = sum(int(prompts[i]) + made[i] for i in running)
        waste.append(1 - stored / (len(running) * LONGEST))
        concurrency.append(len(running))
        running = [i for i in running if made[i] < outputs[i]]
    return float(np.mean(waste)), float(np.mean(concurrency))


def throughput(model: Path, kernel: str, requests: int, running: int = 16) -> dict[str, tuple[float, int]]:
    """Tokens per second and steps of both modes, outputs of 2 to 256 tokens; medians of three alternating runs."""
    loaded = load_model(model, kernel=kernel)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, loaded.config.vocab_size, int(n)).tolist() for n in rng.integers(4, 24, requests)]
    wanted = np.clip(rng.lognormal(2.6, 1.3, requests), 2, 256).astype(int)
    params = [SamplingParams(max_tokens=int(n), temperature=0, ignore_eos=True) for n in wanted]
    seconds: dict[str, list[float]] = {"static": [], "ragged": [], "continuous": []}
    steps: dict[str, int] = {}
    results: dict[str, list[list[int]]] = {}
    for repetition in range(4):
        for mode in seconds:
            batching = "continuous" if mode == "continuous" else "static"
            engine = Engine(loaded, mode=batching, max_running=running, prefix_cache=False)  # type: ignore[arg-type]
            started = time.perf_counter()
            for prompt, p in zip(prompts, rectangular(params, running) if mode == "static" else params, strict=True):
                engine.add_request(prompt, p)
            steps[mode], made = 0, [[] for _ in prompts]
            while engine.has_work():
                for output in engine.step():
                    made[output.request_id] += output.tokens
                steps[mode] += 1
            results[mode] = [tokens[:n] for tokens, n in zip(made, wanted, strict=True)]
            seconds[mode] += [time.perf_counter() - started] * (repetition > 0)  # the first warms up
    assert results["static"] == results["ragged"] == results["continuous"], "batching changed a result"
    return {mode: (float(wanted.sum() / np.median(times)), steps[mode]) for mode, times in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=QUICKSTART)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--kernel", default="auto")
    arguments = parser.parse_args()
    waste, concurrency, preemptions = paged()
    wide, _, _ = paged(256)
    theirs, fixed = reserved()
    print(f"{REQUESTS} requests, {BUDGET} tokens of memory, texts up to {LONGEST} tokens")
    print(f"  paged, blocks of 16    waste {100 * waste:5.2f} %   running {concurrency:6.1f}   preempted {preemptions}")
    print(f"  paged, blocks of 256   waste {100 * wide:5.2f} %")
    print(f"  reserve-max            waste {100 * theirs:5.2f} %   running {fixed:6.1f}")
    print(f"  concurrency: {concurrency / fixed:.2f} times")
    rates = throughput(arguments.model, arguments.kernel, arguments.requests)
    gain = rates["continuous"][0] / rates["static"][0]
    for mode, (rate, steps) in rates.items():
        print(f"  {mode:<12} {rate:8.1f} tokens/s in {steps} steps")
    print(f"  continuous batching: {gain:.2f} times the throughput")
    good = waste < 0.04 and concurrency >= 3.5 * fixed and gain >= 2
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
