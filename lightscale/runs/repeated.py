"""Work that a process repeats beside its main thread: a lock to renew, ranks to watch."""

import sys
import threading
from collections.abc import Callable

from lightscale.errors import remedy_of_limit, summary


class Repeated:
    """Calls `work` on a daemon thread every `period_s` seconds, first after one period, until `stop`.

    A call that meets a limit of the operating system, such as that of open files, is reported once, and the next one
    tries again. Any other error ends the thread.
    """

    def __init__(self, work: Callable[[], None], *, period_s: float, name: str) -> None:
        """`name`: of the thread, in stacks."""
        self._work, self._period_s = work, period_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the call of `work` in progress."""
        self._stopped.set()
        self._thread.join()

    def _repeat(self) -> None:
        is_reported = False
        while not self._stopped.wait(self._period_s):
            try:
                self._work()
                is_reported = False
            except Exception as error:
                if remedy_of_limit(error) is None:
                    raise
                if not is_reported:
                    print(f"{self._thread.name} tries again after {summary(error)}", file=sys.stderr, flush=True)
                is_reported = True
