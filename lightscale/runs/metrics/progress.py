"""The progress of a run for people: one live line on a terminal, or one line per step in a log."""

import contextlib
import datetime
import os
import sys
from collections import deque
from typing import Protocol, TextIO

import rich.progress
from rich.console import Console

# The launcher's terminal, for the progress line: the ranks' own stderr is a log file.
TERMINAL_VARIABLE = "LIGHTSCALE_TERMINAL"

# The remaining time is estimated from this many last lines: enough to contain saves and validations.
_WINDOW_LINES = 100


class Progress(Protocol):
    """Destination of progress lines."""

    def show(self, step: int, text: str) -> None:
        """`step` ended as `text` says."""

    def say(self, text: str) -> None:
        """Print a line."""

    def close(self) -> None:
        """Restore the terminal."""


class Pace:
    """Estimates the remaining time from the wall clock of the last lines, saves and validations included."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._seen: deque[tuple[int, float]] = deque(maxlen=_WINDOW_LINES)

    def time_left_s(self, step: int, now_s: float) -> float | None:
        """Seconds from `now_s`, the end of `step`, to the run's end; None before the second line."""
        self._seen.append((step, now_s))
        first_step, first_s = self._seen[0]
        if step <= first_step:
            return None
        return (self._total_steps - step) * (now_s - first_s) / (step - first_step)


class PlainProgress:
    """Prints one line for each logged step, for logs and pipes."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def show(self, step: int, text: str) -> None:
        """`step` ended as `text` says."""
        self.say(f"step {step}/{self._total_steps}  {text}")

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing to close."""


class LiveProgress:
    """One line on a terminal, redrawn for every logged step."""

    def __init__(self, terminal: TextIO, total_steps: int, steps_done: int) -> None:
        self._terminal = terminal
        own = terminal is sys.stderr
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            rich.progress.BarColumn(bar_width=20),
            rich.progress.TextColumn("{task.description}"),
            console=Console(file=terminal, force_terminal=True, highlight=False, markup=False),
            # Drawn once a step: a refreshing thread would compete with training for the interpreter.
            auto_refresh=False,
            redirect_stdout=own,
            redirect_stderr=own,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=steps_done)

    def show(self, step: int, text: str) -> None:
        """`step` ended as `text` says."""
        # Not before the first step: the line would be mixed with what is printed while the run starts.
        self._progress.start()
        self._progress.update(self._task, completed=step, description=text, refresh=True)

    def say(self, text: str) -> None:
        """Print a line above the live one."""
        self._progress.console.print(text)

    def close(self) -> None:
        """Keep the line and restore the terminal."""
        self._progress.stop()
        if self._terminal is not sys.stderr:
            self._terminal.close()


def start_progress(total_steps: int, steps_done: int) -> Progress:
    """Progress on the launcher's terminal, or on stderr."""
    terminal = _terminal()
    return PlainProgress(total_steps) if terminal is None else LiveProgress(terminal, total_steps, steps_done)


def _terminal() -> TextIO | None:
    """The terminal to draw on: the launcher's, or stderr if it is one."""
    name = os.environ.get(TERMINAL_VARIABLE)
    if name:
        # In another container, or after the terminal was closed, the name may not exist.
        with contextlib.suppress(OSError):
            return os.fdopen(os.open(name, os.O_WRONLY | os.O_NOCTTY), "w", encoding="utf-8")
    return sys.stderr if sys.stderr.isatty() else None


def time_text(seconds: float | None) -> str:
    """4000 -> "1:06:40"."""
    return "-:--:--" if seconds is None else str(datetime.timedelta(seconds=round(seconds)))


def short(number: float) -> str:
    """1234567 -> "1.23M"."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
