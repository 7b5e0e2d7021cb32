"""The output directory: it appears whole or not at all, and says what is in it and how it was made."""

import errno
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError

from calib.text import CalibrationSet
from compress.card import model_card
from compress.plan import Plan
from compress.plots import layer_errors
from compress.recipe_file import dump_recipe
from formats.checkpoint import Checkpoint
from formats.errors import BitwrightError, ResourceError, UsageError
from formats.integrity import MANIFEST, sha256, write_manifest_hashes

RECIPE, LAYERS, EVAL, CARD, PLOTS = "recipe.yaml", "layers.jsonl", "eval.json", "README.md", "plots"


class OutputDirectory:
    """Work goes into OUT.partial, which `commit` renames to OUT.

    As a context: our own errors remove what this run began (but not what it resumed); an interruption leaves
    OUT.partial for --resume. A full disk becomes a ResourceError that names the bytes needed. An existing OUT is
    replaced only by `commit`.
    """

    def __init__(self, out: Path, *, resume: bool = False, overwrite: bool = False, needed: int = 0) -> None:
        """needed: bytes that the run will write. Raises UsageError when OUT or OUT.partial stands in the way, and
        ResourceError when nothing can be written there."""
        self.out, self.partial, self.needed = out, _beside(out, "partial"), needed
        self._old = _beside(out, "old")
        if self._old.exists() and not out.exists():  # killed between the two renames of `commit`
            self._old.rename(out)
        if out.exists() and not overwrite:
            raise UsageError("the output exists already", where=str(out), how_to_fix="use --overwrite or another -o")
        if self.partial.exists() and not (resume or overwrite):
            raise UsageError(
                "an interrupted run lies there", str(self.partial), "continue it with --resume, or drop it: --overwrite"
            )
        nearest = next(parent for parent in self.partial.parents if parent.exists())
        if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
            raise ResourceError("cannot write here", where=str(nearest), how_to_fix="write elsewhere with -o")
        self.resumed = resume and self.partial.exists()

    def __enter__(self) -> Path:
        try:
            if self.partial.exists() and not self.resumed:
                shutil.rmtree(self.partial)
            self.partial.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(f"cannot write the output: {error.strerror}", where=str(self.partial)) from error
        return self.partial

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        full = _is_full(error)
        if (full or isinstance(error, BitwrightError)) and not self.resumed:
            shutil.rmtree(self.partial, ignore_errors=True)
        if full:
            raise ResourceError(
                f"the disk is full; the output needs {self.needed / 1e6:.0f} MB",
                where=str(self.out),
                how_to_fix="free some space, or write elsewhere with -o",
            ) from error

    def commit(self) -> None:
        """Put the finished directory in place of OUT."""
        if self.out.exists():
            shutil.rmtree(self._old, ignore_errors=True)
            self.out.rename(self._old)
        self.partial.rename(self.out)
        if self._old.is_dir():
            shutil.rmtree(self._old, ignore_errors=True)
        else:
            self._old.unlink(missing_ok=True)


def _is_full(error: BaseException | None) -> bool:
    """A full disk, told by the system or, in words only, by safetensors."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, SafetensorError) and f"os error {errno.ENOSPC}" in str(error)


def _beside(out: Path, kind: str) -> Path:
    out = out.absolute()
    return out.with_name(f"{out.name}.{kind}")


class LayerLog:
    """layers.jsonl: one line per quantised tensor, on disk as soon as it is known. A torn last line is dropped."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LAYERS
        self.records: list[dict[str, Any]] = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):
                    self.records.append(json.loads(line))
            self.path.write_text("".join(json.dumps(record) + "\n" for record in self.records), encoding="utf-8")

    def write(
        self, name: str, grid: str, error: float, rtn_error: float, damp: float | None, seconds: float, **more: Any
    ) -> None:
        """error, rtn_error: relative output errors; damp: fraction of its diagonal that GPTQ added to the Hessian."""
        record = {"name": name, "grid": grid, "error": error, "rtn_error": rtn_error, "damp": damp} | more
        record["seconds"] = round(seconds, 3)
        self.records.append(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def source_files(checkpoint: Checkpoint) -> list[Path]:
    """The files that make the source what it is: config and weights."""
    if checkpoint.path.is_file():
        return [checkpoint.path]
    return sorted([*checkpoint.path.glob("*.safetensors"), *checkpoint.path.glob("config.json")])


def source_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    """file name -> sha256 of the source's files."""
    return {file.name: sha256(file) for file in source_files(checkpoint)}


def write_report(
    folder: Path,
    plan: Plan,
    checkpoint: Checkpoint,
    *,
    command: str,
    calibration: CalibrationSet | None,
    evaluation: Mapping[str, Any] | None,
    layers: Iterable[Mapping[str, Any]] = (),
    notes: Iterable[str] = (),
) -> None:
    """Write everything besides weights and tokenizer: recipe, evaluation, model card and, last, the manifest."""
    (folder / RECIPE).write_text(dump_recipe(plan.recipe), encoding="utf-8")
    if evaluation is not None:
        _write_json(folder / EVAL, evaluation)
    layers = list(layers)
    pictures = layer_errors(layers, folder / PLOTS / "layer_errors")
    card = model_card(
        plan,
        checkpoint,
        command=command,
        calibration=calibration,
        evaluation=evaluation,
        layers=layers,
        pictures=[picture.relative_to(folder).as_posix() for picture in pictures if picture.suffix == ".png"],
        notes=[*plan.notes, *notes],
    )
    (folder / CARD).write_text(card, encoding="utf-8")
    _write_json(folder / MANIFEST, _manifest(plan, checkpoint, command, calibration))
    write_manifest_hashes(folder)


def _manifest(plan: Plan, checkpoint: Checkpoint, command: str, calibration: CalibrationSet | None) -> dict[str, Any]:
    """Versions, seed and the hashes of source and text; those of the outputs come after."""
    packages = ("bitwright", "torch", "transformers", "tokenizers", "numpy", "numba", "safetensors", "gguf")
    text = None
    if calibration is not None:
        text = {key: value for key, value in vars(calibration).items() if key != "tokens"}
        text["samples"], text["length"] = calibration.tokens.shape
    return {
        "command": command,
        "seed": plan.recipe.seed,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
        "source": source_hashes(checkpoint),
        "calibration": text,
        "container": plan.container.name,
        "bits_per_weight": round(plan.bits_per_weight, 4),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
