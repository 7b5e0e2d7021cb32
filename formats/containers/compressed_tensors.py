"""compressed-tensors directories, as vLLM, transformers and llm-compressor read them.

pack-quantized, per module: weight_packed int32 [out, ceil(in * bits / 32)] packed along in; weight_scale [out, groups];
weight_shape int64 [2]; asymmetric also weight_zero_point int32 [ceil(out * bits / 32), groups] packed along out. Its
numbers are signed with 2**(bits-1) added, which makes them our codes and zero points.

int-quantized (8-bit weights for 8-bit activations): weight int8 [out, in] = code - 128; weight_scale [out, 1].
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint, Container, Writer
from formats.containers.layout import (
    Layout,
    Parts,
    affine_grid,
    divisor_group,
    exact_half,
    matches,
    name_pattern,
    understood,
)
from formats.containers.safetensors import SafetensorsCheckpoint, SafetensorsWriter
from formats.containers.shards import Stored, read_json
from formats.errors import DataError, UsageError
from formats.grids.affine import AffineGrid
from formats.packing import pack_bits, unpack_bits, words_for
from formats.qtensor import Grid, QTensor

PACKED, INT8 = "pack-quantized", "int-quantized"
BITS = (4, 8)  # other widths changed layout between releases
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


class CompressedTensorsLayout(Layout):
    """groups: the `config_groups` of a file; activations: write for 8-bit dynamic activations."""

    marker = "weight_scale"
    suffixes = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")

    def __init__(self, groups: Mapping[str, Any] | None = None, activations: bool = False) -> None:
        self._groups = list((groups or {}).values())
        self._plain = activations

    def _scheme(self, module: str) -> Mapping[str, Any]:
        """The weight scheme of a module: targets that name it win over the class name "Linear"."""
        for group in self._groups:
            for target in group["targets"]:
                if target == module or (target.startswith("re:") and matches(target[3:], module)):
                    return group["weights"]
        for group in self._groups:
            if "Linear" in group["targets"]:
                return group["weights"]
        raise DataError(f'no config group targets "{module}"', where="quantization_config")

    def describe(self, parts: Parts) -> tuple[Grid, tuple[int, int]]:
        scheme = self._scheme(parts.module)
        if scheme.get("type", "int") != "int" or scheme.get("strategy") not in ("group", "channel"):
            raise DataError(
                f'"{parts.module}" is quantised as {scheme.get("type")} per {scheme.get("strategy")}, '
                "only integers per group or channel can be read",
                where=parts.where(),
            )
        group = scheme["group_size"] if scheme["strategy"] == "group" else None
        grid = affine_grid(scheme["num_bits"], group, scheme["symmetric"])
        if "weight_packed" not in parts:
            out, n = parts.size("weight", 2)
            return grid, (out, n)
        parts.size("weight_shape", 1)
        out, n = parts["weight_shape"].tolist()
        if min(out, n) < 1:
            raise DataError(f'"{parts.module}.weight_shape" is {[out, n]}', where=parts.where())
        return grid, (out, n)

    def stored(self, shape: tuple[int, int], grid: Grid, parts: Parts | None = None) -> Stored:
        assert isinstance(grid, AffineGrid)
        (out, n), bits = shape, grid.bits
        groups = -(-n // (grid.block or n))
        stored: Stored = {"weight_scale": (torch.float16, (out, groups))}
        if self._plain if parts is None else "weight_packed" not in parts:
            stored["weight"] = torch.int8, (out, n)
            zero = torch.int8, (out, groups)
        else:
            stored["weight_packed"] = torch.int32, (out, words_for(n, bits))
            stored["weight_shape"] = torch.int64, (2,)
            zero = torch.int32, (words_for(out, bits), groups)
        return stored if grid.symmetric else {**stored, "weight_zero_point": zero}

    def pack(self, name: str, value: QTensor) -> dict[str, Tensor]:
        if value.g_idx is not None:
            raise UsageError(
                "compressed-tensors cannot store a column order (release 0.20 removed it)",
                where=name,
                how_to_fix="quantise without act_order, or use the gptq format",
            )
        grid = value.grid
        assert isinstance(grid, AffineGrid)
        parts = {"weight_scale": exact_half(value.params["scale"], name)}
        if self._plain:
            return {**parts, "weight": _signed(value.codes, grid.bits)}
        parts["weight_packed"] = pack_bits(value.codes, grid.bits)
        parts["weight_shape"] = torch.tensor(value.shape)
        if not grid.symmetric:
            parts["weight_zero_point"] = pack_bits(value.params["zero"].T.contiguous(), grid.bits).T.contiguous()
        return parts

    def unpack(self, parts: Parts, shape: tuple[int, int], grid: Grid) -> QTensor:
        assert isinstance(grid, AffineGrid)
        (out, n), bits = shape, grid.bits
        params = {"scale": parts.scales("weight_scale")}
        plain = "weight_packed" not in parts
        if not grid.symmetric:
            zero = parts["weight_zero_point"]
            params["zero"] = (
                _unsigned(zero, bits) if plain else unpack_bits(zero.T.contiguous(), bits, out).T.contiguous()
            )
        codes = _unsigned(parts["weight"], bits) if plain else unpack_bits(parts["weight_packed"], bits, n)
        if max(int(t.max()) for t in (codes, params.get("zero", codes))) > grid.top:
            raise DataError(f'"{parts.module}" has codes of more than {bits} bits', where=parts.where())
        return QTensor(grid, codes, params, parts.permutation("weight_g_idx", grid, n))

    def quantization_config(self, linears: Mapping[str, Grid | None]) -> dict[str, Any]:
        grids = list(dict.fromkeys(grid for grid in linears.values() if isinstance(grid, AffineGrid)))
        groups = {}
        for i, grid in enumerate(grids):
            modules = [module for module, g in linears.items() if g == grid]
            targets = ["Linear"] if len(grids) == 1 else [f"re:{name_pattern(modules)}"]
            groups[f"group_{i}"] = {
                "targets": targets,
                "weights": _weights(grid),
                "input_activations": ACTIVATIONS if self._plain else None,
                "output_activations": None,
            }
        return {
            "quant_method": "compressed-tensors",
            "format": INT8 if self._plain else PACKED,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [module for module, grid in linears.items() if grid is None],
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


def _weights(grid: AffineGrid) -> dict[str, Any]:
    return {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": grid.symmetric,
        "strategy": "group" if grid.block else "channel",
        "group_size": grid.block,
        "dynamic": False,
    }


def _signed(codes: Tensor, bits: int) -> Tensor:
    return (codes.short() - (1 << bits - 1)).to(torch.int8)


def _unsigned(values: Tensor, bits: int) -> Tensor:
    return (values.short() + (1 << bits - 1)).to(torch.uint8)


class CompressedTensorsContainer(Container):
    """4 and 8 bits in any mixture; with options {"activations": "int8"} 8-bit weights for 8-bit activations."""

    name = "compressed-tensors"

    def substitute(self, name: str, shape: tuple[int, ...], grid: Grid) -> Grid:
        """shape: [out, in] of the linear. A group size that does not divide in is halved until it does."""
        if not isinstance(grid, AffineGrid) or grid.bits not in BITS:
            raise UsageError(
                f"compressed-tensors cannot store {grid}", where=name, how_to_fix="use a 4 or 8 bit affine grid"
            )
        return divisor_group(grid, shape[1], name)

    def open_writer(
        self, out: Path, source: Checkpoint, grids: Mapping[str, Grid], options: Mapping[str, Any]
    ) -> Writer:
        if source.arch.conv1d:
            raise UsageError(
                f"compressed-tensors readers know no Conv1D, which {source.arch.name} is made of",
                how_to_fix="use the gptq or gguf format",
            )
        activations = options.get("activations")
        if activations not in (None, "int8"):
            raise UsageError(f'unknown activations "{activations}"', where="output", how_to_fix='"int8" or nothing')
        other = sorted({grid.name for grid in grids.values()} - {"int8-channel-sym"})
        if activations and other:
            raise UsageError(
                f"8-bit activations go with int8-channel-sym weights, not with {', '.join(other)}", where="output"
            )
        return SafetensorsWriter(
            out, source, grids, options, CompressedTensorsLayout(activations=activations is not None)
        )

    def open_reader(self, path: Path) -> Checkpoint:
        config = read_json(path / "config.json")
        with understood(path):
            quantization = config["quantization_config"]
            if quantization["format"] not in (PACKED, INT8, "mixed-precision"):
                raise DataError(f'format "{quantization["format"]}" cannot be read', where=str(path / "config.json"))
            return SafetensorsCheckpoint(
                path, self.name, config, CompressedTensorsLayout(quantization["config_groups"])
            )
