"""Reading and writing models tensor by tensor: nothing here ever holds a whole model."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.arch import Arch, is_transposed
from formats.qtensor import Grid, QTensor


class Checkpoint(ABC):
    """An open model. Tensor names, shapes and orientation are Hugging Face's, whatever lies on disk.

    path      the file or directory
    config    the Hugging Face config (rebuilt for GGUF), without `quantization_config`
    arch      the model family's data
    container the container's registered name
    """

    path: Path
    config: dict[str, Any]
    arch: Arch
    container: str

    @abstractmethod
    def names(self) -> list[str]:
        """All tensor names ("model.layers.0.self_attn.q_proj.weight"), in file order. Tied heads are not listed."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the (decoded) tensor."""

    @abstractmethod
    def stored_as(self, name: str) -> "Grid | str":
        """The grid of a quantised tensor, or the dtype name of a float one ("float32", "bfloat16", "float16")."""

    @abstractmethod
    def read(self, name: str) -> "Tensor | QTensor":
        """One tensor: a QTensor where the grid is one of ours, else a float tensor."""

    def read_dense(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """One tensor as floats, in Hugging Face's shape."""
        value = self.read(name)
        if not isinstance(value, QTensor):
            return value.to(dtype)
        dense = value.dequantize(dtype)
        return dense.T.contiguous() if is_transposed(self.arch, name) else dense

    def read_linear(self, name: str) -> Tensor:
        """A linear's (or an embedding's) weight as floats, float32 [out, in]."""
        dense = self.read_dense(name)
        return dense.T.contiguous() if is_transposed(self.arch, name) else dense

    @abstractmethod
    def save_tokenizer(self, out: Path) -> None:
        """Write tokenizer files, chat template and generation config into a directory."""

    def close(self) -> None:  # noqa: B027 (most readers have nothing to release)
        """Release files and maps."""

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Writer(ABC):
    """Writes one model in a container. Tensors may come in any order; `close` makes the files complete."""

    @abstractmethod
    def write(self, name: str, value: "Tensor | QTensor") -> None:
        """Append one tensor under its Hugging Face name."""

    @abstractmethod
    def close(self) -> None:
        """Finish headers, index, config and tokenizer files."""


class Container(ABC):
    """One on-disk layout. `name` is registered in formats.containers."""

    name: str
    stores_permutation = False  # can a QTensor carry g_idx?

    @abstractmethod
    def substitute(self, name: str, shape: tuple[int, ...], grid: Grid) -> Grid:
        """The grid this container will really use for a tensor when asked for `grid`.

        Usually `grid` itself; GGUF answers q5_0 for q4_k when rows are not divisible by 256.
        Raises UsageError when nothing near it can be stored.
        """

    @abstractmethod
    def open_writer(
        self, out: Path, source: Checkpoint, grids: Mapping[str, Grid], options: Mapping[str, Any]
    ) -> Writer:
        """Start writing into the existing directory `out`. `grids` names every tensor that will come as a QTensor;
        all other names of `source` come as float tensors. options: dtype of float tensors, shard_size, and the like."""

    @abstractmethod
    def open_reader(self, path: Path) -> Checkpoint:
        """Open what lies at path (the file for GGUF, else the directory)."""
