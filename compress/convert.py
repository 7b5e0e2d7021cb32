"""From one container to another without requantising: the codes stay what they were."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compress.report import OutputDirectory
from formats.arch import is_transposed
from formats.checkpoint import Checkpoint, Container
from formats.containers import CONTAINERS, open_checkpoint
from formats.errors import UsageError
from formats.grids import parse_grid
from formats.qtensor import Grid, QTensor

# Grids under two names: the same codes and parameters mean the same values.
_ALIASES = {"int4-g32-sym": "q4_0", "int5-g32-sym": "q5_0", "int8-g32-sym": "q8_0"}
_ALIASES |= {gguf: affine for affine, gguf in _ALIASES.items()}


def convert(
    model: str, out: Path, container: str, *, options: Mapping[str, Any], overwrite: bool = False
) -> dict[str, Any]:
    """Write `model` into directory `out` in another container.

    Quantised tensors keep their codes; into plain safetensors they go decoded. The result is read back and compared.
    Raises UsageError, naming the tensors, when the container cannot hold a grid as it is. Returns what was done.
    """
    target: Container = CONTAINERS[container]()
    with open_checkpoint(model) as source:
        quantised = {n: grid for n in source.names() if isinstance(grid := source.stored_as(n), Grid)}
        grids = {} if container == "safetensors" else _same_grids(source, target, quantised)
        if not grids and container not in ("safetensors", "gguf"):
            raise UsageError("the model is not quantised", str(source.path), "use `quantize run`")
        directory = OutputDirectory(out, overwrite=overwrite, needed=_size(source))
        with directory as folder:
            writer = target.open_writer(folder, source, grids, options)
            for name in source.names():
                writer.write(name, _relabelled(source, target, name, grids.get(name)))
            writer.close()
            with target.open_reader(weights_path(folder)) as reader:
                for name in grids:
                    _same_values(source.read(name), reader.read(name), name)
            directory.commit()
    return {
        "path": str(out),
        "container": container,
        "codes_kept": len(grids),
        "grids": sorted({grid.name for grid in grids.values()}),
        "decoded": len(quantised) - len(grids),
    }


def weights_path(folder: Path) -> Path:
    """What a container's reader opens in an output directory: the .gguf file, or the directory itself."""
    return next(folder.glob("*.gguf"), folder)


def _same_grids(source: Checkpoint, target: Container, quantised: Mapping[str, Grid]) -> dict[str, Grid]:
    """Every quantised tensor's grid, under the target's name for it."""
    kept: dict[str, Grid] = {}
    refused: dict[str, str] = {}
    for name, grid in quantised.items():
        shape = source.shape(name)
        linear = shape[::-1] if is_transposed(source.arch, name) else shape
        reason = f"{target.name} has no {grid}"
        for candidate in (grid, parse_grid(_ALIASES.get(grid.name, grid.name))):
            try:
                if target.substitute(name, linear, candidate) == candidate:
                    kept[name] = candidate
                    break
            except UsageError as error:
                reason = error.what
        if name not in kept:
            refused[name] = reason
    if refused:
        name, reason = next(iter(refused.items()))
        raise UsageError(
            f"{len(refused)} of {len(quantised)} quantised tensors cannot be stored without requantising; "
            f"the first is {name}: {reason}",
            where=f"--format {target.name}",
            how_to_fix="--format safetensors holds the decoded values; or quantise the original with `quantize run`",
        )
    return kept


def _relabelled(source: Checkpoint, target: Container, name: str, grid: Grid | None) -> torch.Tensor | QTensor:
    value = source.read(name)
    if grid is None or not isinstance(value, QTensor):
        return value
    if value.g_idx is not None and not target.stores_permutation:
        raise UsageError(
            f"{name} was quantised in activation order, which {target.name} cannot store",
            where=f"--format {target.name}",
            how_to_fix="use --format gptq or safetensors",
        )
    return replace(value, grid=grid)


def _same_values(before: torch.Tensor | QTensor, after: torch.Tensor | QTensor, name: str) -> None:
    assert isinstance(before, QTensor) and isinstance(after, QTensor), f"{name} lost its codes"
    assert torch.equal(before.dequantize(), after.dequantize()), f"{name} changed in conversion"


def _size(source: Checkpoint) -> int:
    files = [source.path] if source.path.is_file() else source.path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)
