"""Does llama.cpp generate what the decoded weights do in transformers? Where its kernels round activations to 8 bits,
a greedy choice between two near equal tokens may fall either way; nowhere else.

    python tests/agreement.py FILE.gguf --text TEXT [--python PEERS/llamacpp/bin/python]

Two statements, each without looking at the engine first: prompts whose 16 greedy tokens are all decided clearly are
continued with the same tokens; and along any prompt's greedy path the engine prefers another token only where the two
are nearer to each other than the rounding moves them. How far that is, is measured in transformers, with the inputs of
every linear rounded as the kernels do.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from llama_engine import ask  # noqa: E402
from quantised import decoded  # noqa: E402
from torch import Tensor  # noqa: E402

from formats.containers import open_checkpoint  # noqa: E402

PROMPT, STEPS = 24, 16


@dataclass
class Reference:
    """What the decoded weights do. paths [N, PROMPT + STEPS]: prompts with their greedy tokens; logits [N, .., vocab];
    noise: RMS change of all logits by rounding; reach: most that rounding moves two leading tokens apart."""

    paths: Tensor
    logits: Tensor
    noise: float
    reach: float

    def margins(self) -> Tensor:
        """[N]: how clearly the least clear of the greedy tokens wins."""
        top = self.logits[:, PROMPT - 1 : -1].topk(2).values
        return (top[..., 0] - top[..., 1]).amin(1)


@contextmanager
def rounded_activations(model: Any) -> Iterator[None]:
    """Inputs of all linears on 8 bits per 32 columns, scaled by their largest: ggml's q8_0."""

    def hook(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        blocks = inputs[0].unflatten(-1, (-1, 32))
        scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
        return (((blocks / scale).round() * scale).flatten(-2),)

    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    handles = [m.register_forward_pre_hook(hook) for m in linears]
    yield
    for handle in handles:
        handle.remove()


@torch.no_grad()
def reference(model: Any, prompts: Tensor) -> Reference:
    """prompts int64 [N, PROMPT]."""
    paths, cache, last = prompts, None, prompts
    for _ in range(STEPS):
        out = model(last, cache=cache, use_cache=True, logits_to_keep=1)
        cache, last = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        paths = torch.cat([paths, last], 1)
    logits = model(paths).logits
    with rounded_activations(model):
        change = model(paths).logits - logits
    leading = change.gather(-1, logits.topk(2).indices)[:, PROMPT - 1 : -1]
    return Reference(
        paths, logits, float(change.square().mean().sqrt()), float((leading[..., 0] - leading[..., 1]).abs().max())
    )


@dataclass
class Agreement:
    """same [N]: are all greedy tokens the same? gaps: by how much the tokens lose that the engine prefers elsewhere
    than the reference, along its path; noise: RMS difference of the logits."""

    same: list[bool]
    gaps: list[float]
    noise: float

    def near(self, expected: Reference) -> bool:
        """Nothing but rounding. Twice what was simulated: kernels differ in rounding, and in order of summation."""
        return self.noise < 2 * expected.noise and max(self.gaps, default=0.0) < 2 * expected.reach


def agreement(file: Path, expected: Reference, work: Path, python: str = sys.executable) -> Agreement:
    prompts, paths = expected.paths[:, :PROMPT].tolist(), expected.paths.tolist()
    n = len(paths)
    found = ask(file, work / "engine.npz", python, rows=prompts, generate=STEPS)
    forced = ask(file, work / "engine.npz", python, rows=paths)
    same = [found[f"greedy-{i}"].tolist() == paths[i][PROMPT:] for i in range(n)]
    theirs = torch.stack([torch.from_numpy(forced[f"logits-{i}"]) for i in range(n)])
    ours, chosen = expected.logits[:, PROMPT - 1 : -1], theirs[:, PROMPT - 1 : -1].argmax(-1)
    gaps = (ours.amax(-1) - ours.gather(-1, chosen[..., None])[..., 0]).flatten()
    return Agreement(same, gaps[gaps > 0].tolist(), float((theirs - expected.logits).square().mean().sqrt()))


def pick(everything: Reference, rows: list[int]) -> Reference:
    return Reference(everything.paths[rows], everything.logits[rows], everything.noise, everything.reach)


def decided(everything: Reference, count: int = 10) -> Reference:
    """The prompts whose greedy tokens win most clearly."""
    return pick(everything, everything.margins().topk(count).indices.tolist())


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the engine's environment")
    parser.add_argument("--candidates", type=int, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, open_checkpoint(args.file) as source:
        work = Path(temporary)
        source.save_tokenizer(work)
        tokenizer = AutoTokenizer.from_pretrained(work)
        lines = [line.strip() for line in args.text.read_text(encoding="utf-8").splitlines() if len(line) > 200]
        rows = [tokenizer(line).input_ids[:PROMPT] for line in lines[: args.candidates]]
        model = AutoModelForCausalLM.from_pretrained(decoded(args.file, work / "decoded"), dtype=torch.float32)
        everything = reference(model, torch.tensor(rows))
        for name, chosen in (("first ten", pick(everything, list(range(10)))), ("decided", decided(everything))):
            found = agreement(args.file, chosen, work, args.python)
            print(
                f"{name}: {sum(found.same)} of {len(found.same)} prompts continued alike, least margin "
                f"{chosen.margins().min():.2f}; {len(found.gaps)} other choices, worst {max(found.gaps, default=0):.2f}"
                f"; RMS {found.noise:.4f} (rounding: reach {chosen.reach:.2f}, RMS {chosen.noise:.4f})"
            )


if __name__ == "__main__":
    main()
