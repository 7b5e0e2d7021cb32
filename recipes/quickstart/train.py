"""Trains the embedded quick-start model and its draft from the standard library of the Python that runs this file.

    python recipes/quickstart/train.py --steps 1500

One pass does everything, on one CPU thread: corpus -> eval.txt, calib.txt -> tokenizer -> both models. The draft learns
beside the main model, from the text and from the main model's logits on the same batch, so that no second pass over the
corpus is needed. The learning rate holds and then falls by a cosine: until the fall begins a run does not depend on its
length, and a run that proves too slow can be restarted from its checkpoint with fewer steps.
"""

import argparse
import math
import sysconfig
import time
import tokenize
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
SEED = 0
VOCAB = 2048
POSITIONS = 1024
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "site-packages", "pydoc_data"}
HELD_OUT = (  # whole modules and packages that neither the tokenizer nor the models ever see
    "json/", "tomllib/", "calendar.py", "csv.py", "fractions.py", "graphlib.py", "heapq.py", "http/cookies.py",
    "queue.py", "sched.py", "shelve.py", "textwrap.py", "wave.py", "zipapp.py",
)  # fmt: skip

# There is no chat in a standard library: a turn of the user becomes a comment, and the model answers in code.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ message.content }}{{ eos_token }}{{ '\\n' }}"
    "{% else %}# {{ message.content | replace('\\n', '\\n# ') }}{{ '\\n' }}{% endif %}{% endfor %}"
)

SHAPES = {  # every width of the main model is a multiple of 256, so that every grid applies
    "model": dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
                  num_key_value_heads=4, head_dim=64),
    "draft": dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=32),
}  # fmt: skip
PEAK_RATE = {"model": 2.5e-3, "draft": 3e-3}
STEP_TOKENS = 2048
LENGTHS = (256, 256, 256, 512, 256, 256, 256, 1024)  # in turn: short rows are cheap, long ones teach every position
WARMUP, FALL = 100, 0.5  # steps; the last half of the run is the fall
DISTILL = 0.7  # weight of the main model's logits in the draft's loss


def corpus() -> Iterator[tuple[str, str]]:
    """(relative path, text) of the standard library's modules, in the order of their paths, then of Python's manual."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        if SKIPPED.isdisjoint(parts) and not parts[0].startswith(("_sysconfigdata", "config-", "lib-dynload")):
            with tokenize.open(path) as file:
                yield "/".join(parts), file.read()
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topics/{name}", topics[name]


def excerpts(texts: list[str], size: int = 3000, count: int = 120) -> str:
    """`count` pieces of about `size` characters, cut at line ends, from places spread evenly over the texts."""
    text = "\n".join(texts)
    starts = [text.index("\n", i * (len(text) - 2 * size) // count) + 1 for i in range(count)]
    return "".join(text[start : text.rindex("\n", start, start + size) + 1] for start in starts)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with GPT-2's splitting; every encoded text begins with BOS."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=[BOS, EOS, PAD], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        add_bos_token=True,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def new_model(name: str, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=POSITIONS, tie_word_embeddings=True, **SHAPES[name], **ids
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")  # on a CPU faster than the fused kernel at these lengths
    return model


def batch(tokens: Tensor, step: int, bos: int) -> Tensor:
    """Rows [STEP_TOKENS / length, length] from random places; a row begins with BOS, as every encoded text does.

    Depends on the seed and the step only, so that a resumed run sees what an uninterrupted one would have seen.
    """
    length = LENGTHS[step % len(LENGTHS)]
    random = torch.Generator().manual_seed(SEED * 1_000_003 + step)
    starts = torch.randint(len(tokens) - length, (STEP_TOKENS // length, 1), generator=random)
    rows = tokens[starts + torch.arange(length)]
    rows[:, 0] = bos
    return rows


def rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: a short rise, then level, then a cosine down to 2%."""
    fallen = max(0.0, (step - (1 - FALL) * steps) / (FALL * steps))
    return min(1.0, (step + 1) / WARMUP) * (0.02 + 0.98 * (1 + math.cos(math.pi * fallen)) / 2)


def optimizer(model: LlamaForCausalLM, peak: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=True)


def losses(both: dict[str, LlamaForCausalLM], rows: Tensor) -> dict[str, Tensor]:
    """Cross-entropy of the main model; for the draft a mixture with its divergence from the main model."""
    targets = rows[:, 1:].flatten()
    with torch.autocast("cpu", torch.bfloat16):
        logits = {name: model(input_ids=rows).logits[:, :-1].flatten(0, 1) for name, model in both.items()}
    log_p = {name: F.log_softmax(x.float(), -1) for name, x in logits.items()}
    teacher = log_p["model"].detach()
    divergence = F.kl_div(log_p["draft"], teacher, reduction="batchmean", log_target=True)
    plain = {name: F.nll_loss(x, targets) for name, x in log_p.items()}
    return {"model": plain["model"], "draft": (1 - DISTILL) * plain["draft"] + DISTILL * divergence}


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: Tensor, bos: int, windows: int | None = None) -> float:
    """Mean negative log-likelihood in nats per token over windows of 511 tokens after a BOS."""
    rows = tokens[: len(tokens) // 511 * 511].view(-1, 511)[:windows]
    rows = torch.cat([torch.full_like(rows[:, :1], bos), rows], 1)
    sums = [
        F.cross_entropy(model(input_ids=r[None]).logits[0, :-1].float(), r[1:], reduction="sum").item() for r in rows
    ]
    return sum(sums) / (rows.shape[0] * 511)


def train(
    both: dict[str, LlamaForCausalLM], tokens: Tensor, held_out: Tensor, bos: int, steps: int, checkpoint: Path
) -> None:
    optimizers = {name: optimizer(model, PEAK_RATE[name]) for name, model in both.items()}
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        first = state["step"]
        for name in both:
            both[name].load_state_dict(state[name])
            optimizers[name].load_state_dict(state[f"{name}.optimizer"])
    began, shown = time.monotonic(), first
    for step in range(first, steps):
        current = losses(both, batch(tokens, step, bos))
        sum(current.values()).backward()  # type: ignore[union-attr]
        for name, model in both.items():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizers[name].param_groups:
                group["lr"] = PEAK_RATE[name] * rate(step, steps)
            optimizers[name].step()
            optimizers[name].zero_grad()
        if (step + 1) % 50 == 0:
            pace = (step + 1 - shown) * STEP_TOKENS / (time.monotonic() - began)
            shown, began = step + 1, time.monotonic()
            print(f"{step + 1}/{steps}", *(f"{n} {x.item():.3f}" for n, x in current.items()), f"{pace:.0f} tok/s")
        if (step + 1) % 200 == 0 or step + 1 == steps:
            print("  held out", *(f"{n} {held_out_loss(m, held_out, bos, 16):.3f}" for n, m in both.items()))
            state = {name: model.state_dict() for name, model in both.items()}
            state |= {f"{name}.optimizer": o.state_dict() for name, o in optimizers.items()}
            torch.save({**state, "step": step + 1}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)


def report(name: str, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str, tokens: Tensor) -> None:
    """Print the held-out figures and samples of a model as it was saved."""
    loss = held_out_loss(model, tokens, tokenizer.bos_token_id)
    per_byte = loss * len(tokens) / len(text.encode()) / math.log(2)
    print(f"{name}: {model.num_parameters()} parameters, perplexity {math.exp(loss):.2f}, {per_byte:.3f} bits per byte")
    for prompt, sampled in (("import", False), ("def", True), ("class Queue:\n    def", True)):
        torch.manual_seed(SEED)
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=120, do_sample=sampled, temperature=0.7 if sampled else None)
        print(f"--- {name}, {'temperature 0.7' if sampled else 'greedy'}\n{tokenizer.decode(out[0][1:])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help=f"of {STEP_TOKENS} tokens each")
    parser.add_argument("--out", type=Path, default=HERE, help="receives model/, draft/, eval.txt and calib.txt")
    parser.add_argument("--checkpoint", type=Path, default=Path("quickstart.pt"), help="written as it trains, resumed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order: the same machine gives the same weights
    torch.set_flush_denormal(True)

    files = list(corpus())
    training = [text for name, text in files if not name.startswith(HELD_OUT)]
    eval_text = "\n".join(text for name, text in files if name.startswith(HELD_OUT))
    (arguments.out / "eval.txt").write_text(eval_text, encoding="utf-8")
    (arguments.out / "calib.txt").write_text(excerpts(training), encoding="utf-8")
    tokenizer = train_tokenizer(training)

    def encode(texts: list[str]) -> Tensor:
        encoded = tokenizer([text + EOS for text in texts], verbose=False).input_ids
        return torch.tensor([i for ids in encoded for i in ids])

    tokens, held_out = encode(training), torch.tensor(tokenizer(eval_text, verbose=False).input_ids[1:])
    print(f"{len(training)} texts, {len(tokens)} tokens to train on; {len(eval_text)} characters held out", flush=True)
    both = {name: new_model(name, tokenizer) for name in SHAPES}
    train(both, tokens, held_out, tokenizer.bos_token_id, arguments.steps, arguments.checkpoint)
    for name, model in both.items():
        model.to(torch.bfloat16).save_pretrained(arguments.out / name)
        tokenizer.save_pretrained(arguments.out / name)
        saved = LlamaForCausalLM.from_pretrained(arguments.out / name, dtype=torch.float32)
        report(name, saved, tokenizer, eval_text, held_out)


if __name__ == "__main__":
    main()
