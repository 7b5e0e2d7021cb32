"""Damaged and hostile GGUF files: a DataError, or what was written, in bounded time and memory."""

import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from formats.containers.gguf import GGUFCheckpoint, GGUFContainer
from formats.containers.gguf_file import GGUFFile
from formats.containers.safetensors import SafetensorsContainer
from formats.errors import DataError


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    source = SafetensorsContainer().open_reader(tiny_model("llama", layers=1))
    writer = GGUFContainer().open_writer(out, source, {}, {})
    for name in source.names():
        writer.write(name, source.read(name))
    writer.close()
    return out / "model.gguf"


def open_all(path: Path) -> None:
    """Open a file and touch every tensor."""
    checkpoint = GGUFCheckpoint(path)
    for name in checkpoint.names():
        checkpoint.read(name)


def header_size(path: Path) -> int:
    return min(info.offset for info in GGUFFile(path).tensors.values())


def test_mutated_headers_end_in_an_error_or_a_model(model: Path, tmp_path: Path) -> None:
    whole, size = model.read_bytes(), header_size(model)
    rng, refused = np.random.default_rng(0), 0
    tensor_infos = whole.index(b"token_embd.weight") - 8  # names, shapes, types and offsets follow
    for round in range(300):
        data = bytearray(whole)
        low = 0 if round % 3 else tensor_infos
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(low, size))] = int(rng.integers(0, 256))
        path = tmp_path / "mutant.gguf"
        path.write_bytes(data)
        start = time.perf_counter()
        try:
            open_all(path)
        except DataError as error:
            refused += 1
            assert str(path) in str(error)
        assert time.perf_counter() - start < 5
    assert refused > 60


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200))
def test_arbitrary_bytes(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.gguf"
    for data in (junk, b"GGUF" + struct.pack("<I", 3) + junk, b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + junk):
        path.write_bytes(data)
        with pytest.raises(DataError):
            GGUFCheckpoint(path)


@pytest.mark.parametrize("cut", [0, 3, 20, 100, 0.3, 0.9, 0.9999])
def test_truncated(cut: float, model: Path, tmp_path: Path) -> None:
    whole = model.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(cut if cut > 1 else cut * len(whole))])
    with pytest.raises(DataError):
        open_all(path)


def crafted(path: Path, fields: bytes = b"", tensors: bytes = b"", n_fields: int = 0, n_tensors: int = 0) -> Path:
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, n_tensors, n_fields) + fields + tensors + bytes(64))
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def info(name: str = "t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("tensors", {"n_tensors": 1 << 60}),
        ("metadata fields", {"n_fields": 1 << 62}),
        ("a key", {"fields": struct.pack("<Q", 1 << 63), "n_fields": 1}),
        ("array of arrays", {"fields": text("k") + struct.pack("<IIQ", 9, 9, 1), "n_fields": 1}),
        ("8 bytes claimed", {"fields": text("k") + struct.pack("<IIQ", 9, 8, 1 << 40), "n_fields": 1}),
        ("4 bytes claimed", {"fields": text("k") + struct.pack("<IIQ", 9, 4, 1 << 40), "n_fields": 1}),
        ("unknown type 77", {"fields": text("k") + struct.pack("<I", 77), "n_fields": 1}),
        ("power of two", {"fields": text("general.alignment") + struct.pack("<II", 4, 0), "n_fields": 1}),
        ("dimensions", {"tensors": text("t") + struct.pack("<I", 1 << 30), "n_tensors": 1}),
        ("ends beyond the file", {"tensors": info(dims=(1 << 40, 1 << 20)), "n_tensors": 1}),
        ("is empty", {"tensors": info(dims=(0, 1 << 62)), "n_tensors": 1}),
        ("unknown type 99", {"tensors": info(kind=99), "n_tensors": 1}),
        ("neighbours say 0", {"tensors": info(offset=1 << 50), "n_tensors": 1}),
        ("cannot be Q4_0", {"tensors": info(dims=(33,), kind=2), "n_tensors": 1}),
        ("appears twice", {"tensors": info(dims=(8,)) + info(dims=(8,), offset=32), "n_tensors": 2}),
    ],
)
def test_absurd_claims_cost_nothing(what: str, arguments: dict[str, bytes], tmp_path: Path) -> None:
    path = crafted(tmp_path / "bad.gguf", **arguments)  # type: ignore[arg-type]
    tracemalloc.start()
    with pytest.raises(DataError, match=what):
        GGUFFile(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 1 << 30),
        ("llama.attention.head_count", 0),
        ("llama.embedding_length", 65),
        ("general.architecture", "mamba"),
    ],
)
def test_hyperparameters_that_contradict_the_tensors(key: str, value: int | str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    whole = GGUFFile(model)
    field = whole.fields[key]
    old = text(field.value) if isinstance(field.value, str) else struct.pack("<I", field.value)
    new = text(value) if isinstance(value, str) else struct.pack("<I", value)
    data = model.read_bytes()
    at = data.index(text(key)) + len(text(key)) + 4
    assert data[at : at + len(old)] == old and len(old) == len(new)
    path.write_bytes(data[:at] + new + data[at + len(old) :])
    with pytest.raises(DataError):
        open_all(path)


def test_a_directory_needs_exactly_one_model(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 GGUF models"):
        GGUFContainer().open_reader(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        shutil.copyfile(model, tmp_path / name)
    with pytest.raises(DataError, match="2 GGUF models"):
        GGUFContainer().open_reader(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        GGUFContainer().open_reader(tmp_path / "c.gguf")


def test_foreign_tensors_are_named(model: Path, tmp_path: Path) -> None:
    data = model.read_bytes().replace(text("blk.0.attn_q.weight"), text("blk.0.attn_z.weight"))
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(DataError, match="attn_z"):
        GGUFCheckpoint(tmp_path / "m.gguf")
    assert gguf.GGUFReader(tmp_path / "m.gguf")  # a file that others would load with a hole in it
