"""Measure the shipped recipes on SmolLM2-135M, for the table of `quantize list recipes` (recipes/measured.json):

    python tests/bench/shipped.py SMOLLM2 [RECIPE ...] --calibration calib-c4.txt --text wiki.test.raw

Each recipe is run as it ships, but for the texts and what ADAPTED says. The table is written after each one, so that an
interrupted loop keeps what it has; recipes that are not named keep their figures.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from compress.catalogue import measured
from compress.recipe_file import MEASURED, shipped

# SmolLM2's rows of 576 have no GGUF type below 4.5 bits.
ADAPTED = {"gguf-3bpw": ["allocate.target_bpw=4.5"]}
KEPT = ("bytes", "bits_per_weight", "kld", "kld_stderr", "ppl", "ref_ppl", "top1")
PROTOCOL = {
    "model": "SmolLM2-135M",
    "calibration": "128 x 512 tokens of C4",
    "evaluation": "10 x 512 tokens of WikiText-2 test",
}


def run(recipe: str, model: Path, out: Path, settings: list[str]) -> dict[str, Any]:
    """What `quantize run` reports. A missed gate (exit 5) is a result like any other."""
    command = [
        str(Path(sys.executable).with_name("quantize")),
        "run",
        recipe,
        str(model),
        "-o",
        str(out),
        "--output",
        "json",
    ]
    command += [part for setting in settings for part in ("--set", setting)]
    print(" ".join(command), file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 5):
        raise SystemExit(f"{recipe} ended with {done.returncode}")
    found = json.loads(done.stdout)
    return {key: round(found[key], 6) for key in KEPT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = Path(__file__).parents[3] / "shared" / "data"
    parser.add_argument("model", type=Path)
    parser.add_argument("recipes", nargs="*", help="all of them, unless some are named")
    parser.add_argument("--calibration", type=Path, default=data / "calib-c4.txt")
    parser.add_argument("--text", type=Path, default=data / "wiki.test.raw")
    arguments = parser.parse_intermixed_args()
    texts = [f"calibration.data={arguments.calibration}", f"evaluate.perplexity.data={arguments.text}"]
    texts += ["calibration.samples=128", "calibration.length=512"]
    texts += ["evaluate.perplexity.length=512", "evaluate.perplexity.chunks=10"]
    with tempfile.TemporaryDirectory() as scratch:
        for recipe in arguments.recipes or shipped():
            adapted = ADAPTED.get(recipe, [])
            found = run(recipe, arguments.model, Path(scratch) / recipe, [*texts, *adapted])
            known = {name: figures for name, figures in measured()["recipes"].items() if name in shipped()}
            table = PROTOCOL | {"recipes": dict(sorted((known | {recipe: found | {"settings": adapted}}).items()))}
            MEASURED.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
