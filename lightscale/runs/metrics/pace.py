"""The pace of a run, and short forms of its numbers for the progress line."""

import datetime
from collections import deque

# The remaining time is estimated from this many last lines: enough to contain saves and validations.
_WINDOW_LINES = 100


class Pace:
    """Estimates the remaining time from the wall clock of the last lines, saves and validations included."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=_WINDOW_LINES)

    def time_left_s(self, tokens: int, left_tokens: int, now_s: float) -> float | None:
        """Seconds from `now_s`, the end of `tokens`, until `left_tokens` more are done; None before the second line."""
        self._seen.append((tokens, now_s))
        first_tokens, first_s = self._seen[0]
        if tokens <= first_tokens:
            return None
        return left_tokens * (now_s - first_s) / (tokens - first_tokens)


def time_text(seconds: float | None) -> str:
    """4000 -> "1:06:40"."""
    return "-:--:--" if seconds is None else str(datetime.timedelta(seconds=round(seconds)))


def short(number: float) -> str:
    """1234567 -> "1.23M"."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
