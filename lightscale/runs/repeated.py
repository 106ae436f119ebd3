"""Work that a process repeats beside its main thread: a lock to renew, ranks to watch."""

import threading
from collections.abc import Callable


class Repeated:
    """Calls `work` on a daemon thread every `period_s` seconds, first after one period, until `stop`."""

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
        while not self._stopped.wait(self._period_s):
            self._work()
