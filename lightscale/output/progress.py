"""Progress for people: a live line or a line for each report; bars of steps."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO

import rich.progress

from lightscale.output.terminal import PlainConsole

# The launcher's terminal, for the progress line: the ranks' own stderr is a log file.
TERMINAL_VARIABLE = "LIGHTSCALE_TERMINAL"


class Progress(Protocol):
    """Destination of progress lines."""

    is_live: bool
    """Whether a line replaces the one before."""

    def show(self, done: int, text: str) -> None:
        """`done` of the total is done, as `text` says."""

    def say(self, text: str) -> None:
        """Print a line."""

    def close(self) -> None:
        """Restore the terminal."""


class PlainProgress:
    """Prints a line for each report, for logs and pipes."""

    is_live = False

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total

    def show(self, done: int, text: str) -> None:
        """`done` of the total is done, as `text` says."""
        self.say(f"{self._what} {done}/{self._total}  {text}")

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing to close."""


class LiveProgress:
    """One line on a terminal, redrawn for every report."""

    is_live = True

    def __init__(self, terminal: TextIO, what: str, total: int, *, done: int, is_kept: bool) -> None:
        self._terminal = terminal
        own = terminal is sys.stderr
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn(what + " {task.completed:.0f}/{task.total:.0f}", markup=False),
            rich.progress.BarColumn(bar_width=20),
            rich.progress.TextColumn("{task.description}", markup=False),
            console=PlainConsole(file=terminal, force_terminal=True, highlight=False, markup=False),
            # Drawn once a report: a refreshing thread would compete with training for the interpreter.
            auto_refresh=False,
            transient=not is_kept,
            redirect_stdout=own,
            redirect_stderr=own,
        )
        self._task = self._progress.add_task("", total=total, completed=done)

    def show(self, done: int, text: str) -> None:
        """`done` of the total is done, as `text` says."""
        # Not before the first report: the line would be mixed with what is printed during the start.
        self._progress.start()
        self._progress.update(self._task, completed=done, description=text, refresh=True)

    def say(self, text: str) -> None:
        """Print a line above the live one."""
        self._progress.console.print(text)

    def close(self) -> None:
        """Keep or erase the line, and restore the terminal."""
        self._progress.stop()
        if self._terminal is not sys.stderr:
            self._terminal.close()


def start_progress(what: str, total: int, *, done: int = 0, is_kept: bool = True) -> Progress:
    """Progress of `what` on the launcher's terminal, or on stderr; `is_kept`: the last live line remains."""
    terminal = _terminal()
    if terminal is None:
        return PlainProgress(what, total)
    return LiveProgress(terminal, what, total, done=done, is_kept=is_kept)


def _terminal() -> TextIO | None:
    """The terminal to draw on: the launcher's, or stderr if it is one."""
    name = os.environ.get(TERMINAL_VARIABLE)
    if name:
        # In another container, or after the terminal was closed, the name may not exist.
        with contextlib.suppress(OSError):
            return os.fdopen(os.open(name, os.O_WRONLY | os.O_NOCTTY), "w", encoding="utf-8")
    return sys.stderr if sys.stderr.isatty() else None


@contextlib.contextmanager
def progress_bars(*, counts: str = "bytes", is_kept: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for every step, on stderr, with how much is done and the time left.

    `counts`: bytes, or the name of other things; `is_kept`: the bars remain, on other files than terminals too.
    """
    columns = rich.progress
    amounts = (
        (columns.DownloadColumn(), columns.TransferSpeedColumn())
        if counts == "bytes"
        else (columns.MofNCompleteColumn(),)
    )
    console = PlainConsole(stderr=True)
    bars = columns.Progress(
        columns.TextColumn("{task.description:>24}", markup=False),
        columns.BarColumn(),
        *amounts,
        columns.TimeRemainingColumn(),
        console=console,
        transient=not is_kept,
        disable=not (is_kept or console.is_terminal),
    )
    tasks: dict[str, Any] = {}

    def show(step: str, done: int, total: int) -> None:
        if step not in tasks:
            # Not before: stopped without a bar, it prints an empty line above the error.
            bars.start()
            tasks[step] = bars.add_task(step, total=total)
        bars.update(tasks[step], completed=done)

    try:
        yield show
    finally:
        if tasks:
            bars.stop()
