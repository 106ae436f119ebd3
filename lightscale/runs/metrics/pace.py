"""The pace of a run, and short forms of its numbers for the progress line."""

import datetime
from collections import deque

# The remaining time is estimated from this many last lines: enough to contain saves and validations.
_WINDOW_LINES = 100


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


def time_text(seconds: float | None) -> str:
    """4000 -> "1:06:40"."""
    return "-:--:--" if seconds is None else str(datetime.timedelta(seconds=round(seconds)))


def short(number: float) -> str:
    """1234567 -> "1.23M"."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
