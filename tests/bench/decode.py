"""Decode and prefill speed, ours next to llama.cpp and transformers on the same GGUF file, in alternating runs.

    python tests/bench/decode.py MODEL.gguf [--hf DIRECTORY] [--threads 2] [--runs 7] [--json OUT]

Each engine lives in its own process and waits while the others run. One run: a prompt of 512 tokens (prefill), then 64
single tokens after a prompt of 16 (decode), logits of every last token included. Prints medians and spread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, START, GENERATE = 512, 16, 64
Feed = Callable[[list[int], int], Any]
"""feed(tokens, position): run these tokens from a position (0 starts afresh), up to the last one's logits."""


def ours(path: str, kernel: str, threads: int) -> Feed:
    import torch

    from runtime.blocks import BlockManager, BlockTable, KVCache
    from runtime.model import BatchInfo, load_model

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model = load_model(path, kernel=kernel)
    c = model.config
    blocks = (PROMPT + GENERATE) // 16 + 2
    cache, manager = KVCache(c.n_layers, blocks, c.n_kv_heads, c.head_dim), BlockManager(blocks, prefix_cache=False)
    table = BlockTable()

    def feed(tokens: list[int], position: int) -> Any:
        manager.truncate(table, position)
        manager.reserve(table, position + len(tokens))
        batch = cache.batch([table], [len(tokens)])
        hidden = model.forward(torch.tensor(tokens), batch.positions.long(), batch, BatchInfo(batch.sequence))
        table.length += len(tokens)
        return model.logits(hidden[-1:])

    return feed


def ik_llama(path: str, threads: int) -> Feed:
    from ik_llama_cpp._internals import IkContext, IkModel, make_batch_range, make_batch_single

    model = IkModel(path)
    context = IkContext(model, n_ctx=1024, n_threads=threads)

    def feed(tokens: list[int], position: int) -> Any:
        if position == 0:
            context.kv_cache_clear()
        one = len(tokens) == 1
        context.decode(make_batch_single(tokens[0], position) if one else make_batch_range(tokens, pos_start=position))
        return context.get_logits(-1)

    return feed


def llama_cpp(path: str, threads: int) -> Feed:
    from llama_cpp import Llama

    model = Llama(path, n_ctx=1024, n_batch=PROMPT, n_threads=threads, n_threads_batch=threads, verbose=False)

    def feed(tokens: list[int], position: int) -> Any:
        model.n_tokens = position
        model.eval(tokens)

    return feed


def transformers(path: str, dtype: str, threads: int) -> Feed:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    cache = [DynamicCache()]

    def feed(tokens: list[int], position: int) -> Any:
        if position == 0:
            cache[0] = DynamicCache()
        return model(torch.tensor([tokens]), past_key_values=cache[0], logits_to_keep=1).logits

    return feed


def measure(feed: Feed) -> dict[str, float]:
    """Tokens per second of one run."""
    tokens = [(7919 * i) % 30000 + 5 for i in range(PROMPT)]
    start = time.perf_counter()
    feed(tokens, 0)
    prefill = time.perf_counter() - start
    feed(tokens[:START], 0)
    start = time.perf_counter()
    for i in range(GENERATE):
        feed(tokens[i : i + 1], START + i)
    return {"prefill": PROMPT / prefill, "decode": GENERATE / (time.perf_counter() - start)}


def work(engine: str, path: str, threads: int) -> None:
    """The loop of an engine's process: a line in, a line of figures out."""
    name, _, option = engine.partition(":")
    if name == "ours":
        feed = ours(path, option, threads)
    elif name == "transformers":
        feed = transformers(path, option, threads)
    else:
        feed = {"ik_llama": ik_llama, "llama_cpp": llama_cpp}[name](path, threads)
    measure(feed)  # compile, fault pages in
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure(feed)), flush=True)


def start(engine: str, path: str, args: argparse.Namespace) -> "subprocess.Popen[str] | None":
    python = args.llama_cpp_python if engine == "llama_cpp" else sys.executable
    command = [python, __file__, path, "--engine", engine, "--threads", str(args.threads)]
    env = {
        **os.environ,
        "PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": str(args.threads),
    }
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    assert process.stdout
    for line in process.stdout:
        if line == "ready\n":
            return process
    print(f"{engine}: not available", file=sys.stderr)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--hf", help="the same model as a Hugging Face directory, for transformers")
    parser.add_argument("--llama-cpp-python", default=sys.executable, help="an interpreter that has llama_cpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        return work(args.engine, args.model, args.threads)
    engines = {"ours:cpu-int8": args.model, "ours:cpu": args.model, "ik_llama": args.model, "llama_cpp": args.model}
    if args.hf:
        engines |= {"transformers:bfloat16": args.hf, "transformers:float32": args.hf}
    started = {engine: start(engine, path, args) for engine, path in engines.items()}
    running = {engine: process for engine, process in started.items() if process}
    results: dict[str, list[dict[str, float]]] = {engine: [] for engine in running}
    for _ in range(args.runs):
        for engine, process in running.items():
            assert process.stdin and process.stdout
            process.stdin.write("run\n")
            process.stdin.flush()
            results[engine].append(json.loads(process.stdout.readline()))
    print(f"{args.model}, {args.threads} threads, tokens/s: median (lowest-highest) of {args.runs}")
    for engine, process in running.items():
        process.kill()
        row = ""
        for what in ("decode", "prefill"):
            values = [r[what] for r in results[engine]]
            row += f"  {what} {statistics.median(values):7.1f} ({min(values):.0f}-{max(values):.0f})"
        print(f"{engine:24}{row}")
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "threads": args.threads, "runs": results}, indent=1))


if __name__ == "__main__":
    main()
