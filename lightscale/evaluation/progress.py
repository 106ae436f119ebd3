"""Progress of an evaluation: a live line on a terminal, or a line now and then in a log."""

import time

from lightscale.output.progress import Progress, start_progress
from lightscale.runs.metrics.pace import short, time_text

_EVERY_S = 15.0
_REDRAWN_S = 0.2


class EvaluationProgress:
    """Of the tasks on one checkpoint, one after the other."""

    def __init__(self, name: str, *, enabled: bool) -> None:
        self._name, self._enabled = name, enabled
        self._shown: Progress | None = None
        self._task, self._total, self._done, self._block = "", 1, 0, 0
        self._started_s = self._shown_s = time.monotonic()

    def begin(self, task: str, total: int, *, resumed: int, requests: int) -> None:
        """A task of ``total`` tokens; ``resumed`` of its ``requests`` were answered before."""
        self.end()
        self._task, self._total, self._done, self._block = task, max(1, total), 0, 0
        self._started_s = self._shown_s = time.monotonic()
        kept = f", {resumed:,} of them answered before" if resumed else ""
        self.say(f"{self._name}: {task}, {requests:,} requests{kept}")
        if self._enabled:
            self._shown = start_progress("tokens", self._total, is_kept=False)

    def begin_block(self, tokens: int) -> None:
        """The next ``tokens`` of the task."""
        self._done += self._block
        self._block = tokens

    def advance(self, share: float) -> None:
        """``share`` of the block is done."""
        now_s = time.monotonic()
        if self._shown is None or now_s - self._shown_s < (_REDRAWN_S if self._shown.is_live else _EVERY_S):
            return
        self._shown_s = now_s
        done, elapsed_s = self._done + share * self._block, now_s - self._started_s
        left_s = elapsed_s * (self._total - done) / done if done > 0 else None
        speed = short(done / max(elapsed_s, 1e-9))
        self._shown.show(round(done), f"{self._name}: {self._task}, {speed} tokens/s, left {time_text(left_s)}")

    def end(self) -> None:
        """The task is done."""
        if self._shown is not None:
            self._shown.close()
            self._shown = None

    def say(self, text: str) -> None:
        """Print a line."""
        if not self._enabled:
            return
        shown = self._shown or start_progress("", 1)
        shown.say(text)
        if shown is not self._shown:
            shown.close()
