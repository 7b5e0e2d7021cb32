"""What quantised layouts of model directories have in common.

A quantisation method is a `Layout`: which tensors, next to each other under a module's name, stand for one quantised
matrix, and what config.json says about them.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import regex
import torch
from torch import Tensor

from formats.containers.shards import Shards, Stored
from formats.errors import DataError, UsageError
from formats.grids.affine import AffineGrid
from formats.qtensor import Grid, QTensor


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """Turns what a nonsensical quantization_config makes of the code that interprets it into a DataError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(
            f"quantization_config makes no sense ({type(error).__name__}: {error})", where=str(path / "config.json")
        ) from None


def affine_grid(bits: Any, group_size: Any, symmetric: Any) -> AffineGrid:
    """The grid a foreign config asks for; group_size None or -1 means per channel."""
    if bits not in range(2, 9):
        raise ValueError(f"{bits!r} bits")
    group = None if group_size in (None, -1) else int(group_size)
    if group is not None and group < 1:
        raise ValueError(f"group size {group}")
    return AffineGrid(int(bits), group, bool(symmetric))


def matches(pattern: str, name: str) -> bool:
    """Does a regular expression of a foreign config match at the beginning of a name? Bounded in time."""
    try:
        return regex.match(pattern, name, timeout=1) is not None
    except (regex.error, TimeoutError) as error:
        raise DataError(f"pattern {pattern!r} cannot be used ({error})", where="quantization_config") from None


def name_pattern(modules: Iterable[str]) -> str:
    """A regular expression that matches exactly these names; layers are folded into one alternative."""
    layers: dict[tuple[str, str], list[str]] = {}
    for module in modules:
        before, number, after = re.fullmatch(r"(.*?)(?:(?<=\.)(\d+)(?=\.)(.*))?", module).groups("")  # type: ignore[union-attr]
        layers.setdefault((before, after), []).append(number)
    alternatives = [
        re.escape(before) + (f"(?:{'|'.join(numbers)})" if numbers[0] else "") + re.escape(after)
        for (before, after), numbers in layers.items()
    ]
    return f"^(?:{'|'.join(alternatives)})$"


def exact_half(scale: Tensor, name: str) -> Tensor:
    """Scales as fp16, or a DataError when that would change them (bf16 or fp32 scales of foreign files)."""
    half = scale.half()
    if not torch.equal(half.float(), scale.float()):
        raise DataError(f'scales of "{name}" are not exact in float16', how_to_fix="quantise from the float model")
    return half


def divisor_group(grid: AffineGrid, n: int, name: str) -> AffineGrid:
    """The grid with its group size halved until it divides n; UsageError below 16."""
    group = grid.block
    while group and n % group and group % 2 == 0 and group > 16:
        group //= 2
    if group and n % group:
        raise UsageError(
            f"groups of {grid.block} do not divide {n} input features",
            where=name,
            how_to_fix="use another group size, group_size: -1, or the gptq format, which stores a ragged last group",
        )
    return AffineGrid(grid.bits, group, grid.symmetric)


def column_groups(grid: Grid, n: int) -> Tensor:
    """The group of each column in natural order, int32 [n]."""
    return (torch.arange(n) // (grid.block or n)).int()


class Parts:
    """What a file stores under one module's name, by suffix; tensors are read when asked for."""

    def __init__(self, shards: Shards, module: str, suffixes: Iterable[str]) -> None:
        self.module, self._shards = module, shards
        self.meta: Stored = {s: (shards.dtype(f"{module}.{s}"), shards.shape(f"{module}.{s}")) for s in suffixes}

    def __contains__(self, suffix: object) -> bool:
        return suffix in self.meta

    def __getitem__(self, suffix: str) -> Tensor:
        return self._shards.read(f"{self.module}.{suffix}")

    def size(self, suffix: str, dims: int) -> tuple[int, ...]:
        """Shape of a part, which must have so many dimensions, none of them empty."""
        shape = self.meta[suffix][1] if suffix in self else ()
        if len(shape) != dims or 0 in shape:
            raise DataError(f'"{self.module}.{suffix}" is missing or has shape {list(shape)}', where=self.where())
        return shape

    def finite(self, suffix: str) -> Tensor:
        """A part; DataError when an element is not finite."""
        tensor = self[suffix]
        if not tensor.isfinite().all():
            raise DataError(f'"{self.module}.{suffix}" is not finite', where=self.where())
        return tensor

    def scales(self, suffix: str) -> Tensor:
        """Scales in fp16 when that is exact, else as they are stored."""
        scale = self.finite(suffix)
        half = scale.half()
        return half if torch.equal(half.float(), scale.float()) else scale

    def permutation(self, suffix: str, grid: Grid, n: int) -> Tensor | None:
        """A stored g_idx, or None when it is missing or the natural order. DataError when it cannot be one."""
        natural = column_groups(grid, n)
        if suffix not in self or torch.equal(self[suffix], natural):
            return None
        if not torch.equal(self[suffix].sort().values, natural):
            raise DataError(f'"{self.module}.{suffix}" does not fill groups of {grid.block}', where=self.where())
        return self[suffix]

    def where(self) -> str:
        return self._shards.where(f"{self.module}.{next(iter(self.meta))}")


class Layout(ABC):
    """How one quantisation method spells a quantised matrix, and says so in config.json's `quantization_config`."""

    marker: str  # suffix whose presence means that a module is quantised
    suffixes: tuple[str, ...]  # all suffixes that belong to a quantised matrix
    optional: tuple[str, ...] = ()  # those that foreign files may lack

    @staticmethod
    def split(stored: str) -> tuple[str, str]:
        """Module and suffix of a stored name."""
        module, _, suffix = stored.rpartition(".")
        return module, suffix

    @abstractmethod
    def describe(self, parts: Parts) -> tuple[Grid, tuple[int, int]]:
        """Grid and [out, in] of a stored module. DataError when the method cannot be one of our grids."""

    @abstractmethod
    def stored(self, shape: tuple[int, int], grid: Grid, parts: Parts | None = None) -> Stored:
        """Dtypes and shapes of the tensors that a matrix [out, in] on a grid is stored as.

        parts: when reading, what was found, for methods that know several spellings.
        """

    @abstractmethod
    def pack(self, name: str, value: QTensor) -> dict[str, Tensor]:
        """The stored tensors by suffix: dtypes and shapes as `stored` says."""

    @abstractmethod
    def unpack(self, parts: Parts, shape: tuple[int, int], grid: Grid) -> QTensor:
        """The inverse of `pack`, bit for bit."""

    @abstractmethod
    def quantization_config(self, linears: Mapping[str, Grid | None]) -> dict[str, Any]:
        """What config.json must say. linears: all linear modules of the model, None for those left in floats."""
