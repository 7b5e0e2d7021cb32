"""Makes candidates in the same session: ours through `quantize run`, peers' through their own programs."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

Made = tuple[str, Path, float | None, float | None]  # name, file or directory, seconds, peak RSS in MB

GPTQMODEL = """
import json, sys
from gptqmodel import GPTQModel, QuantizeConfig
model, out, rows = sys.argv[1], sys.argv[2], json.load(open(sys.argv[3]))
rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
engine = GPTQModel.load(model, QuantizeConfig(bits=4, group_size=32, sym=False, desc_act=False), device="cpu")
engine.quantize(rows, batch_size=1)
engine.save(out)
"""

LLMCOMPRESSOR = """
import json, sys
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer
model, out, rows = sys.argv[1], sys.argv[2], json.load(open(sys.argv[3]))
data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
module = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
oneshot(model=module, dataset=data, recipe=GPTQModifier(config_groups=groups, ignore=["lm_head"]),
        max_seq_length=512, num_calibration_samples=len(rows))
module.save_pretrained(out, save_compressed=True)
AutoTokenizer.from_pretrained(model).save_pretrained(out)
"""


def measured(command: list[str | Path], log: Path, cwd: Path | None = None, **environment: str) -> tuple[float, float]:
    """Run to the end: wall seconds, and peak RSS in MB of the process or its largest child. Output goes to `log`."""
    print("running", *command[:3], "...", file=sys.stderr)
    started = time.perf_counter()
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=out, stderr=out, cwd=cwd, env=os.environ | environment
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        tail = log.read_text(errors="replace").splitlines()[-15:]
        raise SystemExit("\n".join([f"exit code {process.returncode}: {' '.join(map(str, command))}", *tail]))
    return time.perf_counter() - started, usage.ru_maxrss / 1024


def model_file(out: Path) -> Path:
    """The .gguf file in an output directory, or the directory itself."""
    return next(iter(sorted(out.glob("*.gguf"))), out)


def ours(args: argparse.Namespace, work: Path) -> list[Made]:
    made: list[Made] = []
    for recipe in args.run:
        name = Path(recipe).stem
        out = work / f"ours-{name}"
        changes = [part for change in args.set for part in ("--set", change)]
        command = [args.quantize, "run", recipe, args.reference, "-o", out, "--overwrite", *changes]
        cost = measured(command, work / f"ours-{name}.log")
        made.append((f"ours {name}", model_file(out), *cost))
    return made


def llama_cpp(args: argparse.Namespace, work: Path) -> list[Made]:
    if not args.llama_quantize:
        return []
    source, threads = args.llama_gguf, str(args.threads)
    if source is None:
        folder = work / "reference-gguf"
        measured(
            [args.quantize, "convert", args.reference, "-o", folder, "--format", "gguf", "--overwrite"],
            work / "convert.log",
        )
        source = model_file(folder)
    weigh: list[str | Path] = []
    seconds = rss = 0.0
    if args.llama_imatrix:
        imatrix = work / "imatrix.gguf"
        options = ["-c", "512", "--chunks", str(args.samples), "-t", threads, "--no-ppl"]
        seconds, rss = measured(
            [args.llama_imatrix, "-m", source, "-f", args.calibration, "-o", imatrix, *options], work / "imatrix.log"
        )
        weigh = ["--imatrix", imatrix]
    made: list[Made] = []
    for kind in args.llama_types.split(","):
        out = work / f"llama-{kind}.gguf"
        took, peak = measured([args.llama_quantize, *weigh, source, out, kind, threads], work / f"llama-{kind}.log")
        made.append((f"llama.cpp {kind}{' imatrix' if weigh else ''}", out, seconds + took, max(rss, peak)))
    return made


def python_peers(args: argparse.Namespace, work: Path) -> list[Made]:
    peers = [
        ("gptqmodel int4-g32", args.gptqmodel, GPTQMODEL, {"GPTQMODEL_CPU_WORKERS": "2"}),
        ("llmcompressor int4-g32-sym", args.llmcompressor, LLMCOMPRESSOR, {}),
    ]
    made: list[Made] = []
    for name, python, program, environment in peers:
        if python is None:
            continue
        rows = work / "rows.json"
        if not rows.exists():
            rows.write_text(json.dumps(calibration_rows(args)))
        script, out = work / f"make_{name.split()[0]}.py", work / f"peer-{name.split()[0]}"
        script.write_text(program)
        command = [python.absolute(), script, args.reference.absolute(), out, rows]
        cost = measured(command, script.with_suffix(".log"), cwd=work, **environment)  # they leave logs where they run
        made.append((name, out, *cost))
    return made


def calibration_rows(args: argparse.Namespace) -> list[list[int]]:
    """The first `samples` rows of 512 tokens of the calibration text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.reference)
    tokens = tokenizer(args.calibration.read_text(encoding="utf-8"), verbose=False).input_ids
    return [tokens[i * 512 : (i + 1) * 512] for i in range(args.samples)]


def make_all(args: argparse.Namespace, work: Path) -> list[Made]:
    return [*ours(args, work), *llama_cpp(args, work), *python_peers(args, work)]
