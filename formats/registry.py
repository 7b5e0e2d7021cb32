"""Explicit, lazy registries: a name leads to `module:attribute`, imported on first use."""

import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from formats.errors import UsageError


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean "q4_k"?` for the closest known name, else the list of all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f'did you mean "{close[0]}"?' if close else "one of: " + ", ".join(known)


class Registry(Mapping[str, Any]):
    """A read-only mapping from name to object, importing `module:attribute` when a name is looked up."""

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind, self._entries = kind, dict(entries)

    def __getitem__(self, name: str) -> Any:
        if name not in self._entries:
            raise UsageError(f'unknown {self.kind} "{name}"', how_to_fix=did_you_mean(name, self._entries))
        module, _, attribute = self._entries[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
