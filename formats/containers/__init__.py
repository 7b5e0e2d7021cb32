"""On-disk layouts by name, and the one door through which models are opened."""

import re
from pathlib import Path

from formats.checkpoint import Checkpoint
from formats.errors import DataError
from formats.registry import Registry, did_you_mean

CONTAINERS = Registry(
    "container",
    {
        "safetensors": "formats.containers.safetensors:SafetensorsContainer",
        "gptq": "formats.containers.gptq:GPTQContainer",
        "awq": "formats.containers.awq:AWQContainer",
        "compressed-tensors": "formats.containers.compressed_tensors:CompressedTensorsContainer",
        "bitsandbytes": "formats.containers.bitsandbytes:BitsAndBytesContainer",
        "gguf": "formats.containers.gguf:GGUFContainer",
    },
)

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open a model directory (plain or quantised), a .gguf file, or, when online, a Hugging Face hub id.

    Raises DataError when there is no such model or it cannot be read.
    """
    path = Path(model)
    if not path.exists():
        path = _download(str(model))
    if path.is_file():
        if path.suffix != ".gguf":
            raise DataError("neither a model directory nor a .gguf file", where=str(path))
        return CONTAINERS["gguf"]().open_reader(path)
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs and not any(path.glob("*.safetensors")):
        return open_checkpoint(ggufs[0])
    return CONTAINERS[_method(path)]().open_reader(path)


def _method(path: Path) -> str:
    """The container of a directory, from config.json's quantization_config."""
    from formats.containers.shards import read_json

    quantization = read_json(path / "config.json").get("quantization_config")
    if quantization is None:
        return "safetensors"
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method not in ("gptq", "awq", "compressed-tensors", "bitsandbytes"):
        raise DataError(
            f"quantisation method {method!r} cannot be read",
            where=str(path / "config.json"),
            how_to_fix=did_you_mean(str(method), [c for c in CONTAINERS if c not in ("gguf", "safetensors")]),
        )
    return str(method)


def _download(model: str) -> Path:
    """The local snapshot of a hub model, fetched when needed."""
    if not _HUB_ID.fullmatch(model) or Path(model).suffix == ".gguf":
        raise DataError("no such file or directory", where=model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"no such file or directory, and the hub did not provide it either ({reason[0]})",
            where=model,
            how_to_fix="give a model directory, a .gguf file, or a hub id that this machine can reach",
        ) from None
