"""Tokenizers: a Hugging Face directory <-> GGUF's tokenizer.* metadata.

Byte-level BPE carries a name for how text is split before merging ("pre-type"). llama.cpp's converter finds it by
hashing one vocabulary's output; here the splits themselves are compared on a text that tells all the known rules
apart, which also works for fine-tuned vocabularies. SentencePiece models are stored with scores. The converter writes
the same score for every piece when there is no tokenizer.model; that loses the order of merges, so ranks are used.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from gguf import TokenType

from formats.containers.gguf_file import Field
from formats.containers.gguf_metadata import SPECIAL
from formats.errors import DataError

_WORDS = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d|{_WORDS}|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CAMEL_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAMEL_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TYPES: dict[str, tuple[str, ...]] = {  # pre-type -> regular expressions that split, one after another
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_LINES}",),
    "llama-bpe": (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_LINES}",),
    "tekken": (rf"{_CAMEL_LOWER}|{_CAMEL_UPPER}|\p{{N}}|{_PATHS}",),
    "gpt-4o": (rf"{_CAMEL_LOWER}{_CONTRACTIONS}?|{_CAMEL_UPPER}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_PATHS}",),
    "default": (
        r"[\p{P}\$\+<=>\^~\|]+",
        rf"'s|'t|'re|'ve|'m|'ll|'d|{_WORDS}",
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    ),
}
_SAME_RULES = {  # names that llama.cpp treats like another
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone"), "smollm"),
    **dict.fromkeys(("mpt", "olmo", "phi-2", "jina-v2-en", "roberta-bpe", "gigachat"), "gpt-2"),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez"), "qwen2"),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx", "pixtral"), "llama-bpe"),
}
_WHOLE_WORDS = ("llama-bpe", "tekken", "gpt-4o")  # a word that is a token is taken whole, merges or not
_STARTS_WITH_BOS = ("llama-bpe", "tekken")
_PROBE = (
    "\n \n\n \t\t Hello WORLD helloWorld's it's IT'S we'LL 'twas  3 33 333 4444444 3.14 a/b //\n/ x\r\n\r\n (normal) "
    "$$+<=>^~|`` ------=== \u00e9t\u00e9 \u4f60\u597d123\u5929 \u0441\u043b\u043e\u0432\u043e\u0301 \U0001f680 "
    "?! \n...\n  end  "
)


def _splitter(pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in PRE_TYPES[pre]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def pre_type(tokenizer: Any, where: str = "tokenizer.json") -> str:
    """llama.cpp's name for how a `tokenizers.Tokenizer` splits text. DataError when it has none."""
    if tokenizer.pre_tokenizer is not None:
        splits = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(_PROBE)]
        for pre in PRE_TYPES:
            if splits == [piece for piece, _ in _splitter(pre).pre_tokenize_str(_PROBE)]:
                return pre
    raise DataError(
        "llama.cpp has no name for how this tokenizer splits text",
        where=where,
        how_to_fix=f"write another format (known: {', '.join(PRE_TYPES)})",
    )


def add_tokenizer(header: gguf.GGUFWriter, directory: Path, vocab_size: int) -> None:
    """Write the tokenizer of a Hugging Face directory. Rows of the embedding without a token become [PADn]."""
    path = directory / "tokenizer.json"
    spm_path = directory / "tokenizer.model"
    if not path.is_file() and not spm_path.is_file():
        raise DataError("neither tokenizer.json nor tokenizer.model", where=str(directory))
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"model": {}, "added_tokens": []}
    byte_level = bool(content["model"]) and not content["model"].get("byte_fallback") and not spm_path.is_file()
    if byte_level and content["model"].get("type") != "BPE":
        kind = content["model"].get("type")
        raise DataError(f"{kind} tokenizers are not supported in GGUF", where=str(path))
    pieces = _sentencepiece(spm_path) if spm_path.is_file() else _pieces(content["model"], byte_level)
    _overlay_added(pieces, content["added_tokens"], byte_level)
    if max(pieces) >= vocab_size:
        raise DataError(f"token {max(pieces)} has no row in an embedding of {vocab_size}", where=str(directory))
    rows = [pieces.get(i, (f"[PAD{i}]", -10000.0, TokenType.UNUSED)) for i in range(vocab_size)]
    header.add_tokenizer_model("gpt2" if byte_level else "llama")
    if byte_level:
        from tokenizers import Tokenizer

        header.add_tokenizer_pre(pre_type(Tokenizer.from_file(str(path)), where=str(path)))
    else:
        header.add_tokenizer_pre("default")
        header.add_token_scores([score for _, score, _ in rows])
        header.add_add_space_prefix(_prepends_space(content, spm_path))
    header.add_token_list([text for text, _, _ in rows])
    header.add_token_types([int(kind) for _, _, kind in rows])
    logging.getLogger("gguf.vocab").setLevel(logging.ERROR)  # it warns of templates it leaves out; we keep them
    special = gguf.SpecialVocab(directory, load_merges=byte_level, n_vocab=vocab_size)
    special.add_to_gguf(header, quiet=True)


Pieces = dict[int, tuple[str, float, TokenType]]
"""Token id -> text, score, type."""


def _pieces(model: Mapping[str, Any], byte_level: bool) -> Pieces:
    """The vocabulary of a tokenizer.json; a SentencePiece score is minus the rank of the merge that makes the piece."""
    vocab: dict[str, int] = model["vocab"]
    if byte_level:
        return {i: (text, 0.0, TokenType.NORMAL) for text, i in vocab.items()}
    rank: dict[str, int] = {}
    for i, merge in enumerate(model["merges"]):
        rank.setdefault("".join(merge.split(" ", 1) if isinstance(merge, str) else merge), i)
    pieces: Pieces = {}
    for text, i in vocab.items():
        kind = TokenType.NORMAL
        if text == model.get("unk_token"):
            kind = TokenType.UNKNOWN
        elif len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            kind = TokenType.BYTE
        pieces[i] = (text, -float(rank.get(text, 0)), kind)
    return pieces


def _sentencepiece(path: Path) -> Pieces:
    from sentencepiece import SentencePieceProcessor

    spm: Any = SentencePieceProcessor(model_file=str(path))
    pieces: Pieces = {}
    for i in range(spm.vocab_size()):
        kind = TokenType.NORMAL
        for is_kind, name in (
            (spm.IsUnknown, "UNKNOWN"),
            (spm.IsControl, "CONTROL"),
            (spm.IsUnused, "UNUSED"),
            (spm.IsByte, "BYTE"),
        ):
            if is_kind(i):
                kind = TokenType[name]
        pieces[i] = (spm.IdToPiece(i), spm.GetScore(i), kind)
    return pieces


def _overlay_added(pieces: Pieces, added: list[dict[str, Any]], byte_level: bool) -> None:
    """Added tokens are control tokens, or user-defined ones, which llama.cpp wants with real spaces."""
    for token in added:
        i, text = int(token["id"]), str(token["content"])
        if pieces.get(i, ("", 0.0, None))[2] == TokenType.UNKNOWN:
            continue
        control = token["special"] or _looks_special(text)
        kind = TokenType.CONTROL if control else TokenType.USER_DEFINED
        pieces[i] = (text if control else text.replace("\u2581", " "), 0.0 if byte_level else -1000.0, kind)


def _looks_special(text: str) -> bool:
    """Some models forget to mark control tokens; llama.cpp's converter knows these by their looks."""
    brackets = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    return text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or any(
        text.startswith(left) and text.endswith(right) for left, right in brackets
    )


def _prepends_space(content: Mapping[str, Any], spm_path: Path) -> bool:
    """Does a SentencePiece tokenizer put a space before the text? Llama 2's does, Gemma's does not."""
    if not content["model"]:
        from sentencepiece import SentencePieceProcessor

        spm: Any = SentencePieceProcessor(model_file=str(spm_path))
        return bool(spm.EncodeAsPieces("a")[0].startswith("\u2581"))
    text = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    return '"Prepend"' in text or '"prepend_scheme": "first"' in text or '"prepend_scheme": "always"' in text


class GGUFTokenizer:
    """The tokenizer.* fields of a file, made into what transformers loads."""

    def __init__(self, fields: Mapping[str, Field], where: str) -> None:
        self.where = where
        self.fields = {k.removeprefix("tokenizer."): f.value for k, f in fields.items() if k.startswith("tokenizer.")}
        self.tokens: list[str] = self._get("tokens", list, [])
        self.types: list[int] = self._get("token_type", list, [TokenType.NORMAL] * len(self.tokens))
        self.scores: list[float] = self._get("scores", list, [0.0] * len(self.tokens))
        if not self.tokens:
            raise DataError("the file holds no tokenizer", where=where, how_to_fix="use a complete GGUF model")
        if not len(self.tokens) == len(self.types) == len(self.scores):
            raise DataError("tokens, token types and scores differ in number", where=where)

    def _get(self, key: str, kind: type, default: Any) -> Any:
        value = self.fields.get(f"ggml.{key}", default)
        if not isinstance(value, kind):
            raise DataError(f'"tokenizer.ggml.{key}" is {value!r}', where=self.where)
        return value

    def special(self, key: str) -> int | None:
        """Id of a special token by Hugging Face's name for it ("bos"), if the file names one in range."""
        index = self.fields.get(f"ggml.{SPECIAL.get(key, key)}_token_id")
        return index if isinstance(index, int) and 0 <= index < len(self.tokens) else None

    def save(self, out: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json, chat template and generation_config.json."""
        from transformers import GenerationConfig, PreTrainedTokenizerFast

        names = {f"{key}_token": self.tokens[i] for key in SPECIAL if (i := self.special(key)) is not None}
        template = self.fields.get("chat_template")
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=self.build(),
            chat_template=template if isinstance(template, str) else None,
            clean_up_tokenization_spaces=False,
            **names,
        )
        tokenizer.save_pretrained(out)
        ids = {f"{key}_token_id": i for key in ("bos", "eos", "pad") if (i := self.special(key)) is not None}
        ends: list[int] = [i for key in ("eos", "eot") if (i := self.special(key)) is not None]
        if len(set(ends)) > 1:
            GenerationConfig(**(ids | {"eos_token_id": ends})).save_pretrained(out)
        else:
            GenerationConfig(**ids).save_pretrained(out)

    def build(self) -> Any:
        """A `tokenizers.Tokenizer`."""
        from tokenizers import AddedToken, processors

        model = self._get("model", str, "")
        if model == "gpt2":
            tokenizer, bos_default = self._byte_level()
        elif model == "llama":
            tokenizer, bos_default = self._sentencepiece(), True
        else:
            raise DataError(f'tokenizer model "{model}" is not supported', where=self.where)
        for kind, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
            texts = [self._text(i) for i, found in enumerate(self.types) if found == kind]
            tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
        bos = self.special("bos") if self._get("add_bos_token", bool, bos_default) else None
        eos = self.special("eos") if self._get("add_eos_token", bool, False) else None
        if bos is not None or eos is not None:
            left, right = ([self.tokens[i]] if i is not None else [] for i in (bos, eos))
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*left, "$A", *right],
                pair=[*left, "$A", *right, *(f"{t}:1" for t in left), "$B:1", *(f"{t}:1" for t in right)],
                special_tokens=[(self.tokens[i], i) for i in (bos, eos) if i is not None],
            )
        return tokenizer

    def _text(self, i: int) -> str:
        """A token as Hugging Face spells it: GGUF's user-defined SentencePiece tokens hold real spaces."""
        text = self.tokens[i]
        return text.replace(" ", "\u2581") if self.fields["ggml.model"] == "llama" else text

    def _vocab(self) -> dict[str, int]:
        """Text -> id, without the rows that only pad the embedding."""
        padding = {i for i, kind in enumerate(self.types) if kind == TokenType.UNUSED and self.tokens[i] == f"[PAD{i}]"}
        return {self._text(i): i for i in range(len(self.tokens)) if i not in padding}

    def _byte_level(self) -> tuple[Any, bool]:
        """The tokenizer, and whether its family starts with BOS when the file does not say."""
        from tokenizers import Tokenizer, decoders, models, normalizers

        pre = self._get("pre", str, "default")
        pre = _SAME_RULES.get(pre, pre)
        if pre not in PRE_TYPES:
            raise DataError(
                f'the pre-tokenizer "{pre}" is not known', where=self.where, how_to_fix="start from a Hugging Face copy"
            )
        vocab, merges = self._vocab(), []
        for merge in self._get("merges", list, []):
            left, _, right = merge.partition(" ")
            if left not in vocab or right not in vocab or left + right not in vocab:
                raise DataError(f'the merge "{merge}" makes no token', where=self.where)
            merges.append((left, right))
        tokenizer: Any = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS))
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = _splitter(pre)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer, pre in _STARTS_WITH_BOS

    def _sentencepiece(self) -> Any:
        """SentencePiece BPE: the pair that makes the best-scored piece merges first. User-defined pieces come before
        all others: SentencePiece matches them in the text itself."""
        from tokenizers import Tokenizer, decoders, models, normalizers

        vocab = self._vocab()
        ranked = []
        for text, i in vocab.items():
            if self.types[i] in (TokenType.NORMAL, TokenType.USER_DEFINED):
                first = self.types[i] == TokenType.USER_DEFINED
                pairs = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
                ranked += [
                    (not first, -self.scores[i], i, pair) for pair in pairs if pair[0] in vocab and pair[1] in vocab
                ]
        ranked.sort()
        unknown = self.special("unk")
        if unknown is None and TokenType.UNKNOWN in self.types:
            unknown = self.types.index(TokenType.UNKNOWN)
        tokenizer: Any = Tokenizer(
            models.BPE(
                vocab=vocab,
                merges=[pair for *_, pair in ranked],
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=TokenType.BYTE in self.types,
            )
        )
        prefix = self._get("add_space_prefix", bool, True)
        steps: list[Any] = [normalizers.Prepend("\u2581")] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
        strip = [decoders.Strip(" ", 1, 0)] if prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return tokenizer
