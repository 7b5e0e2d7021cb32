"""bitsandbytes' serialised 4-bit directories: nf4 with double quantised block scales (QLoRA's storage).

Per module, under the weight's own name: the weight uint8 [out * in / 2, 1], two codes per byte, the first one high;
.absmax uint8 [blocks] and .nested_absmax float32 [ceil(blocks / 256)], blocks of 64 along the flattened matrix;
.quant_map float32 [16] and .nested_quant_map float32 [256], the two tables; .quant_state.bitsandbytes__nf4, JSON.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint, Container, Writer
from formats.containers.layout import Layout, Parts, understood
from formats.containers.safetensors import SafetensorsCheckpoint, SafetensorsWriter
from formats.containers.shards import Stored, read_json
from formats.errors import DataError, UsageError
from formats.grids.codebook import NF4, NestedCodebook
from formats.qtensor import Grid, QTensor

STATE = "weight.quant_state.bitsandbytes__nf4"
STATE_BYTES = 256  # readers skip the white space after the JSON, which lets its size be known beforehand


class BitsAndBytesLayout(Layout):
    """dtype: what readers decode to, the model's."""

    marker = STATE
    suffixes = (
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        STATE,
    )

    def __init__(self, dtype: str = "float16") -> None:
        self.dtype = dtype

    @staticmethod
    def split(stored: str) -> tuple[str, str]:
        module, weight, rest = stored.partition(".weight.")
        return (module, f"weight.{rest}") if weight else Layout.split(stored)

    def describe(self, parts: Parts) -> tuple[Grid, tuple[int, int]]:
        state = json.loads(bytes(parts[STATE].tolist()))
        out, n = state["shape"]
        if (state["quant_type"], state["blocksize"], state.get("nested_blocksize")) != ("nf4", NF4.width, NF4.group):
            raise DataError(
                f'"{parts.module}" is not nf4 in blocks of 64 with double quantisation', where=parts.where()
            )
        if not (isinstance(out, int) and isinstance(n, int) and out > 0 and n > 0 and n % NF4.width == 0):
            raise DataError(f'"{parts.module}" has shape {[out, n]}', where=parts.where())
        return NF4, (out, n)

    def stored(self, shape: tuple[int, int], grid: Grid, parts: Parts | None = None) -> Stored:
        out, n = shape
        blocks = out * n // NF4.width
        return {
            "weight": (torch.uint8, (out * n // 2, 1)),
            "weight.absmax": (torch.uint8, (blocks,)),
            "weight.quant_map": (torch.float32, (16,)),
            "weight.nested_absmax": (torch.float32, (-(-blocks // NF4.group),)),
            "weight.nested_quant_map": (torch.float32, (256,)),
            STATE: parts.meta[STATE] if parts else (torch.uint8, (STATE_BYTES,)),
        }

    def pack(self, name: str, value: QTensor) -> dict[str, Tensor]:
        if value.g_idx is not None:
            raise UsageError("bitsandbytes cannot store a column order", where=name)
        pairs = value.codes.reshape(-1, 2)
        state = {
            "quant_type": "nf4",
            "blocksize": NF4.width,
            "dtype": self.dtype,
            "shape": list(value.shape),
            "nested_blocksize": NF4.group,
            "nested_dtype": "float32",
            "nested_offset": value.params["offset"][0, 0].item(),
        }
        return {
            "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).contiguous(),
            "weight.absmax": value.params["sub_scale"].flatten(),
            "weight.quant_map": NF4.level_table,
            "weight.nested_absmax": value.params["scale"].flatten()[:: NF4.group].contiguous(),
            "weight.nested_quant_map": NF4.map,
            STATE: torch.tensor(list(json.dumps(state).encode().ljust(STATE_BYTES)), dtype=torch.uint8),
        }

    def unpack(self, parts: Parts, shape: tuple[int, int], grid: Grid) -> QTensor:
        assert isinstance(grid, NestedCodebook)
        for suffix, table in (("weight.quant_map", grid.level_table), ("weight.nested_quant_map", grid.map)):
            if not torch.equal(parts[suffix], table):
                raise DataError(f'"{parts.module}.{suffix}" is not the usual table', where=parts.where())
        out, n = shape
        offset = float(json.loads(bytes(parts[STATE].tolist()))["nested_offset"])
        scale = parts.finite("weight.nested_absmax").repeat_interleave(grid.group)[: out * n // grid.width]
        weight = parts["weight"]
        params = {
            "sub_scale": parts["weight.absmax"].view(out, -1),
            "scale": scale.view(out, -1),
            "offset": torch.full((out, n // grid.width), offset),
        }
        return QTensor(grid, torch.cat([weight >> 4, weight & 15], dim=1).view(out, n), params)

    def quantization_config(self, linears: Mapping[str, Grid | None]) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": self.dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": [module for module, grid in linears.items() if grid is None],
        }


class BitsAndBytesContainer(Container):
    """nf4 only."""

    name = "bitsandbytes"

    def substitute(self, name: str, shape: tuple[int, ...], grid: Grid) -> Grid:
        """shape: [out, in] of the linear."""
        if grid != NF4:
            raise UsageError(f"bitsandbytes stores nf4, not {grid}", where=name, how_to_fix="use grid: nf4")
        if shape[1] % NF4.width:
            raise UsageError(f"{shape[1]} input features are not whole blocks of {NF4.width}", where=name)
        return grid

    def open_writer(
        self, out: Path, source: Checkpoint, grids: Mapping[str, Grid], options: Mapping[str, Any]
    ) -> Writer:
        layout = BitsAndBytesLayout()
        writer = SafetensorsWriter(out, source, grids, options, layout)
        layout.dtype = str(writer.dtype).removeprefix("torch.")
        return writer

    def open_reader(self, path: Path) -> Checkpoint:
        with understood(path):
            return SafetensorsCheckpoint(path, self.name, read_json(path / "config.json"), BitsAndBytesLayout())
