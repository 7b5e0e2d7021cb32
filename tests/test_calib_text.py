"""Calibration text: every kind of source, packing, the seeded choice of rows, and clear refusals."""

import copy
import hashlib
import json

import pyarrow
import pyarrow.parquet
import pytest
import torch

from calib.text import generate_text, load_text
from formats.containers import open_checkpoint
from formats.dense import load_tokenizer
from formats.errors import DataError

TEXT = "".join(f"The quick brown fox {i} jumps over the lazy dog {i * i}.\n" for i in range(70))


def load(source, tokenizer, samples=4, length=16, seed=0, **more):
    sources = source if isinstance(source, list) else [source]
    return load_text([str(s) for s in sources], tokenizer, samples=samples, length=length, seed=seed, **more)


@pytest.fixture
def plain(tmp_path):
    (tmp_path / "calib.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "calib.txt"


def test_plain_text_is_cut_front_to_back(plain, tiny_tokenizer):
    ids = tiny_tokenizer(TEXT, add_special_tokens=False).input_ids
    rows = len(ids) // 16
    everything = load(plain, tiny_tokenizer, samples=rows)
    assert everything.tokens.dtype == torch.int64
    assert everything.tokens.tolist() == [ids[i * 16 : i * 16 + 16] for i in range(rows)]
    assert everything.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    assert everything.count == len(ids) and everything.source == str(plain) and not everything.generated
    assert load(plain, tiny_tokenizer, samples=rows + 100).tokens.shape[0] == rows  # no more than there are


def test_the_choice_of_rows_is_seeded_and_spread(plain, tiny_tokenizer):
    one, same, other = (load(plain, tiny_tokenizer, samples=8, seed=seed).tokens for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    limit = 4 * 8 * 16
    ids = tiny_tokenizer(TEXT, add_special_tokens=False).input_ids[:limit]
    rows = [ids[i : i + 16] for i in range(0, limit, 16)]
    at = [rows.index(row) for row in one.tolist()]
    assert one.shape == (8, 16) and at == sorted(at)


def test_rows_begin_with_bos_where_the_tokenizer_does(plain, tiny_tokenizer):
    class WithBos:
        bos_token_id, eos_token_id, chat_template = 7, 2, None

        def __call__(self, text, add_special_tokens=True, **_):
            out = tiny_tokenizer(text, add_special_tokens=False)
            if add_special_tokens:
                out["input_ids"] = [7, *out["input_ids"]]
            return out

    tokens = load(plain, WithBos(), samples=3).tokens
    assert (tokens[:, 0] == 7).all() and not (tokens[:, 1:] == 7).any()


def test_documents_are_joined_by_end_of_text(tmp_path, tiny_tokenizer):
    path = tmp_path / "docs.jsonl"
    path.write_text('{"text": "the dog"}\n\n{"text": "the fox"}\n', encoding="utf-8")
    parts = [tiny_tokenizer(t, add_special_tokens=False).input_ids for t in ("the dog", "the fox")]
    joined = [*parts[0], tiny_tokenizer.eos_token_id, *parts[1]]
    assert load(path, tiny_tokenizer, samples=1, length=len(joined)).tokens.tolist() == [joined]


def test_chats_are_rendered_by_the_template(tmp_path, tiny_tokenizer):
    chat = [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "the fox"}]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": chat}), encoding="utf-8")
    text = "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\nthe fox<|im_end|>\n"
    ids = tiny_tokenizer(text, add_special_tokens=False).input_ids
    assert ids[0] == tiny_tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert load(path, tiny_tokenizer, samples=1, length=len(ids)).tokens.tolist() == [ids]
    plain = tiny_tokenizer("the dog\n\nthe fox", add_special_tokens=False).input_ids
    joined = load(path, tiny_tokenizer, samples=1, length=len(plain), chat_template=False)
    assert joined.tokens.tolist() == [plain]


def test_a_chat_needs_a_template(tmp_path, tiny_tokenizer):
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}', encoding="utf-8")
    bare = copy.copy(tiny_tokenizer)
    bare.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        load(path, bare)


def test_parquet_and_datasets_and_a_mixture(tmp_path, plain, tiny_tokenizer):
    texts = [f"the dog number {i} jumps over the fox" for i in range(50)]
    pyarrow.parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "docs.parquet")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in texts))
    parquet = load(tmp_path / "docs.parquet", tiny_tokenizer, column="body")
    local = load(tmp_path / "set", tiny_tokenizer, column="body")
    assert torch.equal(parquet.tokens, local.tokens)
    both = load([plain, tmp_path / "docs.parquet"], tiny_tokenizer, column="body")
    assert both.count == load(plain, tiny_tokenizer).count + parquet.count
    with pytest.raises(DataError, match='neither text in "text" nor "messages"; it has body'):
        load(tmp_path / "docs.parquet", tiny_tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"the dog", "tokens, but one sample needs 16"),
        ("a.txt", b"", "the text has 0 tokens"),
        ("a.txt", b"the dog \xff" * 50, "not UTF-8 text"),
        ("a.jsonl", b'{"text": "the dog"}\n{"text": ', r"a\.jsonl:2: not a line of JSON"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: not a line of JSON"),
        ("a.jsonl", b'{"body": "the dog"}\n', "it has body"),
        ("a.jsonl", b'"the dog"\n', "it is not an object"),
        ("a.jsonl", b'{"text": 3}\n', "neither text"),
        ("a.parquet", b"PAR1 no", "not a readable parquet file"),
    ],
)
def test_bad_sources_are_refused(tmp_path, tiny_tokenizer, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path / name, tiny_tokenizer)
    assert caught.value.exit_code == 3


def test_sources_that_do_not_exist(tiny_tokenizer, monkeypatch):
    import datasets

    def offline(*_, **__):
        raise ConnectionError("Couldn't reach 'some/set' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match="no such text file"):
        load("missing.txt", tiny_tokenizer)
    with pytest.raises(DataError, match="not a data set that can be loaded: Couldn't reach"):
        load("some/set", tiny_tokenizer)


def test_the_model_writes_its_own_text(tiny_model):
    with open_checkpoint(tiny_model()) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
        steps = []
        kwargs = dict(samples=5, length=12, batch=2)
        one = generate_text(checkpoint, tokenizer, seed=1, progress=lambda *s: steps.append(s), **kwargs)
        same = generate_text(checkpoint, tokenizer, seed=1, **kwargs)
        other = generate_text(checkpoint, tokenizer, seed=2, **kwargs)
    assert one.generated and "written by the model itself" in one.source
    assert one.tokens.shape == (5, 12) and one.tokens.dtype == torch.int64
    assert (one.tokens[:, 0] == tokenizer.bos_token_id).all()
    assert torch.equal(one.tokens, same.tokens) and one.sha256 == same.sha256
    assert not torch.equal(one.tokens, other.tokens)
    assert steps == [(2, 5), (4, 5), (5, 5)]


def test_generated_text_follows_the_models_distribution(tiny_model):
    """The second token's frequencies against the softmax that transformers gives for the first."""
    from transformers import AutoModelForCausalLM

    with open_checkpoint(tiny_model()) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
        text = generate_text(checkpoint, tokenizer, samples=4000, length=2, seed=0, batch=4000)
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    with torch.no_grad():
        expected = model(text.tokens[:1, :1]).logits[0, 0].softmax(-1)
    counts = torch.bincount(text.tokens[:, 1], minlength=len(expected))
    likely = expected * 4000 >= 5
    chi2 = (((counts - expected * 4000) ** 2) / (expected * 4000))[likely].sum()
    degrees = int(likely.sum())
    assert degrees > 20
    assert abs(float(chi2) - degrees) < 5 * (2 * degrees) ** 0.5
