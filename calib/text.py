"""Calibration text: files, `datasets` names or the model's own writing, packed into rows of tokens."""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calib.precision import matmul_dtype
from formats.checkpoint import Checkpoint
from formats.dense import dense_model
from formats.errors import DataError

LOOK = 4  # a source is read from its front until it has given this many times the tokens needed
FILE_SUFFIXES = (".txt", ".raw", ".md", ".json", ".jsonl", ".parquet")
Tokenizer = Any  # a transformers tokenizer; they share no useful base class
Document = str | list[dict[str, Any]]  # plain text, or a chat


@dataclass(frozen=True)
class CalibrationSet:
    """What a model is calibrated on, and where it came from.

    tokens  int64 [samples, length]
    source  the sources as the user named them, or that the model wrote the text itself
    sha256  of the files' bytes in order (as `sha256sum` gives for one file); of the documents used, for `datasets`;
            of the tokens, for generated text
    count   tokens the rows were chosen from
    """

    tokens: Tensor
    source: str
    sha256: str
    seed: int
    count: int
    generated: bool = False


def load_text(
    data: Sequence[str],
    tokenizer: Tokenizer,
    *,
    samples: int,
    length: int,
    seed: int,
    split: str = "train",
    column: str = "text",
    chat_template: bool = True,
) -> CalibrationSet:
    """Rows from files (.txt .jsonl .parquet; any other suffix is plain text) and `datasets` names ("allenai/c4:en").

    Documents are tokenised without special tokens, joined by the end-of-text token (a .txt file is one document), and
    cut front to back into rows. Where the tokenizer begins a text with BOS, each row does. If there are more rows than
    `samples`, a seeded random choice of them is taken, in text order; if there are fewer, all of them.

    Raises DataError for a source that cannot be read, or when all of them together do not fill one row.
    """
    digest = hashlib.sha256()
    bos = _bos(tokenizer)
    body = length - len(bos)
    tokens: list[int] = []
    for source in data:
        documents = _documents(source, digest, split, column, chars=6 * LOOK * samples * length)
        tokens += _tokenize(documents, tokenizer, LOOK * samples * length, source, chat_template)
    rows = len(tokens) // body
    if rows == 0:
        raise DataError(
            f"the text has {len(tokens)} tokens, but one sample needs {body}",
            where=", ".join(data),
            how_to_fix="give more text, or a smaller calibration length",
        )
    chosen = sorted(random.Random(seed).sample(range(rows), min(samples, rows)))
    table = torch.tensor([bos + tokens[r * body : (r + 1) * body] for r in chosen], dtype=torch.int64)
    return CalibrationSet(table, ", ".join(data), digest.hexdigest(), seed, len(tokens))


def _bos(tokenizer: Tokenizer) -> list[int]:
    """[BOS] if this tokenizer begins a text with it, else []."""
    ids = tokenizer("a").input_ids
    return ids[:1] if tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id] else []


def _tokenize(
    documents: Iterable[Document], tokenizer: Tokenizer, limit: int, source: str, chat_template: bool
) -> list[int]:
    """Tokens of the documents, joined by end-of-text, until there are `limit` of them."""
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    tokens: list[int] = []
    texts = (d if isinstance(d, str) else _render(d, tokenizer, source, chat_template) for d in documents)
    while len(tokens) < limit and (batch := list(islice(texts, 32))):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False).input_ids:
            tokens += (end if tokens else []) + ids
    return tokens[:limit]


def _render(messages: list[dict[str, Any]], tokenizer: Tokenizer, source: str, chat_template: bool) -> str:
    from jinja2 import TemplateError

    if not chat_template:
        return "\n\n".join(str(message.get("content", "")) for message in messages)
    if not tokenizer.chat_template:
        raise DataError(
            "the text has chat messages, but the model has no chat template",
            where=source,
            how_to_fix="set calibration.chat_template: false to join the messages' contents",
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, KeyError, TypeError) as error:
        raise DataError(f"the chat template refuses a conversation: {error}", where=source) from error


def _documents(source: str, digest: Any, split: str, column: str, chars: int) -> Iterator[Document]:
    """The documents of one source; feeds its bytes to the digest."""
    path = Path(source).expanduser()
    if path.is_file():
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        readers: dict[str, Callable[[], Iterator[Document]]] = {
            ".jsonl": lambda: _read_jsonl(path, column),
            ".parquet": lambda: _read_parquet(path, column),
        }
        return readers.get(path.suffix.lower(), lambda: _read_plain(path, chars))()
    if not path.exists() and (path.suffix.lower() in FILE_SUFFIXES or source.startswith(("/", ".", "~"))):
        raise DataError("no such text file", where=source)
    return _read_dataset(source, digest, split, column)


def _read_plain(path: Path, chars: int) -> Iterator[Document]:
    try:
        with path.open(encoding="utf-8") as file:
            yield file.read(chars)
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text: {error.reason} at byte {error.start}", where=str(path)) from error


def _read_jsonl(path: Path, column: str) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:  # bad JSON or bad UTF-8
                raise DataError(f"not a line of JSON: {error}", where=f"{path}:{number}") from error
            yield _document(record, column, f"{path}:{number}")


def _read_parquet(path: Path, column: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(256):
                for record in batch.to_pylist():
                    yield _document(record, column, str(path))
    except pyarrow.ArrowException as error:
        raise DataError(f"not a readable parquet file: {error}", where=str(path)) from error


def _read_dataset(source: str, digest: Any, split: str, column: str) -> Iterator[Document]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    name, _, config = source.partition(":")
    try:
        for record in load_dataset(name, config or None, split=split, streaming=True):
            document = _document(record, column, source)
            digest.update(json.dumps(document, ensure_ascii=False).encode())
            yield document
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"no such file, and not a data set that can be loaded: {str(error).splitlines()[0]}",
            where=source,
            how_to_fix="give a text file, or check the name, its split and the network",
        ) from error


def _document(record: Any, column: str, where: str) -> Document:
    """The text or the chat of one record."""
    if isinstance(record, dict):
        if isinstance(record.get("messages"), list) and (column == "text" or column not in record):
            return list(record["messages"])
        if isinstance(record.get(column), str):
            return str(record[column])
    found = f"it has {', '.join(map(str, record))}" if isinstance(record, dict) else "it is not an object"
    raise DataError(f'a record has neither text in "{column}" nor "messages"; {found}', where, "set calibration.column")


def generate_text(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    *,
    samples: int,
    length: int,
    seed: int,
    device: str = "cpu",
    batch: int = 64,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CalibrationSet:
    """Text the source model writes itself, for when there is none: seeded sampling at temperature 1.

    Each row begins with BOS, or with the end-of-text token, or else with a random token; an end of text within a row is
    followed by the next text. progress(rows done, rows wanted) is called after each batch. The whole model is in memory
    meanwhile.
    """
    model = dense_model(checkpoint, matmul_dtype(torch.device(device))).to(device)
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    vocab = min(model.get_input_embeddings().weight.shape[0], len(tokenizer))
    generator = torch.Generator().manual_seed(seed)
    rows: list[Tensor] = []
    for done in range(0, samples, batch):
        n = min(batch, samples - done)
        first = torch.full((n, 1), start) if start is not None else torch.randint(vocab, (n, 1), generator=generator)
        rows.append(_sample(model, first, length, vocab, generator))
        progress(done + n, samples)
    tokens = torch.cat(rows)
    digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    source = "written by the model itself (no calibration text was given)"
    return CalibrationSet(tokens, source, digest, seed, tokens.numel(), generated=True)


@torch.inference_mode()
def _sample(model: Any, ids: Tensor, length: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Continue each row of ids, int64 [n, 1], to `length` tokens drawn from the model's own distribution."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    while ids.shape[1] < length:
        logits = model(ids[:, -1:].to(model.device), cache=cache, use_cache=True).logits
        probabilities = logits[:, -1, :vocab].float().softmax(-1).cpu()
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return ids
