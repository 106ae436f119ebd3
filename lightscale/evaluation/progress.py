"""How far an evaluation is, for people: one line that is redrawn on a terminal, or a line now and then in a log."""

import datetime
import os
import sys
import time

from lightscale.runs.metrics.progress import TERMINAL_VARIABLE

_EVERY_S = 15.0
_REDRAWN_S = 0.2


class EvaluationProgress:
    """Of the tasks on one checkpoint, one after the other."""

    def __init__(self, name: str, *, enabled: bool) -> None:
        self._name, self._enabled = name, enabled
        terminal = os.environ.get(TERMINAL_VARIABLE, "")
        # The ranks' own stderr is a file; their launcher says which terminal is its.
        self._terminal = bool(terminal) or sys.stderr.isatty()
        self._stream = open(terminal, "w") if enabled and terminal else sys.stderr  # noqa: PTH123, SIM115
        self._task, self._total, self._done, self._block = "", 1, 0, 0
        self._started_s = self._shown_s = time.monotonic()

    def begin(self, task: str, total: int, *, resumed: int, requests: int) -> None:
        """A task of ``total`` tokens; ``resumed`` of its ``requests`` were answered before."""
        self._task, self._total, self._done, self._block = task, max(1, total), 0, 0
        self._started_s = self._shown_s = time.monotonic()
        kept = f", {resumed:,} of them answered before" if resumed else ""
        self.say(f"{self._name}: {task}, {requests:,} requests{kept}")

    def begin_block(self, tokens: int) -> None:
        """The next ``tokens`` of the task."""
        self._done += self._block
        self._block = tokens

    def advance(self, share: float) -> None:
        """``share`` of the block is done."""
        now_s = time.monotonic()
        if not self._enabled or now_s - self._shown_s < (_REDRAWN_S if self._terminal else _EVERY_S):
            return
        self._shown_s = now_s
        done = (self._done + share * self._block) / self._total
        elapsed_s = now_s - self._started_s
        left = datetime.timedelta(seconds=round(elapsed_s * (1 - done) / done)) if done > 0 else "?"
        speed = done * self._total / max(elapsed_s, 1e-9)
        line = f"{self._name}: {self._task} {done:4.0%}, {speed:,.0f} tokens/s, {left} left"
        self._stream.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        self._stream.flush()

    def end(self) -> None:
        """The task is done."""
        if self._enabled and self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._enabled:
            self.end()
            print(text, file=self._stream, flush=True)
