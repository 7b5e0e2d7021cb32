"""Importance matrices as llama-imatrix writes and llama-quantize reads them: GGUF, and (written only: it cannot be
split into experts again) the older .dat layout.

Both hold, for each matrix, sums of squared inputs by column and how much was summed; the experts of a stack follow one
another. Here they are mean squares under Hugging Face names (calib's `InputStats.importance`).
"""

import struct
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from formats.arch import Arch
from formats.containers.gguf import gguf_name, hf_name
from formats.containers.gguf_file import GGUFFile, GGUFFileWriter
from formats.errors import DataError


@dataclass
class Imatrix:
    """mean_squares: weight name -> float32 [in]; tokens: weight name -> rows seen (0 for an expert nobody called);
    datasets: where the text came from; chunk_size: tokens in a calibration sample."""

    mean_squares: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    chunk_size: int = 512

    @property
    def chunks(self) -> int:
        """Calibration samples seen."""
        return max(self.tokens.values(), default=0) // self.chunk_size


def write_imatrix(path: Path, arch: Arch, imatrix: Imatrix) -> None:
    """Write GGUF, or the older layout when the suffix is .dat."""
    stacked: dict[str, list[tuple[Tensor, int]]] = {}
    for name in sorted(imatrix.mean_squares, key=lambda n: (gguf_name(arch, n)[0], gguf_name(arch, n)[1] or 0)):
        stored, expert = gguf_name(arch, name)
        entries = stacked.setdefault(stored, [])
        if len(entries) != (expert or 0):
            raise DataError(f"{stored}: expert {len(entries)} is missing", where="imatrix")
        entries.append((imatrix.mean_squares[name].float().cpu(), imatrix.tokens[name]))
    write = _write_dat if path.suffix == ".dat" else _write_gguf
    write(path, imatrix, stacked)


def _write_gguf(path: Path, imatrix: Imatrix, stacked: dict[str, list[tuple[Tensor, int]]]) -> None:
    header = gguf.GGUFWriter(None, "imatrix")
    header.add_type(gguf.GGUFType.IMATRIX)
    header.add_array(gguf.Keys.IMatrix.DATASETS, imatrix.datasets or ["unknown"])
    header.add_uint32(gguf.Keys.IMatrix.CHUNK_COUNT, imatrix.chunks)
    header.add_uint32(gguf.Keys.IMatrix.CHUNK_SIZE, imatrix.chunk_size)
    for name, entries in stacked.items():
        for suffix, columns in (("in_sum2", len(entries[0][0])), ("counts", 1)):
            shape = (len(entries), columns)
            header.add_tensor_info(f"{name}.{suffix}", shape, np.dtype(np.float32), 4 * shape[0] * shape[1])
    file = GGUFFileWriter(path, header)
    for name, entries in stacked.items():
        file.write(f"{name}.in_sum2", torch.stack([mean * count for mean, count in entries]).numpy())
        file.write(f"{name}.counts", np.array([count for _, count in entries], np.float32))
    file.close()


def _write_dat(path: Path, imatrix: Imatrix, stacked: dict[str, list[tuple[Tensor, int]]]) -> None:
    """Entries of a name, a number of calls, and sums over that many calls; unseen experts count as 1."""
    with path.open("wb") as file:
        file.write(struct.pack("<i", len(stacked)))
        for name, entries in stacked.items():
            calls = max(1, -(-max(count for _, count in entries) // imatrix.chunk_size))
            sums = torch.cat([(mean if count else torch.ones_like(mean)) * calls for mean, count in entries]).numpy()
            text = name.encode()
            file.write(struct.pack("<i", len(text)) + text + struct.pack("<ii", calls, len(sums)) + sums.tobytes())
        dataset = (imatrix.datasets or ["unknown"])[-1].encode()
        file.write(struct.pack("<ii", imatrix.chunks, len(dataset)) + dataset)


def read_imatrix(path: Path, arch: Arch) -> Imatrix:
    """Read the GGUF layout. DataError for damage, and for entries of tensors that the family does not have."""
    file = GGUFFile(path)
    datasets = file.fields.get(gguf.Keys.IMatrix.DATASETS)
    size = file.fields.get(gguf.Keys.IMatrix.CHUNK_SIZE)
    imatrix = Imatrix(datasets=list(datasets.value) if datasets else [], chunk_size=int(size.value) if size else 512)
    for name, info in file.tensors.items():
        stored = name.removesuffix(".in_sum2")
        if stored == name:
            continue
        counts = f"{stored}.counts"
        if counts not in file.tensors or info.type.name != "F32" or file.tensors[counts].type.name != "F32":
            raise DataError(f'"{stored}" has no counts, or is not float32', where=str(path))
        sums, seen = (torch.from_numpy(file.bytes_of(n).view(np.float32)) for n in (name, counts))
        if sums.dim() == 1:  # ggml drops the outer dimension of a matrix that has one row
            sums = sums[None]
        if sums.dim() != 2 or seen.numel() not in (1, len(sums)) or not (seen.isfinite().all() and (seen >= 0).all()):
            raise DataError(f'"{stored}" has sums {list(sums.shape)} for counts {seen.tolist()}', where=str(path))
        hf = hf_name(arch, stored)
        if hf is None or ("{e}" not in hf and len(sums) != 1):
            raise DataError(f'"{stored}" is no matrix of {arch.name}', where=str(path))
        for e, (row, count) in enumerate(zip(sums, seen.flatten().expand(len(sums)).tolist(), strict=True)):
            full = hf.replace("{e}", str(e))
            imatrix.mean_squares[full] = row / count if count else torch.ones_like(row)
            imatrix.tokens[full] = round(count)
    file.close()
    return imatrix
