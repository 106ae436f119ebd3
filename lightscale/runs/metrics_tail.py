"""The newest lines of a metrics.jsonl, for repeated looks at a run; reads little of a long file."""

import os
from collections import deque
from io import BufferedReader
from pathlib import Path
from typing import Any

from lightscale.files import NotRegular, open_regular
from lightscale.records import MOST_LINE_BYTES, Record, newest_lines, parse_line

NUM_STEPS = 50
"""Number of newest step lines to keep."""

_VALIDATION = b'"validation"'


class MetricsTail:
    """The newest lines of `path`. `refresh` reads the lines appended since the last time.

    The first time, and after a return to an earlier step, it reads backwards from the end, no further than necessary.
    If several attempts reached a step, the last one's line counts, as in `read_metrics`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Bytes of complete lines that were read, or need not be.
        self._end = 0
        self.steps: deque[Record] = deque(maxlen=NUM_STEPS)
        """Lines of the newest logged steps, in order."""
        self.validation: Record | None = None
        """The newest line with validation losses."""

    def refresh(self, *, has_validation: bool) -> None:
        """Read the appended lines. `has_validation`: the run validates, so that a search may go far back."""
        try:
            with open_regular(self._path, what="a record of a run") as file:
                size = file.seek(0, os.SEEK_END)
                # Shorter than before: a line that a kill cut short was removed, or it is another file.
                if not self._end or size < self._end or not self._read_on(file, size):
                    self._read_back(file, size, has_validation)
        except (FileNotFoundError, NotRegular):
            self._forget()

    def smoothed_loss(self) -> float | None:
        """Mean loss of `steps`, without skipped steps."""
        losses = [line["loss"] for line in self.steps if "skipped" not in line and line.get("loss") is not None]
        return sum(losses) / len(losses) if losses else None

    def newest(self, *keys: str) -> Any:
        """The newest value of any of `keys` (within a line, the first one present); None if no line has one."""
        return next((line[key] for line in reversed(self.steps) for key in keys if line.get(key) is not None), None)

    def _forget(self) -> None:
        self._end, self.validation = 0, None
        self.steps.clear()

    def _read_on(self, file: BufferedReader, size: int) -> bool:
        """Take in what was appended; False where the run has returned to an earlier step."""
        if size - self._end > MOST_LINE_BYTES:
            # Grown by much at once: only the newest lines of it are wanted.
            return False
        file.seek(self._end)
        data = file.read(size - self._end)
        complete = data[: data.rfind(b"\n") + 1]
        for text in complete.split(b"\n")[:-1]:
            if (line := self._parse(text)) is None:
                continue
            if "validation" in line:
                self.validation = line
            if "step_s" in line:
                if self.steps and line["step"] <= self.steps[-1]["step"]:
                    return False
                self.steps.append(line)
        self._end += len(complete)
        return True

    def _read_back(self, file: BufferedReader, size: int, has_validation: bool) -> None:
        self._forget()
        # The earliest step seen: what comes before it in the file and is of a later step was done again since.
        earliest = float("inf")
        for end, text in newest_lines(file, size):
            self._end = max(self._end, end)
            has_steps = len(self.steps) == NUM_STEPS
            if has_steps and (self.validation is not None or not has_validation):
                break
            if has_steps and _VALIDATION not in text:
                continue
            line = self._parse(text)
            if line is None or line["step"] >= earliest:
                continue
            if "validation" in line and self.validation is None:
                self.validation = line
            if "step_s" in line and not has_steps:
                self.steps.appendleft(line)
                earliest = line["step"]

    def _parse(self, text: bytes) -> Record | None:
        """None: damaged, and skipped."""
        try:
            return parse_line(text, self._path.name)
        except ValueError:
            return None
