"""Engines from what a command line says: a model, and perhaps something that guesses for it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from formats.arch import Arch
from formats.checkpoint import Checkpoint
from formats.containers import open_checkpoint
from formats.grids import parse_grid
from formats.qtensor import Grid, QTensor
from runtime.engine import Engine
from runtime.model import load_model
from runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from runtime.model import Model

SELF_GRID = "q4_0"  # what a self-draft is rounded to


class Rounded(Checkpoint):
    """Another checkpoint whose matrices are rounded to the nearest codes of a grid as they are read."""

    def __init__(self, source: Checkpoint, grid: str) -> None:
        self._source, self._grid = source, parse_grid(grid)
        self.path, self.config, self.arch, self.container = source.path, source.config, source.arch, source.container

    def _applies(self, name: str) -> bool:
        arch: Arch = self.arch
        ends = (*(linear for stage in arch.stages for linear in stage), arch.embedding, arch.head)
        width = self.shape(name)[-1]
        fits = not self._grid.block or width % self._grid.block == 0
        return fits and name.removesuffix(".weight").endswith(ends) and name.endswith(".weight")

    def names(self) -> list[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def stored_as(self, name: str) -> "Grid | str":
        return self._grid if self._applies(name) else self._source.stored_as(name)

    def read(self, name: str) -> "Tensor | QTensor":
        value = self._source.read(name)
        if not self._applies(name) or (isinstance(value, QTensor) and value.grid == self._grid):
            return value
        dense = self._source.read_linear(name)
        params = self._grid.fit(dense)
        return QTensor(self._grid, self._grid.encode(dense, params), params)

    def save_tokenizer(self, out: Path) -> None:
        self._source.save_tokenizer(out)


def load_rounded(path: str | Path, grid: str, **options: Any) -> "Model":
    """A model at fewer bits, rounded on loading: a self-draft, or a rung of `compare`."""
    with open_checkpoint(path) as checkpoint:
        return load_model(Rounded(checkpoint, grid), **options)


def load_draft(model: str | Path, draft: str | None, **options: Any) -> Any:
    """What `Engine(draft=)` takes. draft: None, "ngram", "self" (the same model in 4 bits, "self:GRID") or a model."""
    if draft in (None, "ngram"):
        return draft
    if draft == "self" or draft.startswith("self:"):
        return load_rounded(model, draft.partition(":")[2] or SELF_GRID, **options)
    return load_model(draft, **options)


def generate(
    model: str | Path,
    prompt: str,
    params: SamplingParams,
    draft: str | None = None,
    kernel: str = "fast",
    device: str = "cpu",
    show: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Continue one prompt; `show` gets text as soon as it is certain.

    Returns `text tokens tps finish_reason kernel`, and `acceptance tokens_per_step` when something guesses.
    """
    import time

    loaded = load_model(model, kernel=kernel, device=device)
    guesser = load_draft(model, draft, kernel=kernel, device=device)
    tokens = loaded.tokenizer.encode(prompt)
    room = min(len(tokens) + params.max_tokens, loaded.config.max_positions) * max(params.n, params.beam_width, 1)
    engine = Engine(loaded, loaded.tokenizer, kv_tokens=room + 16, draft=guesser)
    text, count, reason, started = "", 0, None, time.perf_counter()
    for output in engine.stream(tokens, params):
        show(output.text)
        text, count, reason = text + output.text, count + len(output.tokens), output.finish_reason
    seconds, stats = time.perf_counter() - started, engine.stats()
    result = {"text": text, "tokens": count, "tps": round(count / seconds, 2), "finish_reason": reason}
    result["kernel"] = loaded.kernel
    return result | (guessing(engine) if stats.acceptance is not None else {})


def guessing(engine: Engine) -> dict[str, float | None]:
    stats = engine.stats()
    return {
        "acceptance": None if stats.acceptance is None else round(stats.acceptance, 4),
        "tokens_per_step": None if stats.tokens_per_step is None else round(stats.tokens_per_step, 3),
    }
