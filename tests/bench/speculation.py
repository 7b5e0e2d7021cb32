"""What guessing is worth on this CPU: python tests/bench/speculation.py [--model DIR --draft DIR] [--tokens 200]

Medians over alternating runs of plain and speculative decoding, greedy, of (1) the embedded target and its draft on
Python code, (2) prompt lookup on a prompt that asks to copy, (3) a hopeless draft, which must switch itself off.
Exits with 1 unless outputs are identical, (1) and (2) are faster than plain, and (3) costs under 5%.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from runtime.engine import Engine
from runtime.model import load_model
from runtime.sampling import SamplingParams

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart"
CODE = 'import os\n\n\ndef read_lines(path):\n    """Return the lines of a file."""\n    with open(path) as f:\n'
COPY = "    def test_{0}(self):\n        self.assertEqual(len(self.items), {0})\n        self.check(self.items)\n\n"


def hopeless(draft: Any) -> Any:
    """A draft that is always wrong: the head of `draft`, negated."""
    logits: Callable[[torch.Tensor], torch.Tensor] = draft.logits
    draft.logits = lambda hidden: -logits(hidden)
    return draft


def measure(model: Any, draft: Any, prompt: list[int], tokens: int, runs: int) -> dict[str, Any]:
    """Median seconds of plain and speculative runs, one after the other in turn; both engines are warm."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    engines = {
        name: Engine(model, prefix_cache=False, kv_tokens=2048, draft=d)
        for name, d in (("plain", None), ("speculative", draft))
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    results = {}
    for run in range(runs + 1):
        for name, engine in engines.items():
            started = time.perf_counter()
            results[name] = engine.generate([prompt], params)[0][0].tokens
            seconds[name] += [time.perf_counter() - started] * (run > 0)
    stats = engines["speculative"].stats()
    plain, speculative = (statistics.median(times) for times in seconds.values())
    return {
        "identical": results["plain"] == results["speculative"],
        "speedup": plain / speculative,
        "plain_tps": tokens / plain,
        "tps": tokens / speculative,
        "acceptance": stats.acceptance or 0.0,
        "tokens_per_step": stats.tokens_per_step or 1.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=QUICKSTART / "model")
    parser.add_argument("--draft", type=Path, default=QUICKSTART / "draft")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--kernel", default="auto")
    arguments = parser.parse_args()
    model, draft, bad = (
        load_model(p, kernel=arguments.kernel) for p in (arguments.model, arguments.draft, arguments.draft)
    )
    code = model.tokenizer.encode(CODE)
    copying = model.tokenizer.encode("".join(COPY.format(i) for i in range(3, 7)))
    good = True
    for name, guesser, prompt, least in (
        ("target + draft", draft, code, 1.0),
        ("prompt lookup, copying", "ngram", copying, 1.0),
        ("hopeless draft", hopeless(bad), code, 0.95),
    ):
        r = measure(model, guesser, prompt, arguments.tokens, arguments.runs)
        print(
            f"{name:<24} {r['plain_tps']:7.1f} -> {r['tps']:7.1f} tokens/s  {r['speedup']:.2f} times  acceptance "
            f"{r['acceptance']:.2f}  tokens/step {r['tokens_per_step']:.2f}  identical {r['identical']}"
        )
        good &= r["identical"] and r["speedup"] > least
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
