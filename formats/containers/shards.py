"""Safetensors files of one directory, single or sharded: mapped for reading, written in place, any order, nothing kept.

Errors name the file. Nothing read from a header or an index is trusted before the library or we have checked it.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from formats.errors import DataError, ResourceError
from formats.packing import flat

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

Stored = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor a module is stored as, by suffix ("qweight", "scales", ..)."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; DataError when it is missing, damaged or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError("file is missing", where=str(path), how_to_fix="complete the model directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON ({error})", where=str(path)) from None
    if not isinstance(value, dict):
        raise DataError("not a JSON object", where=str(path))
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


MAPPED = 64 << 20  # bytes read from a map before it is made anew


class Shards:
    """The tensors of a directory's safetensors files (or of one of them) by stored name, mapped into memory."""

    def __init__(self, path: Path, file: str | None = None) -> None:
        self.path = path
        self._file_of: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        self._mapped = 0
        self._meta: Stored = {}
        wanted: dict[str, set[str]] = {}
        for name, holder in (self._names_in(file) if file else self._weight_map()).items():
            wanted.setdefault(holder, set()).add(name)
        for holder, names in wanted.items():
            self._read_header(holder, names)

    def _weight_map(self) -> dict[str, str]:
        if (self.path / INDEX).exists():
            weight_map = read_json(self.path / INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise DataError('no "weight_map"', where=str(self.path / INDEX))
            for name, file in weight_map.items():
                # A file name from an untrusted index must not lead out of the directory.
                if not isinstance(file, str) or Path(file).name != file:
                    raise DataError(f'shard name {file!r} of "{name}" is not a file name', where=str(self.path / INDEX))
            return weight_map
        if (self.path / SINGLE).exists():
            return self._names_in(SINGLE)
        raise DataError(
            "no safetensors weights",
            where=str(self.path),
            how_to_fix=f"the directory needs {SINGLE} or {INDEX} (pickled .bin weights are not read)",
        )

    def _names_in(self, file: str) -> dict[str, str]:
        return dict.fromkeys(self._handle(file).keys(), file)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(str(self.path / file), framework="pt")
            except FileNotFoundError:
                raise DataError("shard is missing", where=str(self.path / file)) from None
            except (SafetensorError, OSError) as error:
                raise DataError(
                    f"damaged or truncated safetensors file ({error})",
                    where=str(self.path / file),
                    how_to_fix="fetch the file again",
                ) from None
        return self._open[file]

    def _read_header(self, file: str, wanted: set[str]) -> None:
        handle = self._handle(file)
        present = handle.offset_keys()
        missing = wanted.difference(present)
        if missing:
            raise DataError(f'tensor "{min(missing)}" is not in the file the index names', str(self.path / file))
        for name in present:
            if name not in wanted:
                continue
            view = handle.get_slice(name)
            dtype = view.get_dtype()
            if dtype not in DTYPES:
                raise DataError(f'dtype {dtype} of "{name}" is not supported', where=str(self.path / file))
            self._file_of[name] = file
            self._meta[name] = DTYPES[dtype], tuple(view.get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._meta)

    def dtype(self, name: str) -> torch.dtype:
        return self._meta[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._meta[name][1]

    def where(self, name: str) -> str:
        return str(self.path / self._file_of[name])

    def read(self, name: str) -> Tensor:
        file = self._file_of[name]
        tensor: Tensor = self._handle(file).get_tensor(name)
        self._mapped += tensor.nbytes
        if self._mapped > MAPPED:  # pages once read count as ours for as long as the file is mapped
            self._open.pop(file)
            self._mapped = 0
        return tensor

    def close(self) -> None:
        self._open.clear()


@dataclass
class _Slot:
    """Where one stored tensor lies: absolute offset in a file."""

    file: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ShardWriter:
    """Writes tensors whose dtypes and shapes are all known beforehand: headers are written and disk space is reserved
    at once, then each tensor goes straight to its place.

    groups: tensors that stay together in one file. shard_size: bytes per file, 0 for a single file.
    Raises ResourceError when the disk cannot hold them.
    """

    def __init__(self, out: Path, groups: Iterable[Stored], shard_size: int = 0) -> None:
        self.out = out
        self._slots: dict[str, _Slot] = {}
        self._fds: dict[str, int] = {}
        shards: list[Stored] = [{}]
        size = 0
        for group in groups:
            nbytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in group.values())
            if shard_size and shards[-1] and size + nbytes > shard_size:
                shards.append({})
                size = 0
            shards[-1].update(group)
            size += nbytes
        for i, shard in enumerate(shards):
            self._start(SINGLE if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors", shard)

    def _start(self, file: str, tensors: Stored) -> None:
        # The format allows no gaps, so widest elements first keeps every tensor aligned.
        ordered = sorted(tensors.items(), key=lambda item: -item[1][0].itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        names = {dtype: name for name, dtype in DTYPES.items()}
        end = 0
        for name, (dtype, shape) in ordered:
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [begin, end]}
            self._slots[name] = _Slot(file, begin, dtype, shape)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        for name in tensors:
            self._slots[name].offset += start
        self._fds[file] = fd = os.open(self.out / file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.posix_fallocate(fd, 0, start + end)
            os.pwrite(fd, len(text).to_bytes(8, "little") + text, 0)
        except OSError as error:
            self._release()
            free = shutil.disk_usage(self.out).free
            raise ResourceError(
                f"cannot reserve {(start + end) / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free ({error.strerror})",
                where=str(self.out / file),
                how_to_fix="free some space or choose another output directory",
            ) from None

    def store(self, name: str, tensor: Tensor) -> None:
        slot = self._slots[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (slot.dtype, slot.shape), f"{name}: {tensor.dtype} {tensor.shape}"
        data = memoryview(flat(tensor.detach().cpu()).view(torch.uint8).numpy().data)
        done = 0
        while done < len(data):  # one call moves at most 2 GiB
            done += os.pwrite(self._fds[slot.file], data[done:], slot.offset + done)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._slots[name].shape

    def load(self, name: str) -> Tensor:
        """Read back a tensor already stored."""
        slot = self._slots[name]
        data = bytearray(os.pread(self._fds[slot.file], slot.nbytes, slot.offset))
        return torch.frombuffer(data, dtype=slot.dtype).reshape(slot.shape)

    def close(self) -> None:
        """Flush the files and, when there are several, write the index."""
        for fd in self._fds.values():
            os.fsync(fd)
        if len(self._fds) > 1:
            weight_map = {name: slot.file for name, slot in sorted(self._slots.items())}
            total = sum(slot.nbytes for slot in self._slots.values())
            write_json(self.out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        self._release()

    def _release(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
