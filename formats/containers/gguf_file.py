"""The GGUF file itself: a header parser that trusts nothing, and a writer that fills tensors in any order.

gguf-py's reader indexes what the file claims; here every count, length, dimension and offset is checked against the
size of the file before anything is allocated or looped over, so that a damaged or hostile file ends in a DataError.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from formats.errors import DataError

MAX_DIMS = 4
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


class Field(NamedTuple):
    """A metadata value with its stored type; item is the element type of an array."""

    value: Any
    type: GGUFValueType
    item: GGUFValueType | None = None


@dataclass(frozen=True)
class TensorInfo:
    """shape is [.., rows, columns], as in Python (GGUF stores it reversed)."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


class GGUFFile:
    """One open GGUF file: `fields`, `tensors`, and their bytes mapped from disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.stat().st_size < 24:
            raise DataError("the file is too short for a GGUF header", where=str(path))
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        self.fields: dict[str, Field] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._parse()

    def bytes_of(self, name: str, index: int | None = None) -> NDArray[Any]:
        """A tensor's bytes, uint8 [.., rows, bytes per row], copied into memory; of a stack, only the index-th."""
        info = self.tensors[name]
        shape, start, nbytes = info.shape, info.offset, info.nbytes
        if index is not None:
            shape, nbytes = shape[1:], nbytes // shape[0]
            start += index * nbytes
        return np.frombuffer(self._data, np.uint8, nbytes, start).reshape(*shape[:-1], -1).copy()

    def close(self) -> None:
        self._data.close()

    def _parse(self) -> None:
        magic, version, n_tensors, n_fields = self._unpack("<4sIQQ")
        if magic != b"GGUF":
            raise self._damaged("not a GGUF file (wrong magic)")
        if version not in (2, 3):
            raise self._damaged(f"GGUF version {version} is not supported (2 and 3 are; big-endian files are not)")
        self._fits(n_tensors, 24, "tensors")
        self._fits(n_fields, 13, "metadata fields")
        for _ in range(n_fields):
            key = self._string("a key")
            if key in self.fields:
                raise self._damaged(f'metadata "{key}" appears twice')
            self.fields[key] = self._value(key)
        self._parse_tensors(n_tensors)

    def _parse_tensors(self, count: int) -> None:
        align_field = self.fields.get("general.alignment", Field(gguf.GGUF_DEFAULT_ALIGNMENT, GGUFValueType.UINT32))
        align = align_field.value
        if not isinstance(align, int) or align < 1 or align & (align - 1):
            raise self._damaged(f"alignment {align} is not a power of two")
        infos = [self._tensor_info() for _ in range(count)]
        start = self._at + -self._at % align
        expected = 0
        for name, shape, kind, offset in infos:
            if name in self.tensors:
                raise self._damaged(f'tensor "{name}" appears twice')
            block, size = gguf.GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise self._damaged(f'tensor "{name}": rows of {shape[-1]} cannot be {kind.name} (blocks of {block})')
            nbytes = prod(shape) // block * size
            if offset != expected:
                raise self._damaged(f'tensor "{name}" lies at {offset}, its neighbours say {expected}')
            if start + offset + nbytes > len(self._data):
                raise self._damaged(f'tensor "{name}" {list(shape)} ends beyond the file', "download it again")
            self.tensors[name] = TensorInfo(shape, kind, start + offset, nbytes)
            expected = offset + nbytes + -nbytes % align
        if len(self._data) - start > expected:
            raise self._damaged(f"{len(self._data) - start - expected} bytes after the last tensor are unexplained")

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string("a tensor name")
        (n_dims,) = self._unpack("<I")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self._damaged(f'tensor "{name}" has {n_dims} dimensions')
        dims = self._unpack(f"<{n_dims}Q")
        kind, offset = self._unpack("<IQ")
        if kind not in GGMLQuantizationType._value2member_map_:
            raise self._damaged(f'tensor "{name}" has the unknown type {kind}')
        if min(dims) < 1:
            raise self._damaged(f'tensor "{name}" is empty: {list(dims)}')
        return name, tuple(reversed(dims)), GGMLQuantizationType(kind), offset

    def _value(self, key: str) -> Field:
        (raw,) = self._unpack("<I")
        kind = self._kind(key, raw)
        if kind == GGUFValueType.STRING:
            return Field(self._string(key), kind)
        if kind != GGUFValueType.ARRAY:
            return Field(self._array(key, kind, 1)[0], kind)
        raw, count = self._unpack("<IQ")
        item = self._kind(key, raw)
        if item == GGUFValueType.STRING:
            self._fits(count, 8, key)
            return Field([self._string(key) for _ in range(count)], kind, item)
        if item == GGUFValueType.ARRAY:
            raise self._damaged(f'metadata "{key}" is an array of arrays')
        return Field(self._array(key, item, count), kind, item)

    def _kind(self, key: str, raw: int) -> GGUFValueType:
        if raw not in GGUFValueType._value2member_map_:
            raise self._damaged(f'metadata "{key}" has the unknown type {raw}')
        return GGUFValueType(raw)

    def _array(self, key: str, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        self._fits(count, dtype.itemsize, key)
        values: list[Any] = np.frombuffer(self._data, dtype, count, self._at).tolist()
        self._at += count * dtype.itemsize
        return values

    def _string(self, what: str) -> str:
        (length,) = self._unpack("<Q")
        self._fits(length, 1, what)
        raw = self._data[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._damaged(f"{what} holds text that is not UTF-8") from None

    def _unpack(self, fmt: str) -> tuple[Any, ...]:
        size = struct.calcsize(fmt)
        self._fits(size, 1, "the header")
        self._at += size
        return struct.unpack_from(fmt, self._data, self._at - size)

    def _fits(self, count: int, size: int, what: str) -> None:
        if count * size > len(self._data) - self._at:
            raise self._damaged(
                f"{what}: {count} x {size} bytes claimed, {len(self._data) - self._at} left in the file"
            )

    def _damaged(self, what: str, how_to_fix: str = "") -> DataError:
        return DataError(what, where=f"{self.path} (byte {self._at})", how_to_fix=how_to_fix)


class GGUFFileWriter:
    """Writes the header at once; then each tensor, in any order, to its place."""

    def __init__(self, path: Path, header: gguf.GGUFWriter) -> None:
        """header: all metadata, and the tensors (`add_tensor_info`) in file order; no file opened yet."""
        header.write_header_to_file(path)
        header.write_kv_data_to_file()
        header.write_ti_data_to_file()
        assert header.fout is not None
        self._file = header.fout[0]
        self._offsets: dict[str, int] = {}
        at = self._padded(self._file.tell())
        for name, info in header.tensors[0].items():
            self._offsets[name] = at
            at += self._padded(info.nbytes)
        self._file.truncate(at)

    @staticmethod
    def _padded(n: int) -> int:
        return gguf.GGUFWriter.ggml_pad(n, gguf.GGUF_DEFAULT_ALIGNMENT)

    def write(self, name: str, data: NDArray[Any], at: int = 0) -> None:
        """Put bytes of a tensor, `at` bytes after its start."""
        self._file.seek(self._offsets[name] + at)
        self._file.write(np.ascontiguousarray(data).data)

    def close(self) -> None:
        self._file.close()
