"""Everything that can fail late, tried early: before calibration starts."""

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from compress.plan import Plan
from formats.arch import Arch
from formats.checkpoint import Checkpoint
from formats.errors import DataError, ResourceError, UsageError
from formats.qtensor import Grid, QTensor

_PROBE = "The 3 quick brown foxes jump over 12 lazy dogs.\n"


def preflight(
    plan: Plan,
    checkpoint: Checkpoint,
    out: Path,
    tokenizer: Any,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Raise the error that the run would end with, if it can be known now. Cheap checks come first."""
    check_lengths(plan, checkpoint)
    check_disk(plan, out)
    check_memory(plan)
    check_tokenizer(checkpoint, tokenizer)
    check_round_trip(plan, checkpoint)
    check_finite(checkpoint, progress)


def check_lengths(plan: Plan, checkpoint: Checkpoint) -> None:
    """Samples and evaluation windows fit the model's context."""
    limit = checkpoint.config.get("max_position_embeddings") or checkpoint.config.get("n_positions")
    recipe = plan.recipe
    asked = {"calibration.length": recipe.calibration.length if recipe.needs_text else 0}
    if recipe.evaluate:
        asked["evaluate.perplexity.length"] = recipe.evaluate.perplexity.length
    for where, length in asked.items():
        if limit and length > limit:
            raise UsageError(f"{length} tokens, but the model's context is {limit}", where, f"at most {limit}")


def check_disk(plan: Plan, out: Path) -> None:
    """The output, and the work kept for --resume, fit on the disk."""
    needed = 2 * plan.nbytes + (16 << 20)
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"{needed / 1e6:.0f} MB of disk are needed, {free / 1e6:.0f} MB are free", str(folder), "write elsewhere"
        )


def check_memory(plan: Plan) -> None:
    import psutil

    peak, free = plan.peak_memory(), psutil.virtual_memory().available
    if peak > free:
        raise ResourceError(
            f"about {peak / 1e9:.1f} GB of memory are needed, {free / 1e9:.1f} GB are free",
            how_to_fix="use fewer or shorter calibration samples, leave out `evaluate`, or a larger machine",
        )


def check_tokenizer(checkpoint: Checkpoint, tokenizer: Any) -> None:
    """The tokenizer, as it will be saved, gives back what it is fed and fits the embedding."""
    ids = tokenizer(_PROBE, add_special_tokens=False).input_ids
    if not ids:
        raise DataError("the tokenizer turns text into nothing", where=str(checkpoint.path))
    vocabulary = checkpoint.shape(f"{checkpoint.arch.embedding}.weight")[0]
    if max(ids) >= vocabulary:
        raise DataError(
            f"the tokenizer gives token {max(ids)}, but the embedding has {vocabulary} rows",
            where=str(checkpoint.path),
            how_to_fix="use the tokenizer that belongs to the model",
        )
    again = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if "".join(again.split()).lower() != "".join(_PROBE.split()).lower():
        raise DataError(f"the tokenizer does not give back its text: {again!r}", where=str(checkpoint.path))


def check_finite(checkpoint: Checkpoint, progress: Callable[[int, int], None]) -> None:
    """No NaN and no infinity in any weight. Reads the whole model, tensor by tensor."""
    names = checkpoint.names()
    for done, name in enumerate(names, 1):
        value = checkpoint.read_dense(name)
        if value.numel() and not all(torch.isfinite(extreme) for extreme in torch.aminmax(value)):
            bad = int((~torch.isfinite(value)).sum())
            raise DataError(
                f"{name} has {bad} NaN or infinite values of {value.numel()}",
                where=str(checkpoint.path),
                how_to_fix="get an undamaged copy of the model",
            )
        progress(done, len(names))


class _OneBlock(Checkpoint):
    """Some tensors of a checkpoint, as a model of a single block."""

    def __init__(self, source: Checkpoint, names: list[str]) -> None:
        self.source, self._names = source, names
        self.path, self.container = source.path, source.container
        self.arch: Arch = source.arch
        one = {
            "num_hidden_layers": 1,
            "n_layer": 1,
            "layer_types": (source.config.get("layer_types") or [])[:1] or None,
        }
        self.config = {key: one.get(key, value) for key, value in source.config.items()}

    def names(self) -> list[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def stored_as(self, name: str) -> Grid | str:
        return self.source.stored_as(name)

    def read(self, name: str) -> torch.Tensor | QTensor:
        return self.source.read(name)

    def save_tokenizer(self, out: Path) -> None:
        self.source.save_tokenizer(out)


def check_round_trip(plan: Plan, checkpoint: Checkpoint) -> None:
    """One tensor, the smallest to be quantised, survives the real writer and the real reader bit for bit."""
    row = min((row for row in plan.rows if row.grid is not None), key=lambda row: row.nbytes)
    assert row.grid is not None
    first, embedding = f"{plan.arch.block.format(i=0)}.", f"{plan.arch.embedding}.weight"
    block = re.escape(plan.arch.block).replace(r"\{i\}", r"\d+") + r"\."
    probe = re.sub(f"^{block}", first, row.name)  # the writer sees a model of one block
    weight = checkpoint.read_linear(row.name)
    params = row.grid.fit(weight)
    tensor = QTensor(row.grid, row.grid.encode(weight, params), params)
    norm = next(name for name in checkpoint.names() if name.startswith(first) and len(checkpoint.shape(name)) == 1)
    needed = [embedding, norm] if plan.container.name == "gguf" else []  # its reader counts blocks and words
    few = _OneBlock(checkpoint, list(dict.fromkeys([probe, *needed])))
    with tempfile.TemporaryDirectory() as folder:
        writer = plan.container.open_writer(Path(folder), few, {probe: row.grid}, plan.options)
        for name in few.names():
            writer.write(name, tensor if name == probe else checkpoint.read(name))
        writer.close()
        with plan.container.open_reader(next(Path(folder).glob("*.gguf"), Path(folder))) as reader:
            again = reader.read(probe)
    if plan.container.name == "safetensors":  # holds the values, in its own dtype
        return
    same = isinstance(again, QTensor) and torch.equal(again.dequantize(), tensor.dequantize())
    assert same, f"{row.name} changed on its way through the {plan.container.name} container"
