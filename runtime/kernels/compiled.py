"""numba as all CPU kernels use it: machine code kept on disk until any of their sources changes."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache

STAMP = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


class _Cache(FunctionCache):
    """Stamped with all kernel sources: a compiled function holds those it calls, which may lie in other files."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file._source_stamp = STAMP


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """numba.njit, cached; a division by zero gives inf or nan, for a check would keep loops from being vectorised."""
    if function is None:
        return lambda f: compiled(f, **options)
    dispatcher: Any = numba.njit(error_model="numpy", **options)(function)
    if options.get("inline") != "always":
        dispatcher._cache = _Cache(function)
    return dispatcher
