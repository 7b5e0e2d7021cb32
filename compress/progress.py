"""How far a run is, on stderr: one bar with the time left on a terminal, else one plain line per step."""

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """Phases of known length. Colours follow NO_COLOR; quiet shows nothing but notes."""

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self.console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self.quiet = quiet
        self.title, self.total, self.done = "", 0, 0
        self._start = time.monotonic()
        self._bar: Bar | None = None
        if self.console.is_terminal and not quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bar = Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console, transient=True)
            self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def start(self, title: str, total: int) -> None:
        """Begin a phase of `total` steps."""
        self.title, self.total, self.done, self._start = title, total, 0, time.monotonic()
        if self._bar:
            self._bar.reset(self._task, total=total, description=title)
        elif not self.quiet:
            self._print(f"{title}: {total} steps")

    def advance(self, steps: int = 1, line: str = "") -> None:
        """Some steps are done; `line` says what they were."""
        self.done += steps
        if self._bar:
            self._bar.update(self._task, advance=steps, description=f"{self.title} {self._fitted(line)}".strip())
        elif line and not self.quiet:
            self._print(f"[{self.done:>{len(str(self.total))}}/{self.total}] {line}  left {self._left()}")

    def layer(self, name: str, grid: str, error: float, rtn_error: float, seconds: float) -> None:
        """One layer is quantised; errors are relative output errors, round-to-nearest's beside the achieved one."""
        gain = f"  error {error:.3g} (round-to-nearest {rtn_error:.3g})"
        if self._bar:
            self.advance(line=name)
        else:
            self.advance(line=f"{name}  {grid}{gain}  {seconds:.1f} s")

    def update(self, done: int, total: int) -> None:
        """Callback form: `done` of `total` steps of the phase are done."""
        self.total = total
        self.advance(done - self.done)

    def note(self, text: str) -> None:
        """Something the user should know."""
        self._print(text)

    def _fitted(self, line: str) -> str:
        """The end of the line, where it does not fit beside the bar and its numbers."""
        room = max(1, self.console.width - len(self.title) - 40)
        return line if len(line) <= room else f"…{line[len(line) + 1 - room :]}"

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False)

    def _left(self) -> str:
        spent = time.monotonic() - self._start
        seconds = round(spent / max(self.done, 1) * (self.total - self.done))
        return f"{seconds // 60}:{seconds % 60:02d}"
