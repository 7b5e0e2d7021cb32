"""What an interrupted run leaves behind and a resumed one goes on from: one file per finished part."""

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from formats.errors import UsageError
from formats.grids import parse_grid
from formats.qtensor import QTensor

IMPORTANCE = "|importance"
Parts = dict[str, Tensor | QTensor]


class Work:
    """A folder of finished parts. Each file appears whole (written aside, then renamed), so any moment may be the last.

    fingerprint: everything the parts depend on; a folder begun under another one is refused with a diff.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        path = folder / "fingerprint.json"
        text = json.dumps(fingerprint, indent=1, sort_keys=True)
        if path.exists():
            self._compare(path.read_text(encoding="utf-8"), text)
        else:
            self._write(path, text.encode())

    def _compare(self, old: str, new: str) -> None:
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), "then", "now", lineterm="", n=0)
        diff = [line for line in lines if not line.startswith("@@")]
        if diff:
            raise UsageError(
                "the interrupted run was made from something else:\n" + "\n".join(diff),
                where=str(self.folder.parent),
                how_to_fix="resume with the same recipe, model and text, or start over with --overwrite",
            )

    def has(self, part: str) -> bool:
        return (self.folder / f"{part}.safetensors").exists()

    def save(self, part: str, tensors: Mapping[str, Tensor | QTensor]) -> None:
        """Keep a finished part: quantised tensors in neutral form, changed float tensors as they are."""
        flat: dict[str, Tensor] = {}
        grids: dict[str, str] = {}
        for name, value in tensors.items():
            if isinstance(value, QTensor):
                grids[name] = value.grid.name
                flat[f"{name}|codes"] = value.codes
                flat |= {f"{name}|params|{key}": tensor for key, tensor in value.params.items()}
                if value.g_idx is not None:
                    flat[f"{name}|g_idx"] = value.g_idx
            else:
                flat[name] = value
        path = self.folder / f"{part}.safetensors"
        aside = path.with_suffix(".tmp")
        save_file({name: t.contiguous().cpu() for name, t in flat.items()}, aside, {"grids": json.dumps(grids)})
        _rename(aside, path)

    def importances(self) -> dict[str, tuple[Tensor, int]]:
        """(mean squared inputs, tokens seen) of every calibrated tensor so far."""
        found: dict[str, tuple[Tensor, int]] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                keys = set(file.keys())
                for key in sorted(k for k in keys if k.endswith(IMPORTANCE)):
                    name = key.removesuffix(IMPORTANCE)
                    found[name] = file.get_tensor(key), int(file.get_tensor(f"{name}|tokens"))
        return found

    def load(self, part: str) -> Parts:
        with safe_open(self.folder / f"{part}.safetensors", "pt") as file:
            grids: dict[str, str] = json.loads(file.metadata()["grids"])
            flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        tensors: Parts = {name: tensor for name, tensor in flat.items() if "|" not in name}
        for name, grid in grids.items():
            prefix = f"{name}|params|"
            params = {key.removeprefix(prefix): t for key, t in flat.items() if key.startswith(prefix)}
            tensors[name] = QTensor(parse_grid(grid), flat[f"{name}|codes"], params, flat.get(f"{name}|g_idx"))
        return tensors

    def save_tokens(self, tokens: Tensor, about: Mapping[str, Any]) -> None:
        """Calibration rows that the model wrote itself: too dear to write twice."""
        aside = self.folder / "tokens.tmp"
        save_file({"tokens": tokens}, aside, {"about": json.dumps(about)})
        _rename(aside, self.folder / "tokens.safetensors")

    def load_tokens(self) -> tuple[Tensor, dict[str, Any]] | None:
        path = self.folder / "tokens.safetensors"
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            return file.get_tensor("tokens"), json.loads(file.metadata()["about"])

    def _write(self, path: Path, data: bytes) -> None:
        aside = path.with_suffix(".tmp")
        aside.write_bytes(data)
        _rename(aside, path)


def _rename(aside: Path, path: Path) -> None:
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    aside.rename(path)
