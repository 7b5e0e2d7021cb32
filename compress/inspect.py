"""What lies in a model file."""

import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from formats.arch import is_transposed
from formats.checkpoint import Checkpoint
from formats.errors import DataError
from formats.integrity import verify
from formats.qtensor import Grid

_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0}
_FACTS = (  # what is shown of the config; gpt2 has its own names
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("n_embd", "n_layer", "n_head", "n_positions"),
    *("intermediate_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "sliding_window"),
)


def inspect_model(checkpoint: Checkpoint) -> dict[str, Any]:
    """Container, family, main sizes, every tensor with its grid and stored bits, and weights per width."""
    tensors: list[dict[str, Any]] = []
    nbytes = 0.0
    histogram: Counter[str] = Counter()
    for name in checkpoint.names():
        shape, stored = checkpoint.shape(name), checkpoint.stored_as(name)
        width = shape[0 if is_transposed(checkpoint.arch, name) else -1] if shape else 1
        bits = stored.bits_per_weight(width) if isinstance(stored, Grid) else _BITS.get(stored, 32.0)
        kind = stored.name if isinstance(stored, Grid) else stored
        tensors.append({"name": name, "shape": list(shape), "stored_as": kind, "bits": round(bits, 4)})
        histogram[kind] += prod(shape)
        nbytes += bits * prod(shape) / 8
    parameters = sum(histogram.values())
    return {
        "path": str(checkpoint.path),
        "container": checkpoint.container,
        "architecture": checkpoint.arch.name,
        "config": {key: checkpoint.config[key] for key in _FACTS if checkpoint.config.get(key) is not None},
        "parameters": parameters,
        "bytes": round(nbytes),
        "bits_per_weight": round(8 * nbytes / parameters, 4),
        "histogram": dict(histogram.most_common()),
        "tensors": tensors,
    }


def check_integrity(folder: Path) -> str:
    """A line saying that a directory is what its manifest says; DataError naming whatever is not."""
    found = verify(folder)
    if found:
        raise DataError("\n".join(found), where=str(folder), how_to_fix="get an undamaged copy")
    return f"{folder}: every file is as its manifest says"


def condensed(tensors: list[dict[str, Any]]) -> list[tuple[str, int, str, str, float]]:
    """Tensors that differ only in their indices, together: (pattern, tensors, shape, stored as, bits)."""
    groups: Counter[tuple[str, str, str, float]] = Counter()
    for t in tensors:
        shape = " x ".join(map(str, t["shape"]))
        groups[(re.sub(r"\.\d+\.", ".*.", t["name"]), shape, t["stored_as"], t["bits"])] += 1
    return [(name, count, shape, kind, bits) for (name, shape, kind, bits), count in groups.items()]
