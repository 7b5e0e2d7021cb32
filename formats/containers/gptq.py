"""GPTQ directories, as gptqmodel, vLLM and transformers read them: checkpoint formats v1 ("gptq") and v2 ("gptq_v2").

Per module: qweight int32 [ceil(in * bits / 32), out] packed along in; qzeros int32 [groups, ceil(out * bits / 32)];
scales fp16 [groups, out]; g_idx int32 [in]. v1 stores zero points minus one. groups = ceil(in / group_size).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint, Container, Writer
from formats.containers.layout import (
    Layout,
    Parts,
    affine_grid,
    column_groups,
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

BITS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2")
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)


class GPTQLayout(Layout):
    """config: a file's quantization_config when reading. Writing collects what the config must say.

    v1: store zero points minus one. gptqmodel refuses v1 files with other than symmetric zero points unless it wrote
    them itself, and vLLM before v2 support read nothing else; so v1 is for symmetric models, and for those who ask.
    """

    marker = "qweight"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")
    optional = ("g_idx",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        checkpoint_format = config.get("checkpoint_format") or "gptq"
        if checkpoint_format not in FORMATS:
            raise DataError(f"GPTQ checkpoint_format {checkpoint_format!r} cannot be read")
        self.v1 = checkpoint_format == "gptq"
        self._defaults = {key: config.get(key) for key in ("bits", "group_size", "sym")}
        self._dynamic: dict[str, dict[str, Any]] = dict(config.get("dynamic") or {})
        self._act_order = False

    def describe(self, parts: Parts) -> tuple[Grid, tuple[int, int]]:
        rule = dict(self._defaults)
        for pattern, overrides in self._dynamic.items():
            if matches(pattern.removeprefix("+:").removeprefix("-:"), parts.module):
                rule.update(overrides)
                break
        grid = affine_grid(rule["bits"], rule["group_size"], rule["sym"])
        rows, out = parts.size("qweight", 2)
        n = parts.size("g_idx", 1)[0] if "g_idx" in parts else rows * 32 // grid.bits
        return grid, (out, n)

    def stored(self, shape: tuple[int, int], grid: Grid, parts: Parts | None = None) -> Stored:
        assert isinstance(grid, AffineGrid)
        (out, n), bits = shape, grid.bits
        groups = -(-n // (grid.block or n))
        return {
            "qweight": (torch.int32, (words_for(n, bits), out)),
            "qzeros": (torch.int32, (groups, words_for(out, bits))),
            "scales": (torch.float16, (groups, out)),
            "g_idx": (torch.int32, (n,)),
        }

    def pack(self, name: str, value: QTensor) -> dict[str, Tensor]:
        """qzeros come as v2, without the minus one: only `close` knows whether every zero point allows v1."""
        grid = value.grid
        assert isinstance(grid, AffineGrid)
        scale = value.params["scale"]
        if grid.symmetric:
            zero = torch.full(scale.shape, 1 << grid.bits - 1, dtype=torch.uint8)
        else:
            zero = value.params["zero"]
            self.v1 &= bool((zero > 0).all())
        natural = column_groups(grid, value.shape[1])
        g_idx = natural if value.g_idx is None else value.g_idx.int()
        self._act_order |= not torch.equal(g_idx, natural)
        return {
            "qweight": pack_bits(value.codes, grid.bits).T.contiguous(),
            "qzeros": pack_bits(zero.T.contiguous(), grid.bits),
            "scales": exact_half(scale, name).T.contiguous(),
            "g_idx": g_idx,
        }

    def unpack(self, parts: Parts, shape: tuple[int, int], grid: Grid) -> QTensor:
        assert isinstance(grid, AffineGrid)
        (out, n), bits = shape, grid.bits
        params = {"scale": parts.scales("scales").T.contiguous()}
        if grid.symmetric:
            # Engines do not look at the zero points of symmetric models; some writers label v2 ones as v1.
            stored, middle = unpack_bits(parts["qzeros"], bits, out), 1 << bits - 1
            if not ((stored == middle).all() or (self.v1 and (stored == middle - 1).all())):
                raise DataError(f'"{parts.module}" is declared symmetric but has zero points', where=parts.where())
        else:
            params["zero"] = self._zeros(parts["qzeros"], bits, out).T.contiguous()
        codes = unpack_bits(parts["qweight"].T.contiguous(), bits, n)
        return QTensor(grid, codes, params, parts.permutation("g_idx", grid, n))

    def _zeros(self, qzeros: Tensor, bits: int, out: int) -> Tensor:
        """Zero points uint8 [groups, out]."""
        if self.v1 and bits != 3:
            # Readers add one to each field of a whole word at once. Doing the same undoes a borrow, too: files exist
            # whose zero points of 0 were decremented.
            qzeros = qzeros + ((1 << 32) - 1) // ((1 << bits) - 1)
        zero = unpack_bits(qzeros, bits, out)
        return (zero + 1) & 7 if self.v1 and bits == 3 else zero

    def quantization_config(self, linears: Mapping[str, Grid | None]) -> dict[str, Any]:
        """The most frequent grid is the default; `dynamic` lists the others and the linears left in floats."""
        grids = [grid for grid in linears.values() if isinstance(grid, AffineGrid)]
        base = Counter(grids).most_common(1)[0][0]
        head = [module for module in linears if "." not in module]
        dynamic: dict[str, dict[str, Any]] = {}
        for grid in dict.fromkeys(linears.values()):
            modules = [module for module, g in linears.items() if g == grid and (grid or module not in head)]
            if not modules or grid == base:
                continue
            overrides = self._fields(grid) if isinstance(grid, AffineGrid) else {}
            dynamic[f"{'+' if grid else '-'}:{_pattern(modules)}"] = overrides
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq" if self.v1 else "gptq_v2",
            **self._fields(base),
            "desc_act": self._act_order,
            "pack_dtype": "int32",
            "lm_head": any(linears[module] for module in head),
            "true_sequential": True,
            "dynamic": dynamic,
            "meta": {"quantizer": ["bitwright"]},
        }

    def _fields(self, grid: AffineGrid) -> dict[str, Any]:
        return {"bits": grid.bits, "group_size": grid.block or -1, "sym": grid.symmetric}


def _pattern(modules: Iterable[str]) -> str:
    """Matches the modules, and the names under which vLLM looks up their fused matrices."""
    fused = {f"{parent}.{_FUSED[leaf]}" for parent, _, leaf in (m.rpartition(".") for m in modules) if leaf in _FUSED}
    return name_pattern([*modules, *sorted(fused)])


class GPTQWriter(SafetensorsWriter):
    def close(self) -> None:
        """v1 only where it can express all zero points: 0 minus 1 would borrow from the neighbouring code."""
        layout = self.layout
        assert isinstance(layout, GPTQLayout)
        if layout.v1:
            for name, grid in self.grids.items():
                assert isinstance(grid, AffineGrid)
                part = f"{name.removesuffix('.weight')}.qzeros"
                qzeros = self.files.load(part)
                out = self.files.shape(part.replace(".qzeros", ".scales"))[1]
                zero = unpack_bits(qzeros, grid.bits, out)
                self.files.store(part, pack_bits(zero - 1, grid.bits))
        super().close()


class GPTQContainer(Container):
    """2, 3, 4 and 8 bits, any group size (a ragged last group included), any mixture, and act_order.

    options: checkpoint_format "gptq" (v1) or "gptq_v2"; v1 gives way to v2 when a zero point of 0 occurs.
    """

    name = "gptq"
    stores_permutation = True

    def substitute(self, name: str, shape: tuple[int, ...], grid: Grid) -> Grid:
        """shape: [out, in] of the linear."""
        if not isinstance(grid, AffineGrid) or grid.bits not in BITS:
            raise UsageError(f"GPTQ cannot store {grid}", where=name, how_to_fix="use 2, 3, 4 or 8 bit affine grids")
        if grid.bits == 3 and (shape[0] % 32 or shape[1] % 32):
            raise UsageError(
                f"GPTQ packs 3-bit codes 32 at a time, {list(shape)} is not divisible",
                where=name,
                how_to_fix="use 2, 4 or 8 bits for this tensor, or skip it",
            )
        return grid

    def open_writer(
        self, out: Path, source: Checkpoint, grids: Mapping[str, Grid], options: Mapping[str, Any]
    ) -> Writer:
        symmetric = all(isinstance(grid, AffineGrid) and grid.symmetric for grid in grids.values())
        if options.get("checkpoint_format") not in (None, *FORMATS):
            raise UsageError(f"unknown checkpoint_format, one of {', '.join(FORMATS)}", where="output")
        checkpoint_format = options.get("checkpoint_format") or ("gptq" if symmetric else "gptq_v2")
        return GPTQWriter(out, source, grids, options, GPTQLayout({"checkpoint_format": checkpoint_format}))

    def open_reader(self, path: Path) -> Checkpoint:
        config = read_json(path / "config.json")
        with understood(path):
            return SafetensorsCheckpoint(path, self.name, config, GPTQLayout(config["quantization_config"]))
