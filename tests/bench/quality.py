"""The independent judge: what did each file lose, at what size, and what did making it cost?

Candidates are decoded by the published layouts (layouts.py) into transformers' float32 model of the reference; nothing
of the product is imported. KL divergence, perplexity and top-1 agreement over the first 10 chunks of 512 tokens of a
text, the second half of each chunk scored. Files can be given, made by our own recipes in the same session, or made by
peers whose programs are named:

    python tests/bench/quality.py --reference MODEL_DIR --text wiki.test.raw \\
        --candidate mine=OUT/model.gguf --run recipes/gguf-q4.yaml \\
        --calibration calib-c4.txt --llama-quantize BIN --llama-imatrix BIN --llama-types Q4_1,Q3_K_M \\
        --gptqmodel VENV/bin/python --llmcompressor VENV/bin/python
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from layouts import decode, stored_bytes
from peers import make_all
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass
class Verdict:
    name: str
    mb: float  # tensor data, 1e6 bytes
    bpw: float  # over the reference's parameters, tied ones counted once
    kld: float | None  # nats
    kld_stderr: float | None
    ppl: float
    ppl_stderr: float
    top1: float | None  # fraction
    seconds: float | None = None
    peak_rss_mb: float | None = None


class Judge:
    """The reference model, its log-probabilities at the scored positions, and room for one candidate's weights."""

    def __init__(self, reference: Path, text: Path, length: int, chunks: int) -> None:
        source: dict[str, Any] = {"gguf_file": reference.name} if reference.is_file() else {}
        folder = reference.parent if reference.is_file() else reference
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source).eval()
        self.config = self.model.config
        self.parameters = sum(p.numel() for p in self.model.parameters())
        tokenizer = AutoTokenizer.from_pretrained(folder, **source)
        tokens = tokenizer(text.read_text(encoding="utf-8"), verbose=False).input_ids
        rows = [tokens[i * length : (i + 1) * length] for i in range(chunks)]
        if tokens[0] == tokenizer.bos_token_id:
            rows = [[tokens[0], *row[1:]] for row in rows]
        self.rows = torch.tensor(rows)
        self.first = length // 2
        self.wanted = self.rows[:, self.first + 1 :]
        shape = (*self.wanted.shape, self.config.vocab_size)
        with tempfile.TemporaryFile() as scratch:  # float32, on disk: one chunk at a time is in use
            self.logs = torch.from_numpy(np.memmap(scratch, np.float32, "w+", shape=shape))
        for i, row in enumerate(self.rows):
            self.logs[i] = self.log_probabilities(row)

    @torch.inference_mode()
    def log_probabilities(self, row: torch.Tensor) -> torch.Tensor:
        logits = self.model(row[None], logits_to_keep=len(row) - self.first, use_cache=False).logits[0, :-1]
        return torch.log_softmax(logits, dim=-1)

    def load(self, path: Path) -> None:
        """Overwrite the model's weights by the candidate's; every one of them must be there."""
        state = dict(self.model.named_parameters())
        missing = set(state)
        for name, tensor in decode(path, self.config):
            if name == "lm_head.weight" and name not in state:  # a tied head stored a second time
                continue
            state[name].data.copy_(tensor)
            missing.discard(name)
        if missing:
            raise SystemExit(f"{path}: no tensor for {sorted(missing)[:5]}")

    def perplexity(self, per_token: torch.Tensor) -> tuple[float, float]:
        ppl = math.exp(per_token.mean())
        return ppl, ppl * float(per_token.std()) / math.sqrt(per_token.numel())

    def itself(self, name: str, path: Path) -> Verdict:
        nll = -self.logs.gather(2, self.wanted[..., None]).double().flatten()
        size = stored_bytes(path)
        return Verdict(name, size / 1e6, 8 * size / self.parameters, None, None, *self.perplexity(nll), None)

    def judge(self, name: str, path: Path, seconds: float | None = None, rss: float | None = None) -> Verdict:
        self.load(path)
        klds, nlls, tops = [], [], []
        for log_p, row, wanted in zip(self.logs, self.rows, self.wanted, strict=True):
            log_q = self.log_probabilities(row)
            klds.append((log_p.exp() * (log_p - log_q)).sum(1))
            nlls.append(-log_q.gather(1, wanted[:, None])[:, 0])
            tops.append(log_p.argmax(1) == log_q.argmax(1))
        kld, nll, top = (torch.cat(x).double() for x in (klds, nlls, tops))
        size = stored_bytes(path)
        return Verdict(
            name,
            size / 1e6,
            8 * size / self.parameters,
            float(kld.mean()),
            float(kld.std()) / math.sqrt(kld.numel()),
            *self.perplexity(nll),
            float(top.mean()),
            seconds,
            rss,
        )


def table(verdicts: list[Verdict]) -> str:
    def cell(value: float | None, form: str, scale: float = 1) -> str:
        return "" if value is None else format(value * scale, form)

    lines = [
        "| file | MB | bits/weight | KLD | +- | ppl | +- | top-1 % | seconds | peak RSS MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for v in verdicts:
        cells = [
            v.name,
            cell(v.mb, ".1f"),
            cell(v.bpw, ".2f"),
            cell(v.kld, ".4f"),
            cell(v.kld_stderr, ".4f"),
            cell(v.ppl, ".2f"),
            cell(v.ppl_stderr, ".2f"),
            cell(v.top1, ".1f", 100),
            cell(v.seconds, ".0f"),
            cell(v.peak_rss_mb, ".0f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = Path(__file__).parents[3] / "shared" / "data"
    parser.add_argument("--reference", type=Path, required=True, help="Hugging Face directory, or a GGUF file")
    parser.add_argument("--text", type=Path, default=data / "wiki.test.raw")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=10)
    parser.add_argument("--candidate", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--run", action="append", default=[], metavar="RECIPE", help="make ours with `quantize run`")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to `quantize run`")
    parser.add_argument("--quantize", default=str(Path(sys.executable).with_name("quantize")), help="our command")
    parser.add_argument("--calibration", type=Path, default=data / "calib-c4.txt", help="text for the peers")
    parser.add_argument("--samples", type=int, default=128, help="calibration rows of 512 tokens")
    parser.add_argument("--llama-quantize", type=Path)
    parser.add_argument("--llama-imatrix", type=Path)
    parser.add_argument("--llama-gguf", type=Path, help="float GGUF of the reference (default: `quantize convert`)")
    parser.add_argument("--llama-types", default="Q4_1,Q4_0,Q3_K_M,Q3_K_S", help="comma-separated")
    parser.add_argument("--gptqmodel", type=Path, metavar="PYTHON", help="python of a venv with gptqmodel")
    parser.add_argument("--llmcompressor", type=Path, metavar="PYTHON", help="python of a venv with llmcompressor")
    parser.add_argument("--work", type=Path, help="keep what is made here (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="also write the table as JSON")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        work = (args.work or Path(scratch)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        made = make_all(args, work)  # before the judge's own memory is in the way
        for item in args.candidate:
            name, _, path = item.partition("=")
            made.append((name, Path(path), None, None))
        started = time.perf_counter()
        judge = Judge(args.reference, args.text, args.length, args.chunks)
        verdicts = [judge.itself("reference", args.reference)]
        for name, path, seconds, rss in made:
            verdicts.append(judge.judge(name, path, seconds, rss))
            print(table(verdicts[-1:]).splitlines()[-1], file=sys.stderr)
        print(f"judged in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    print(table(verdicts))
    if args.json:
        args.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1) + "\n")


if __name__ == "__main__":
    main()
