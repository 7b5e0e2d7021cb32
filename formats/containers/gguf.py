"""GGUF models: one file for weights, config and tokenizer, as llama.cpp and its relatives load it."""

import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, LlamaFileType
from torch import Tensor

from formats.arch import Arch, is_transposed
from formats.checkpoint import Checkpoint, Container, Writer
from formats.containers.gguf_blocks import LAYOUTS, pack_blocks, unpack_blocks
from formats.containers.gguf_file import GGUFFile, GGUFFileWriter
from formats.containers.gguf_metadata import (
    Hyperparameters,
    add_hyperparameters,
    head_dim,
    hf_config,
    read_config,
    rope_factors,
)
from formats.containers.gguf_tokenizer import GGUFTokenizer, add_tokenizer
from formats.errors import DataError, UsageError
from formats.grids import parse_grid
from formats.qtensor import Grid, QTensor

FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ROPE_FREQS = "rope_freqs.weight"
_NARROW = {  # what replaces a 256-wide format in rows that 256 does not divide
    "q2_k": "iq4_nl",
    "q3_k": "iq4_nl",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
    "iq4_xs": "iq4_nl",
}
_NEAREST = {2: "q2_k", 3: "q3_k", 4: "q4_1 or q4_k", 5: "q5_1 or q5_k", 6: "q6_k", 7: "q8_0", 8: "q8_0"}
_FILE_TYPES = {
    "q2_k": LlamaFileType.MOSTLY_Q2_K,
    "q3_k": LlamaFileType.MOSTLY_Q3_K_M,
    "q4_k": LlamaFileType.MOSTLY_Q4_K_M,
    "q5_k": LlamaFileType.MOSTLY_Q5_K_M,
    "mxfp4": LlamaFileType.MOSTLY_MXFP4_MOE,
    "f32": LlamaFileType.ALL_F32,
}
_NOT_CARRIED = re.compile(r"split\.|quantize\.|general\.(architecture|alignment|file_type|quantization_version)$")


def gguf_name(arch: Arch, name: str) -> tuple[str, int | None]:
    """GGUF's name of a Hugging Face tensor, and the expert's slot in a stacked tensor."""
    module, _, suffix = name.rpartition(".")
    numbers = re.findall(r"\.(\d+)(?=\.)", name)
    template = re.sub(r"\.\d+(?=\.|$)", ".{i}", module, count=1)
    template = re.sub(r"\.\d+(?=\.|$)", ".{e}", template, count=1)
    if template not in arch.tensor_names:
        raise DataError(
            f'"{name}" has no place in a {arch.gguf_name} GGUF', how_to_fix="write another format than gguf"
        )
    expert = int(numbers[1]) if "{e}" in template else None
    return f"{arch.tensor_names[template].format(i=numbers[0] if numbers else '')}.{suffix}", expert


def hf_name(arch: Arch, name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor, with {e} left for experts; None if the family has no such tensor."""
    base, _, suffix = name.rpartition(".")
    number = re.search(r"\d+", base)
    template = re.sub(r"\d+", "{i}", base, count=1)
    for hf, ours in arch.tensor_names.items():
        if ours == template:
            return f"{hf.replace('{i}', number[0] if number else '')}.{suffix}"
    return None


def rotary_order(rows: int, width: int) -> Tensor:
    """Order of a query or key matrix's rows in GGUF's llama family: the two halves of each head interleaved. int64."""
    return torch.arange(rows).reshape(-1, 2, width // 2).transpose(1, 2).reshape(-1)


def reorder_rows(value: Tensor | QTensor, order: Tensor) -> Tensor | QTensor:
    """Rows of a matrix (or entries of a bias), with the parameters that belong to them."""
    if isinstance(value, Tensor):
        return value[order]
    params = {key: param[order] for key, param in value.params.items()}
    return QTensor(value.grid, value.codes[order], params, value.g_idx, value.meta)


class GGUFCheckpoint(Checkpoint):
    """A GGUF file, or all files of a split one."""

    container = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [GGUFFile(part) for part in split_parts(path)]
        self.fields = self.files[0].fields
        self._where: dict[str, GGUFFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in self._where:
                    raise DataError(f'tensor "{name}" is in two parts', where=str(file.path))
                self._where[name] = file
        parameters = Hyperparameters(self.fields, str(path))
        self.arch = parameters.arch()
        self._check_parts()
        tensors = {name: file.tensors[name] for name, file in self._where.items()}
        factors = torch.from_numpy(self._floats(ROPE_FREQS)).flatten() if ROPE_FREQS in tensors else None
        self.config = read_config(parameters, self.arch, tensors, factors)
        self._head_dim = int(self.config.get("head_dim", 0))
        self._stored: dict[str, tuple[str, int | None]] = {}  # Hugging Face name -> GGUF name, expert
        self._find_tensors()

    def _check_parts(self) -> None:
        count = self.fields.get("split.tensors.count")
        if len(self.files) > 1 and count is not None and count.value != len(self._where):
            raise DataError(f"{len(self._where)} tensors in the parts, {count.value} expected", where=str(self.path))

    def _find_tensors(self) -> None:
        for stored, file in self._where.items():
            if stored == ROPE_FREQS:
                continue
            name = hf_name(self.arch, stored)
            if name is None:
                raise DataError(f'tensor "{stored}" is not known for {self.arch.name}', where=str(file.path))
            if "{e}" not in name:
                self._stored[name] = (stored, None)
            elif len(shape := file.tensors[stored].shape) == 3:
                self._stored |= {name.replace("{e}", str(e)): (stored, e) for e in range(shape[0])}
            else:
                raise DataError(f'"{stored}" {list(shape)} is no stack of experts', where=str(file.path))

    def names(self) -> list[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        stored, expert = self._stored[name]
        shape = self._where[stored].tensors[stored].shape
        if expert is not None:
            return shape[1:]
        return shape[::-1] if is_transposed(self.arch, name) else shape

    def stored_as(self, name: str) -> Grid | str:
        stored, _ = self._stored[name]
        kind = self._where[stored].tensors[stored].type.name
        if kind.lower() in LAYOUTS and len(self.shape(name)) == 2:
            return parse_grid(kind.lower())
        return next((dtype for dtype, ours in FLOATS.items() if ours == kind), "float32")

    def read(self, name: str) -> Tensor | QTensor:
        """A matrix on one of our grids as a QTensor; other quantised types come decoded, as float32."""
        stored, expert = self._stored[name]
        value: Tensor | QTensor
        if isinstance(self.stored_as(name), Grid):
            data = self._where[stored].bytes_of(stored, expert)
            value = unpack_blocks(self._where[stored].tensors[stored].type.name.lower(), data)
        else:
            value = torch.from_numpy(self._floats(stored, expert)).to(getattr(torch, str(self.stored_as(name))))
            if is_transposed(self.arch, name):
                value = value.T.contiguous()
        return from_gguf(self.arch, name, value, self._head_dim)

    def _floats(self, stored: str, expert: int | None = None) -> np.ndarray[Any, Any]:
        file = self._where[stored]
        kind = file.tensors[stored].type
        try:
            # bfloat16 and float16 survive the way through float32 unchanged
            return gguf.dequantize(file.bytes_of(stored, expert), kind)
        except (NotImplementedError, ValueError):
            raise DataError(
                f'"{stored}" is stored as {kind.name}, which cannot be decoded', where=str(file.path)
            ) from None

    def save_tokenizer(self, out: Path) -> None:
        GGUFTokenizer(self.fields, str(self.path)).save(out)

    def close(self) -> None:
        for file in self.files:
            file.close()


def split_parts(path: Path) -> list[Path]:
    """The files of a model: all "NAME-00001-of-0000N.gguf" beside the one given."""
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if not match:
        return [path]
    parts = [path.with_name(f"{match[1]}-{i:05}-of-{match[2]}.gguf") for i in range(1, int(match[2]) + 1)]
    for part in parts:
        if not part.is_file():
            raise DataError(f'part "{part.name}" of the split model is missing', where=str(path.parent))
    return parts


def to_gguf(arch: Arch, name: str, value: Tensor | QTensor, width: int) -> Tensor | QTensor:
    """A tensor as GGUF holds it: rotary rows interleaved, norms shifted. width: of a head."""
    module = name.rpartition(".")[0]
    if module.endswith(arch.rotary_permuted) and arch.rotary_permuted:
        return reorder_rows(value, rotary_order(value.shape[0], width))
    if arch.norm_offset and module.endswith("norm"):
        assert isinstance(value, Tensor)
        return value.float() + arch.norm_offset
    return value


def from_gguf(arch: Arch, name: str, value: Tensor | QTensor, width: int) -> Tensor | QTensor:
    """The inverse of `to_gguf`."""
    module = name.rpartition(".")[0]
    if module.endswith(arch.rotary_permuted) and arch.rotary_permuted:
        if value.shape[0] % width:
            raise DataError(f'"{name}" has {value.shape[0]} rows, not whole heads of {width}')
        return reorder_rows(value, torch.argsort(rotary_order(value.shape[0], width)))
    if arch.norm_offset and module.endswith("norm"):
        assert isinstance(value, Tensor)
        return value - arch.norm_offset
    return value


class GGUFWriter(Writer):
    """Writes one file: the header from what is known beforehand, then tensors in any order.

    options: name of the file ("model"); dtype of float matrices (the source's); imatrix, the provenance that
    llama-quantize records: {file, dataset, entries_count, chunks_count}.
    """

    def __init__(self, out: Path, source: Checkpoint, grids: Mapping[str, Grid], options: Mapping[str, Any]) -> None:
        self.arch = source.arch
        self._grids = dict(grids)
        hf = hf_config(source.config)
        self._head_dim = head_dim(hf) if self.arch.rotary_permuted else 0
        self._expected = {*source.names(), *grids}
        self._types: dict[str, GGMLQuantizationType] = {}
        header = gguf.GGUFWriter(None, self.arch.gguf_name)
        factors = rope_factors(source.config, self.arch)
        if factors is not None:
            header.add_tensor_info(ROPE_FREQS, factors.shape, np.dtype(np.float32), factors.nbytes)
        self._add_tensors(header, source, options.get("dtype"))
        self._add_metadata(header, source, options)
        self._file = GGUFFileWriter(out / f"{options.get('name') or 'model'}.gguf", header)
        if factors is not None:
            self._file.write(ROPE_FREQS, factors.numpy())

    def _add_tensors(self, header: gguf.GGUFWriter, source: Checkpoint, dtype: str | None) -> None:
        if dtype is not None and dtype not in FLOATS:
            raise UsageError(f'unknown dtype "{dtype}"', where="output.dtype", how_to_fix=f"one of {', '.join(FLOATS)}")
        shapes: dict[str, tuple[int, ...]] = {}
        listed = source.names()
        for name in [*listed, *(name for name in self._grids if name not in listed)]:
            stored, expert = gguf_name(self.arch, name)
            shape = source.shape(name if name in listed else f"{self.arch.embedding}.weight")  # a tied head, untied
            shape = shape[::-1] if is_transposed(self.arch, name) else shape
            kind = self._type(name, stored, shape, source, dtype)
            if expert is not None:
                before = shapes.get(stored, (0,))
                shape = (max(before[0], expert + 1), *shape)
                if self._types.setdefault(stored, kind) != kind:
                    raise UsageError(
                        f"{stored}: experts share one type, got {self._types[stored].name} and {kind.name}",
                        how_to_fix="override all experts of a layer alike",
                    )
            self._types[stored], shapes[stored] = kind, shape
        for stored, shape in shapes.items():
            block, size = gguf.GGML_QUANT_SIZES[self._types[stored]]
            nbytes = int(np.prod(shape, dtype=np.int64)) // block * size
            header.add_tensor_info(stored, shape, np.dtype(np.float32), nbytes, raw_dtype=self._types[stored])

    def _type(
        self, name: str, stored: str, shape: tuple[int, ...], source: Checkpoint, dtype: str | None
    ) -> GGMLQuantizationType:
        """Quantised as planned; vectors, norms, routers and positions float32; the rest `dtype` or as in the source."""
        if name in self._grids:
            grid = self._grids[name].name
            assert grid in LAYOUTS, f"{name}: {grid} was not substituted"
            return GGMLQuantizationType[grid.upper()]
        if len(shape) == 1 or stored.endswith(("_norm.weight", "ffn_gate_inp.weight", "position_embd.weight")):
            return GGMLQuantizationType.F32
        found = source.stored_as(name)
        return GGMLQuantizationType[FLOATS[dtype or ("float32" if isinstance(found, Grid) else found)]]

    def _add_metadata(self, header: gguf.GGUFWriter, source: Checkpoint, options: Mapping[str, Any]) -> None:
        if isinstance(source, GGUFCheckpoint):
            for key, field in source.fields.items():
                if not _NOT_CARRIED.match(key):
                    header.add_key_value(key, field.value, field.type, field.item)
        else:
            header.add_type(gguf.GGUFType.MODEL)
            sizes = header.get_total_parameter_count()
            metadata = gguf.Metadata.load(model_path=source.path, total_params=sizes[0])
            metadata.name = metadata.name or source.path.name
            metadata.size_label = metadata.size_label or gguf.size_label(*sizes)
            metadata.set_gguf_meta_model(header)
            add_hyperparameters(header, source.config, self.arch)
            rows = source.shape(f"{self.arch.embedding}.weight")[0]
            with tempfile.TemporaryDirectory() as folder:  # a part of a model may stand for a GGUF file
                if not source.path.is_dir():
                    source.save_tokenizer(Path(folder))
                add_tokenizer(header, source.path if source.path.is_dir() else Path(folder), rows)
        header.add_quantization_version(gguf.GGML_QUANT_VERSION)
        header.add_file_type(file_type(self._types.values()))
        for key, value in dict(options.get("imatrix") or {}).items():
            add = header.add_string if isinstance(value, str) else header.add_int32
            add(f"quantize.imatrix.{key}", value)

    def write(self, name: str, value: Tensor | QTensor) -> None:
        self._expected.remove(name)  # KeyError: a caller's fault, unknown or written twice
        stored, expert = gguf_name(self.arch, name)
        kind = self._types[stored]
        if isinstance(value, QTensor) and name in self._grids:
            assert value.grid == self._grids[name] and value.g_idx is None, f"{name}: {value.grid}, or permuted"
        else:
            assert name not in self._grids, f"{name}: a float tensor instead of {self._grids[name]}"
            if isinstance(value, QTensor):
                value = value.dequantize()
            elif is_transposed(self.arch, name):
                value = value.T
        value = to_gguf(self.arch, name, value, self._head_dim)
        data = pack_blocks(value) if isinstance(value, QTensor) else float_bytes(value, kind)
        self._file.write(stored, data, at=(expert or 0) * data.nbytes)

    def close(self) -> None:
        assert not self._expected, f"not written: {sorted(self._expected)[:5]}"
        self._file.close()


def float_bytes(value: Tensor, kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """A float tensor's bytes in F32, F16 or BF16."""
    dtype = next(getattr(torch, name) for name, ours in FLOATS.items() if ours == kind.name)
    return value.detach().cpu().to(dtype).contiguous().view(torch.uint8).numpy()


def file_type(types: Iterable[GGMLQuantizationType]) -> LlamaFileType:
    """The label of a file: the type of most of its tensors, quantised ones first, then 16-bit floats."""
    names = [kind.name.lower() for kind in types]
    quantised = [n for n in names if n in LAYOUTS] or [n for n in names if n != "f32"] or names
    most = max(sorted(set(quantised)), key=quantised.count)
    return _FILE_TYPES[most] if most in _FILE_TYPES else LlamaFileType[f"MOSTLY_{most.upper()}"]


class GGUFContainer(Container):
    """llama.cpp's format."""

    name = "gguf"

    def substitute(self, name: str, shape: tuple[int, ...], grid: Grid) -> Grid:
        """shape: [out, in]."""
        columns = shape[-1]
        if grid.name not in LAYOUTS:
            bits = getattr(grid, "bits", 4)
            raise UsageError(
                f"{grid.name} cannot be stored in GGUF", where=name, how_to_fix=f"use grid: {_NEAREST[bits]}"
            )
        stored = grid if columns % (grid.block or 1) == 0 else parse_grid(_NARROW.get(grid.name, grid.name))
        if columns % (stored.block or 1):
            raise UsageError(
                f"rows of {columns} cannot be stored in GGUF's blocks of 32", where=name, how_to_fix="skip this tensor"
            )
        return stored

    def open_writer(
        self, out: Path, source: Checkpoint, grids: Mapping[str, Grid], options: Mapping[str, Any]
    ) -> Writer:
        return GGUFWriter(out, source, grids, options)

    def open_reader(self, path: Path) -> Checkpoint:
        """path: a .gguf file, or a directory with one model in it."""
        if path.is_dir():
            files = sorted(
                p for p in path.glob("*.gguf") if not re.search(r"-\d{5}-of-", p.name) or "-00001-of-" in p.name
            )
            if len(files) != 1:
                raise DataError(
                    f"{len(files)} GGUF models in the directory", where=str(path), how_to_fix="name one file"
                )
            path = files[0]
        if not path.is_file():
            raise DataError("no such file", where=str(path))
        return GGUFCheckpoint(path)
