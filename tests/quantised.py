"""Helpers of the container tests: quantise a tiny model by rounding, write it, and look at the values it stands for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from formats.arch import is_transposed
from formats.checkpoint import Checkpoint
from formats.containers import CONTAINERS, open_checkpoint
from formats.grids import parse_grid
from formats.qtensor import Grid, QTensor


def linears(source: Checkpoint) -> list[str]:
    """Weights of the quantisable linears of all blocks, the experts written out."""
    kinds = [name for stage in source.arch.stages for name in stage]
    patterns = [kind.replace("{e}", "0") for kind in kinds]

    def plain(name: str) -> str:
        return ".".join("0" if part.isdigit() and ".experts." in name else part for part in name.split("."))

    return [
        name
        for name in source.names()
        if name.endswith(".weight") and any(plain(name).endswith(f".{p}.weight") for p in patterns)
    ]


def random_qtensor(grid: Grid, w: torch.Tensor, g_idx: torch.Tensor | None = None) -> QTensor:
    """Round to nearest; with g_idx, groups are made of the columns it names."""
    if g_idx is None:
        params = grid.fit(w)
        return QTensor(grid, grid.encode(w, params), params)
    order = torch.argsort(g_idx.long(), stable=True)
    params = grid.fit(w[:, order])
    codes = torch.empty(w.shape, dtype=torch.uint8)
    codes[:, order] = grid.encode(w[:, order], params)
    return QTensor(grid, codes, params, g_idx.int())


def weight(source: Checkpoint, name: str) -> torch.Tensor:
    """The linear's matrix [out, in], float32."""
    w = source.read(name)
    assert isinstance(w, torch.Tensor)
    return (w.T if is_transposed(source.arch, name) else w).float().contiguous()


def write_model(
    source: Checkpoint, out: Path, container: str, values: dict[str, QTensor], **options: Any
) -> dict[str, QTensor]:
    """Write a model with some tensors quantised, in reverse order."""
    out.mkdir(parents=True, exist_ok=True)
    grids = {name: q.grid for name, q in values.items()}
    writer = CONTAINERS[container]().open_writer(out, source, grids, options)
    for name in reversed(list(dict.fromkeys([*source.names(), *values]))):
        writer.write(name, values[name] if name in values else source.read(name))
    writer.close()
    return values


def write_quantised(
    source: Checkpoint,
    out: Path,
    container: str,
    choose: "str | Callable[[str], str | None]",
    act_order: bool = False,
    **options: Any,
) -> dict[str, QTensor]:
    """Write a rounded model and return what was written. choose: a grid per weight name, None to leave it in floats."""
    values: dict[str, QTensor] = {}
    store = CONTAINERS[container]()
    for name in linears(source):
        spec = choose if isinstance(choose, str) else choose(name)
        if spec is not None:
            w = weight(source, name)
            grid = store.substitute(name, tuple(w.shape), parse_grid(spec))
            g_idx = None
            if act_order and grid.block and w.shape[1] > grid.block:
                g_idx = (torch.arange(w.shape[1]) // grid.block)[torch.randperm(w.shape[1])]
            values[name] = random_qtensor(grid, w, g_idx)
    return write_model(source, out, container, values, **options)


def same(a: QTensor, b: QTensor) -> bool:
    """Equal bit for bit."""
    return (
        a.grid == b.grid
        and torch.equal(a.codes, b.codes)
        and a.params.keys() == b.params.keys()
        and all(a.params[k].dtype == b.params[k].dtype and torch.equal(a.params[k], b.params[k]) for k in a.params)
        and (b.g_idx is None if a.g_idx is None else b.g_idx is not None and torch.equal(a.g_idx, b.g_idx))
    )


def read_back(out: Path, writes: dict[str, QTensor]) -> None:
    """What lies on disk is what was written."""
    with open_checkpoint(out) as model:
        for name, q in writes.items():
            stored = model.read(name)
            assert isinstance(stored, QTensor) and same(stored, q), name
            assert model.stored_as(name) == q.grid


def decoded(directory: Path, out: Path, rounded: str | None = None) -> Path:
    """A plain float32 directory of the values that a quantised one stands for.

    rounded: weights with this in their names are rounded to float16, as some readers do.
    """
    out.mkdir(parents=True, exist_ok=True)
    with open_checkpoint(directory) as model:
        writer = CONTAINERS["safetensors"]().open_writer(out, model, {}, {"dtype": "float32"})
        for name in model.names():
            value = model.read(name)
            if isinstance(value, QTensor) and rounded is not None and rounded in name:
                value = value.dequantize(torch.float16).float()
            writer.write(name, value)
        writer.close()
    return out


@torch.no_grad()
def logits(directory: Path) -> torch.Tensor:
    """float32 logits of a directory in transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.arange(3, 51).reshape(2, 24) * 7 % model.config.vocab_size
    result: torch.Tensor = model(tokens).logits
    return result
