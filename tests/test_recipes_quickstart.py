"""The embedded models: complete, within their limits, and able to write Python."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaForCausalLM

QUICKSTART = Path(__file__).parent.parent / "recipes" / "quickstart"
BOUNDS = {"model": 50.0, "draft": 70.0}  # perplexity per token on the first windows of eval.txt
WINDOWS, LENGTH = 8, 512


@pytest.fixture(scope="module")
def models() -> dict[str, LlamaForCausalLM]:
    torch.set_num_threads(1)
    return {
        name: LlamaForCausalLM.from_pretrained(QUICKSTART / name, dtype=torch.float32, local_files_only=True)
        for name in BOUNDS
    }


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(QUICKSTART / "model", local_files_only=True)


@pytest.fixture(scope="module")
def rows(tokenizer) -> Tensor:
    text = (QUICKSTART / "eval.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids[: WINDOWS * (LENGTH - 1)]
    rows = torch.tensor(ids).view(WINDOWS, LENGTH - 1)
    return torch.cat([torch.full((WINDOWS, 1), tokenizer.bos_token_id), rows], 1)


@pytest.fixture(scope="module")
def logits(models, rows) -> dict[str, Tensor]:
    with torch.no_grad():
        return {name: model(input_ids=rows).logits[:, :-1] for name, model in models.items()}


def test_sizes_are_within_their_limits(models):
    assert 2e6 <= models["model"].num_parameters() <= 6e6
    assert models["draft"].num_parameters() < 6e5
    assert (QUICKSTART / "model" / "model.safetensors").stat().st_size < 12e6
    assert (QUICKSTART / "eval.txt").stat().st_size <= 300_000
    assert (QUICKSTART / "calib.txt").stat().st_size <= 400_000


@pytest.mark.parametrize("name", BOUNDS)
def test_each_directory_is_complete(name):
    files = {path.name for path in (QUICKSTART / name).iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= files


def test_widths_of_the_main_model_are_divisible_by_256(models):
    linears = [m for m in models["model"].modules() if isinstance(m, torch.nn.Linear)]
    assert linears
    assert all(m.in_features % 256 == 0 and m.out_features % 256 == 0 for m in linears)
    assert all(p.isfinite().all() for m in models.values() for p in m.parameters())


def test_both_speak_the_same_tokens(models, tokenizer):
    files = [(QUICKSTART / name / "tokenizer.json").read_bytes() for name in BOUNDS]
    assert files[0] == files[1]
    assert {m.config.vocab_size for m in models.values()} == {len(tokenizer)}
    for model in models.values():
        assert model.config.tie_word_embeddings
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_tokenizer_round_trip_bos_and_chat(tokenizer):
    text = "import os\n\n\tx  =  'é😀'\n"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    turns = [{"role": "user", "content": "sum\nof two"}, {"role": "assistant", "content": "def add(a, b):"}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    assert rendered == "<|bos|># sum\n# of two\ndef add(a, b):<|eos|>\n"


def test_nothing_held_out_is_in_the_calibration_text():
    calibration = (QUICKSTART / "calib.txt").read_text(encoding="utf-8")
    held_out = (QUICKSTART / "eval.txt").read_text(encoding="utf-8")
    pieces = [held_out[i : i + 200] for i in range(0, len(held_out) - 200, 50)]
    assert not any(piece in calibration for piece in pieces)


@pytest.mark.parametrize("name", BOUNDS)
def test_held_out_perplexity(name, logits, rows):
    loss = F.cross_entropy(logits[name].flatten(0, 1), rows[:, 1:].flatten()).item()
    assert math.exp(loss) < BOUNDS[name]


def test_the_draft_is_worth_asking(logits):
    p, q = (logits[name].softmax(-1) for name in ("model", "draft"))
    accepted = torch.minimum(p, q).sum(-1).mean().item()  # the acceptance rate of exact speculative sampling
    assert accepted > 0.63
    assert (p.argmax(-1) == q.argmax(-1)).float().mean() > 0.5


def test_it_writes_python(models, tokenizer):
    torch.manual_seed(0)
    ids = tokenizer(["class Queue:\n    def"] * 8, return_tensors="pt").input_ids
    texts = tokenizer.batch_decode(models["model"].generate(ids, max_new_tokens=80, do_sample=True, temperature=0.7))
    assert sum("(self" in text and "):\n        " in text for text in texts) >= 6
