"""AWQ directories, "gemm" version: 4 bits, one group size for the whole model.

Per module: qweight int32 [in, out / 8], eight columns of out per word in the order of `formats.packing.AWQ_ORDER`;
qzeros int32 [groups, out / 8] likewise, nothing subtracted; scales fp16 [groups, out].
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint, Container, Writer
from formats.containers.layout import Layout, Parts, affine_grid, divisor_group, exact_half, understood
from formats.containers.safetensors import SafetensorsCheckpoint, SafetensorsWriter
from formats.containers.shards import Stored, read_json
from formats.errors import DataError, UsageError
from formats.grids.affine import AffineGrid
from formats.packing import awq_order, awq_unorder, pack_bits, unpack_bits
from formats.qtensor import Grid, QTensor


class AWQLayout(Layout):
    """grid: the one grid of the model. Symmetric ones are stored with zero points of 8 and `sym` in the config."""

    marker = "qweight"
    suffixes = ("qweight", "qzeros", "scales")

    def __init__(self, grid: AffineGrid) -> None:
        self._grid = grid

    def describe(self, parts: Parts) -> tuple[Grid, tuple[int, int]]:
        n, words = parts.size("qweight", 2)
        return self._grid, (words * 8, n)

    def stored(self, shape: tuple[int, int], grid: Grid, parts: Parts | None = None) -> Stored:
        out, n = shape
        groups = n // (grid.block or n)
        return {
            "qweight": (torch.int32, (n, out // 8)),
            "qzeros": (torch.int32, (groups, out // 8)),
            "scales": (torch.float16, (groups, out)),
        }

    def pack(self, name: str, value: QTensor) -> dict[str, Tensor]:
        if value.g_idx is not None:
            raise UsageError("AWQ cannot store a column order", where=name, how_to_fix="quantise without act_order")
        scale = value.params["scale"]
        zero = value.params.get("zero", torch.full(scale.shape, 8, dtype=torch.uint8))
        return {
            "qweight": pack_bits(awq_order(value.codes.T.contiguous()), 4),
            "qzeros": pack_bits(awq_order(zero.T.contiguous()), 4),
            "scales": exact_half(scale, name).T.contiguous(),
        }

    def unpack(self, parts: Parts, shape: tuple[int, int], grid: Grid) -> QTensor:
        out = shape[0]
        params = {"scale": parts.scales("scales").T.contiguous()}
        zero = awq_unorder(unpack_bits(parts["qzeros"], 4, out)).T.contiguous()
        assert isinstance(grid, AffineGrid)
        if not grid.symmetric:
            params["zero"] = zero
        elif (zero != 8).any():
            raise DataError(f'"{parts.module}" is declared symmetric, but has other zero points', where=parts.where())
        return QTensor(grid, awq_unorder(unpack_bits(parts["qweight"], 4, out)).T.contiguous(), params)

    def quantization_config(self, linears: Mapping[str, Grid | None]) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": self._grid.block or -1,
            "zero_point": True,
            "sym": self._grid.symmetric,
            "modules_to_not_convert": [module for module, grid in linears.items() if grid is None],
        }


class AWQContainer(Container):
    """4 bits, the same grid for every quantised tensor."""

    name = "awq"

    def substitute(self, name: str, shape: tuple[int, ...], grid: Grid) -> Grid:
        """shape: [out, in] of the linear. A group size that does not divide in is halved until it does."""
        if not isinstance(grid, AffineGrid) or grid.bits != 4:
            raise UsageError(f"AWQ cannot store {grid}", where=name, how_to_fix="use a 4-bit affine grid")
        if shape[0] % 8:
            raise UsageError(
                f"AWQ packs eight outputs per word, {shape[0]} are not divisible by 8", where=name, how_to_fix="skip it"
            )
        return divisor_group(grid, shape[1], name)

    def open_writer(
        self, out: Path, source: Checkpoint, grids: Mapping[str, Grid], options: Mapping[str, Any]
    ) -> Writer:
        kinds = sorted({grid.name for grid in grids.values()})
        if len(kinds) != 1:
            raise UsageError(
                f"AWQ stores one grid per model, not {', '.join(kinds) or 'none'}",
                how_to_fix="use one group size that divides every tensor, or the gptq or compressed-tensors format",
            )
        grid = next(iter(grids.values()))
        assert isinstance(grid, AffineGrid)
        return SafetensorsWriter(out, source, grids, options, AWQLayout(grid))

    def open_reader(self, path: Path) -> Checkpoint:
        config = read_json(path / "config.json")
        with understood(path):
            quantization = config["quantization_config"]
            version = str(quantization.get("version", "gemm")).lower()
            if version != "gemm" or quantization["bits"] != 4:
                raise DataError(
                    f"AWQ version {version!r} of {quantization['bits']} bits cannot be read, only 4-bit gemm",
                    where=str(path / "config.json"),
                )
            grid = affine_grid(4, quantization["group_size"], quantization.get("sym", False))
        return SafetensorsCheckpoint(path, self.name, config, AWQLayout(grid))
