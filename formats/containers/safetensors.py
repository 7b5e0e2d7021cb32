"""Hugging Face directories: config.json, tokenizer files and safetensors, single or sharded, streamed.

Plain float models, and what reads and writes quantised ones given their `Layout`.
"""

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.arch import arch_of, is_transposed
from formats.checkpoint import Checkpoint, Container, Writer
from formats.containers.layout import Layout, Parts, understood
from formats.containers.shards import Shards, ShardWriter, Stored, read_json, write_json
from formats.errors import DataError, UsageError
from formats.qtensor import Grid, QTensor

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates",
    "generation_config.json",
)
FLOATS = ("float32", "bfloat16", "float16")
_BUFFERS = re.compile(r"\.(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")  # saved by old releases, never weights


class SafetensorsCheckpoint(Checkpoint):
    """A model directory. `layout` decodes the matrices of a quantised one."""

    def __init__(self, path: Path, container: str, config: dict[str, Any], layout: Layout | None = None) -> None:
        self.path, self.container = path, container
        self.config = {k: v for k, v in config.items() if k != "quantization_config"}
        self.arch = arch_of(self.config, where=str(path / "config.json"))
        self._layout = layout
        self._shards = Shards(path)
        self._stored: dict[str, str] = {}  # Hugging Face name -> stored name
        self._quantised: dict[str, tuple[Grid, tuple[int, int], Parts]] = {}
        self._find_tensors()

    def _find_tensors(self) -> None:
        modules: dict[str, list[str]] = {}
        split = (self._layout or Layout).split
        for stored in self._shards:
            module, suffix = split(stored)
            modules.setdefault(module, []).append(suffix)
        prefix = self._missing_prefix(modules)
        for module, suffixes in modules.items():
            name = f"{prefix}{module}" if module != self.arch.head else module
            packed = self._layout is not None and self._layout.marker in suffixes
            if self._layout and packed:
                parts = Parts(self._shards, module, [s for s in suffixes if s in self._layout.suffixes])
                self._quantised[f"{name}.weight"] = *self._describe(parts), parts
                self._stored[f"{name}.weight"] = f"{module}.{self._layout.marker}"
            for suffix in suffixes:
                full = f"{name}.{suffix}"
                if not (self._layout and packed and suffix in self._layout.suffixes) and not _BUFFERS.search(full):
                    self._stored[full] = f"{module}.{suffix}"
        head = f"{self.arch.head}.weight"
        if self.config.get("tie_word_embeddings") and head not in self._quantised:
            self._stored.pop(head, None)

    def _missing_prefix(self, modules: Iterable[str]) -> str:
        """Checkpoints saved from a bare backbone ("wte.weight") lack what a causal model calls "transformer."."""
        prefix, _, rest = self.arch.embedding.partition(".")
        return f"{prefix}." if rest in modules and self.arch.embedding not in modules else ""

    def _describe(self, parts: Parts) -> tuple[Grid, tuple[int, int]]:
        """Grid and shape of a module, with every stored tensor checked against them."""
        assert self._layout is not None
        with understood(self.path):
            grid, shape = self._layout.describe(parts)
            stored = self._layout.stored(shape, grid, parts)
        for suffix, (dtype, expected) in stored.items():
            if suffix not in parts and suffix in self._layout.optional:
                continue
            if suffix not in parts:
                raise DataError(f'"{parts.module}.{suffix}" is missing', where=parts.where())
            found_dtype, found = parts.meta[suffix]
            floats = dtype.is_floating_point and found_dtype.is_floating_point  # others may store scales in bf16
            if found != expected or (found_dtype != dtype and not floats):
                raise DataError(
                    f'"{parts.module}.{suffix}" is {found_dtype} {list(found)}, but {grid} of {list(shape)} '
                    f"needs {dtype} {list(expected)}",
                    where=parts.where(),
                )
        return grid, shape

    def names(self) -> list[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Hugging Face's shape: [in, out] for a Conv1D weight, even where its QTensor is [out, in]."""
        if name in self._quantised:
            shape = self._quantised[name][1]
            return shape[::-1] if is_transposed(self.arch, name) else shape
        return self._shards.shape(self._stored[name])

    def stored_as(self, name: str) -> Grid | str:
        if name in self._quantised:
            return self._quantised[name][0]
        return str(self._shards.dtype(self._stored[name])).removeprefix("torch.")

    def read(self, name: str) -> Tensor | QTensor:
        if name in self._quantised:
            assert self._layout is not None
            grid, shape, parts = self._quantised[name]
            with understood(self.path):
                return self._layout.unpack(parts, shape, grid)
        return self._shards.read(self._stored[name])

    def save_tokenizer(self, out: Path) -> None:
        for pattern in TOKENIZER_FILES:
            for file in sorted(self.path.glob(pattern)):
                if file.is_dir():
                    shutil.copytree(file, out / file.name, dirs_exist_ok=True)
                else:
                    shutil.copyfile(file, out / file.name)

    def close(self) -> None:
        self._shards.close()


class SafetensorsWriter(Writer):
    """Writes a model directory. All sizes are known before the first tensor, so the headers are written and the disk
    space is taken at once; each tensor then goes straight to its place, in any order, and none is kept."""

    def __init__(
        self,
        out: Path,
        source: Checkpoint,
        grids: Mapping[str, Grid],
        options: Mapping[str, Any],
        layout: Layout | None = None,
    ) -> None:
        self.out, self.source, self.grids, self.layout = out, source, dict(grids), layout
        self.dtype = self._float_dtype(options.get("dtype"))
        self._expected = self._planned()
        self.files = ShardWriter(out, self._expected.values(), int(options.get("shard_size") or 0))

    def _float_dtype(self, wanted: str | None) -> torch.dtype | None:
        """Dtype of float tensors and config.json's "dtype"; None keeps every tensor as it is.

        Engines (transformers with compressed-tensors, vLLM for GPTQ, AWQ and compressed-tensors alike) allocate scales
        in the model's dtype and round what they load to it. Our scales are fp16: under a bf16 config they would lose
        three bits, and the engine would run other weights than those measured. So quantised models say float16, except
        families whose activations overflow it; `dtype: bfloat16` asks for the rounding knowingly.
        """
        if wanted is None and self.layout is not None:
            wanted = "bfloat16" if self.source.arch.extra.get("float16_overflows") else "float16"
        if wanted is not None and wanted not in FLOATS:
            raise UsageError(
                f'unknown dtype "{wanted}"', where="output.dtype", how_to_fix=f"one of {', '.join(FLOATS)}"
            )
        return getattr(torch, wanted) if wanted else None

    def _planned(self) -> dict[str, Stored]:
        """For each Hugging Face name, what will be stored (full names)."""
        names, arch = self.source.names(), self.source.arch
        head, embedding = f"{arch.head}.weight", f"{arch.embedding}.weight"
        planned: dict[str, Stored] = {}
        for name in [*names, *(g for g in self.grids if g not in names)]:
            if name not in names and name != head:
                raise UsageError(f'no tensor "{name}" in the model', where=str(self.source.path))
            shape = self.source.shape(name if name in names else embedding)  # a tied head may get its own codes
            if self.layout and name in self.grids:
                module = name.removesuffix(".weight")
                linear = (shape[1], shape[0]) if is_transposed(arch, name) else (shape[0], shape[1])
                parts = self.layout.stored(linear, self.grids[name])
                planned[name] = {f"{module}.{suffix}": spec for suffix, spec in parts.items()}
            else:
                planned[name] = {name: (self._dtype_of(name), shape)}
        return planned

    def _dtype_of(self, name: str) -> torch.dtype:
        stored = self.source.stored_as(name)
        if isinstance(stored, Grid):
            return self.dtype or torch.float16
        dtype: torch.dtype = getattr(torch, stored)
        return self.dtype if self.dtype and dtype.is_floating_point else dtype

    def write(self, name: str, value: Tensor | QTensor) -> None:
        expected = self._expected.pop(name)  # KeyError: a caller's fault, unknown or written twice
        if isinstance(value, QTensor) and self.layout and name in self.grids:
            assert value.grid == self.grids[name], f"{name}: {value.grid} instead of {self.grids[name]}"
            module = name.removesuffix(".weight")
            parts = {f"{module}.{suffix}": t for suffix, t in self.layout.pack(name, value).items()}
        else:
            if isinstance(value, QTensor):
                value = value.dequantize()
                value = value.T if is_transposed(self.source.arch, name) else value
            parts = {name: self._cast(name, value, expected[name][0])}
        assert parts.keys() == expected.keys(), f"{name}: {sorted(parts)} instead of {sorted(expected)}"
        for part, tensor in parts.items():
            self.files.store(part, tensor)

    def _cast(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        cast = value.to(dtype)
        if dtype == torch.float16 and value.dtype != dtype and cast.isinf().any() and not value.isinf().any():
            raise DataError(
                f'"{name}" has values beyond float16', where=str(self.source.path), how_to_fix="set dtype: bfloat16"
            )
        return cast

    def quantization_config(self) -> dict[str, Any] | None:
        """config.json's entry: what is quantised, and which linears are not."""
        if not self.layout or not self.grids:
            return None
        arch = self.source.arch
        linears: dict[str, Grid | None] = {}
        for name in [*self.source.names(), *self.grids]:
            module, _, suffix = name.rpartition(".")
            if suffix == "weight" and module not in (arch.embedding, "transformer.wpe") and self._is_matrix(name):
                linears[module] = self.grids.get(name)
        linears.setdefault(arch.head, None)  # a tied head is a linear module to the engines, too
        return self.layout.quantization_config(linears)

    def _is_matrix(self, name: str) -> bool:
        return name in self.grids or len(self.source.shape(name)) == 2

    def close(self) -> None:
        assert not self._expected, f"not written: {sorted(self._expected)[:5]}"
        config = dict(self.source.config)
        if self.dtype:
            config.pop("torch_dtype", None)
            config["dtype"] = str(self.dtype).removeprefix("torch.")
        if f"{self.source.arch.head}.weight" in self.grids:
            config["tie_word_embeddings"] = False
        quantization = self.quantization_config()
        if quantization:
            config["quantization_config"] = quantization
        self.files.close()
        write_json(self.out / "config.json", config)
        self.source.save_tokenizer(self.out)


class SafetensorsContainer(Container):
    """Plain floats: fp32, bf16 or fp16. A QTensor is written as the values it stands for."""

    name = "safetensors"

    def substitute(self, name: str, shape: tuple[int, ...], grid: Grid) -> Grid:
        return grid

    def open_writer(
        self, out: Path, source: Checkpoint, grids: Mapping[str, Grid], options: Mapping[str, Any]
    ) -> Writer:
        return SafetensorsWriter(out, source, grids, options)

    def open_reader(self, path: Path) -> Checkpoint:
        return SafetensorsCheckpoint(path, self.name, read_json(path / "config.json"))
