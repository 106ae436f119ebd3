"""The interval between saves that loses the least time, from the cost of a save and the rate of failures."""

import math
import statistics
from collections import deque
from collections.abc import Iterable

# Before anything is measured.
FIRST_INTERVAL_S = 600.0
# Bounds: shorter, saves could wait for one another; longer, a wrong guess of the failure rate would cost too much.
SHORTEST_INTERVAL_S = 60.0
LONGEST_INTERVAL_S = 3600.0
# The cost is a median: one slow save on a busy file system does not change the interval.
_MEASURED_SAVES = 5


def best_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Seconds between two saves that stall training for `stall_s`, with a failure every `mtbf_s`: sqrt(2 stall MTBF).

    First order of Young (1974) and Daly (2006): stalls cost stall / interval of the time, and a failure half an
    interval. The time of a restart, or of the background write of a save, does not change the optimum.
    """
    return math.sqrt(2 * stall_s * mtbf_s)


class SaveInterval:
    """Decides when the next save is due, by a monotonic clock in seconds.

    interval = SaveInterval(mtbf_s=…, now_s=time.monotonic())
    for step in …:
        if interval.due(time.monotonic()):
            …
            interval.saved(time.monotonic(), stall_s)
    """

    def __init__(self, *, mtbf_s: float, now_s: float, stalls_s: Iterable[float] = ()) -> None:
        """`mtbf_s`: mean time between failures of the run; `stalls_s`: of earlier saves, oldest first."""
        self._mtbf_s = mtbf_s
        self._last_s = now_s
        self._stalls_s = deque(stalls_s, maxlen=_MEASURED_SAVES)

    @property
    def interval_s(self) -> float:
        """Seconds from the end of a save's stall to the next save."""
        if not self._stalls_s:
            return FIRST_INTERVAL_S
        best_s = best_interval_s(statistics.median(self._stalls_s), self._mtbf_s)
        # The optimum is flat: an interval twice too long or too short loses a quarter more time.
        return min(max(best_s, SHORTEST_INTERVAL_S), LONGEST_INTERVAL_S)

    def due(self, now_s: float) -> bool:
        """Whether the interval is over."""
        return now_s - self._last_s >= self.interval_s

    def saved(self, now_s: float, stall_s: float) -> None:
        """A save has stalled training for `stall_s`, until now."""
        self._last_s = now_s
        self._stalls_s.append(stall_s)
