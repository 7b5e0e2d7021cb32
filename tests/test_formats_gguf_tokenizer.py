"""Tokenizers in GGUF: how text is split, SentencePiece scores, special and added tokens, there and back."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from formats.containers.gguf_file import GGUFFile, GGUFFileWriter
from formats.containers.gguf_tokenizer import PRE_TYPES, GGUFTokenizer, add_tokenizer, pre_type
from formats.errors import DataError

TEXTS = [
    "Hello world, it's 12345 o'clock.\n\n  x = [1, 2]\t# caf\u00e9",
    "<|im_start|>user\nWhat's 3.14?<|im_end|>",
    "  two  spaces   three \u4f60\u597d \U0001f680 end ",
    "",
]


def bpe(split: Any) -> Tokenizer:
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + LINES


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        (
            "smollm",
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            ),
        ),
        ("llama-bpe", pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES])),
        (
            "qwen2",
            pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), BYTES]),
        ),
    ],
)
def test_pre_types_are_told_apart_as_published_tokenizers_spell_them(name: str, split: Any) -> None:
    assert pre_type(bpe(split)) == name


def test_the_known_rules_differ_on_the_probe_and_unknown_ones_are_refused() -> None:
    from formats.containers import gguf_tokenizer

    splits = {str(gguf_tokenizer._splitter(pre).pre_tokenize_str(gguf_tokenizer._PROBE)) for pre in PRE_TYPES}
    assert len(splits) == len(PRE_TYPES)
    for split in (pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=True)):
        with pytest.raises(DataError, match="no name for"):
            pre_type(bpe(split))


def through_gguf(directory: Path, vocab_size: int, out: Path) -> GGUFFile:
    header = gguf.GGUFWriter(None, "llama")
    add_tokenizer(header, directory, vocab_size)
    GGUFFileWriter(out / "t.gguf", header).close()
    return GGUFFile(out / "t.gguf")


def test_byte_level_there_and_back(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    shutil.copytree(tiny_model("llama", layers=1), tmp_path / "m")
    original = AutoTokenizer.from_pretrained(tmp_path / "m")
    original.add_tokens(["<tool>", "[sep]"])
    original.save_pretrained(tmp_path / "m")
    file = through_gguf(tmp_path / "m", 400, tmp_path)
    types = file.fields["tokenizer.ggml.token_type"].value
    assert [types[i] for i in (0, 5, 384, 385, 399)] == [3, 1, 4, 4, 5]
    (tmp_path / "back").mkdir()
    GGUFTokenizer(file.fields, "t.gguf").save(tmp_path / "back")
    back = AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in [*TEXTS, "a<tool>b [sep]"]:
        ids = original(text)["input_ids"]
        assert back(text)["input_ids"] == ids
        assert back.decode(ids) == original.decode(ids) == text
    chat = [{"role": "user", "content": "hi"}]
    assert back.apply_chat_template(chat, tokenize=False) == original.apply_chat_template(chat, tokenize=False)
    assert (back.eos_token_id, back.bos_token_id, back.pad_token_id) == (2, 0, 0)
    assert back.decode([2, 5], skip_special_tokens=True) == original.decode([5])
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text())["eos_token_id"] == 2
    assert len(back) == len(original)  # the rows that pad the embedding are no tokens


def sentencepiece_like(prefix: bool) -> Tokenizer:
    """Byte fallback, spaces as U+2581: how Llama 2 and Gemma look in tokenizer.json."""
    tokenizer: Any = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space]) if prefix else space
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat and the other cats sat there too  in  space"] * 9, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_there_and_back(prefix: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    (tmp_path / "m").mkdir()
    original = PreTrainedTokenizerFast(
        tokenizer_object=sentencepiece_like(prefix), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    original.save_pretrained(tmp_path / "m")
    file = through_gguf(tmp_path / "m", 430, tmp_path)
    fields = {k.removeprefix("tokenizer.ggml."): f.value for k, f in file.fields.items()}
    assert fields["model"] == "llama" and fields["add_space_prefix"] is prefix
    assert [fields["token_type"][i] for i in (0, 1, 3, 258, 429)] == [2, 3, 6, 6, 5]
    scores = dict(zip(fields["tokens"], fields["scores"], strict=True))
    merges = json.loads((tmp_path / "m" / "tokenizer.json").read_text())["model"]["merges"]
    made = ["".join(pair) for pair in merges]
    assert [scores[m] for m in made] == sorted((scores[m] for m in made), reverse=True)
    (tmp_path / "back").mkdir()
    tokenizer = GGUFTokenizer({k: v for k, v in file.fields.items() if "add_bos" not in k}, "t.gguf")
    tokenizer.save(tmp_path / "back")
    back = AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in ["the cat sat there", "other  cats, too\n", "\u4f60 zzz \U0001f680", "</s>the cat"]:
        ids = original(text)["input_ids"]
        assert back(text)["input_ids"] == [1, *ids]  # SentencePiece models begin with BOS unless they say otherwise
        assert back.decode(ids) == original.decode(ids)


def test_a_sentencepiece_model_gives_its_own_scores(tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text").write_text("\n".join(["the cat sat on the mat", "and the other cats sat there too"] * 30))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    file = through_gguf(tmp_path, 304, tmp_path)
    spm: Any = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokens, scores, types = (file.fields[f"tokenizer.ggml.{k}"].value for k in ("tokens", "scores", "token_type"))
    assert tokens[:300] == [spm.IdToPiece(i) for i in range(300)] and tokens[303] == "[PAD303]"
    assert scores[:300] == pytest.approx([spm.GetScore(i) for i in range(300)])
    assert types[:4] == [2, 3, 3, 6] and types[299] == 1
    built = GGUFTokenizer(file.fields, "t.gguf").build()
    for text in ["the cat sat", "other mats there", "\u4f60 x"]:
        assert built.encode(text).ids == spm.Encode(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.tokens": None}, "no tokenizer"),
        ({"tokenizer.ggml.model": "rwkv"}, "rwkv"),
        ({"tokenizer.ggml.pre": "bloom"}, "bloom"),
        ({"tokenizer.ggml.merges": ["qq zz"]}, "makes no token"),
        ({"tokenizer.ggml.token_type": [1]}, "differ in number"),
    ],
)
def test_damaged_tokenizers(
    change: dict[str, Any], message: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    fields = dict(through_gguf(tiny_model("llama", layers=1), 384, tmp_path).fields)
    for key, value in change.items():
        if value is None:
            del fields[key]
        else:
            fields[key] = fields[key]._replace(value=value)
    with pytest.raises(DataError, match=message):
        GGUFTokenizer(fields, "t.gguf").build()


def test_more_tokens_than_rows_and_no_tokenizer(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no row"):
        through_gguf(tiny_model("llama", layers=1), 383, tmp_path)
    with pytest.raises(DataError, match="neither"):
        through_gguf(tmp_path, 383, tmp_path)
