"""Hashes of a model directory in its manifest.json, and the check that nothing has changed since.

Files are hashed whole. Tensors of safetensors and GGUF files are hashed as they are stored, too, so that a damaged
file's report names the tensors, with their dtypes and shapes.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from formats.containers.shards import Shards, read_json, write_json
from formats.errors import DataError

MANIFEST = "manifest.json"
_BLOCK = 1 << 22


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def hashes(directory: Path) -> dict[str, Any]:
    """{"files": {name: {sha256, bytes}}, "tensors": {file: {name: {sha256, dtype, shape}}}} of all but the manifest."""
    files = {
        str(path.relative_to(directory)): {"sha256": sha256(path), "bytes": path.stat().st_size}
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    weights = [name for name in files if name.endswith((".safetensors", ".gguf"))]
    return {"files": files, "tensors": {name: dict(_tensors(directory / name)) for name in weights}}


def write_manifest_hashes(directory: Path) -> None:
    """Add the hashes to the directory's manifest.json, which is created when missing."""
    path = directory / MANIFEST
    manifest = read_json(path) if path.exists() else {}
    write_json(path, {**manifest, "hashes": hashes(directory)})


def verify(directory: Path) -> list[str]:
    """Everything that disagrees with the manifest: missing, added and changed files, and in changed weight files the
    tensors whose bytes, dtype or shape differ. DataError without a manifest."""
    recorded = read_json(directory / MANIFEST).get("hashes")
    if not isinstance(recorded, dict) or not isinstance(recorded.get("files"), dict):
        raise DataError("the manifest has no hashes", where=str(directory / MANIFEST))
    found: list[str] = []
    for name, expected in recorded["files"].items():
        path = directory / name
        if not path.is_file():
            found.append(f"{name}: missing")
        elif sha256(path) != expected["sha256"]:
            found.append(f"{name}: changed ({expected['bytes']} bytes recorded, {path.stat().st_size} found)")
            found += [f"{name}: {text}" for text in _changed_tensors(path, recorded.get("tensors", {}).get(name, {}))]
    present = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file() and p.name != MANIFEST}
    return found + [f"{name}: not in the manifest" for name in sorted(present - set(recorded["files"]))]


def _changed_tensors(path: Path, recorded: dict[str, Any]) -> list[str]:
    if not recorded:
        return []
    try:
        found = dict(_tensors(path))
    except DataError as error:
        return [f"unreadable, {error.what}"]
    texts = [f'tensor "{name}" is missing' for name in recorded if name not in found]
    texts += [f'tensor "{name}" is not in the manifest' for name in found if name not in recorded]
    for name, expected in recorded.items():
        for key in ("dtype", "shape", "sha256"):
            if name in found and found[name][key] != expected[key]:
                what = "bytes differ" if key == "sha256" else f"{key} is {found[name][key]}, not {expected[key]}"
                texts.append(f'tensor "{name}": {what}')
                break
    return texts


def _tensors(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name, and digest, dtype and shape as stored, of each tensor in a weight file."""
    if path.suffix == ".gguf":
        from formats.containers.gguf_file import GGUFFile

        gguf = GGUFFile(path)
        for name, info in gguf.tensors.items():
            yield name, _entry(gguf.bytes_of(name), info.type.name, info.shape)
        gguf.close()
    else:
        shards = Shards(path.parent, path.name)
        for name in shards:
            stored = shards.read(name).reshape(-1).view(torch.uint8).numpy()
            yield name, _entry(stored, str(shards.dtype(name)).removeprefix("torch."), shards.shape(name))
        shards.close()


def _entry(data: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data.data).hexdigest(), "dtype": dtype, "shape": list(shape)}
