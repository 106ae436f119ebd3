"""A sink in its own thread, so that a failing or hanging sink costs training nothing."""

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from lightscale.runs.metrics.sink import Measurement, RunFacts, Sink

# Measurements that wait for their sink, some KB each; later ones are dropped.
MOST_WAITING = 10_000
# The pauses before a sink that failed is tried again, in seconds; the last one for all further times.
PAUSES_S = (0.0, 0.1, 1.0, 10.0, 60.0)
# A measurement with which the sink fails so often is dropped: it may be the reason.
MOST_TRIES = 5
# At the end of an attempt a sink may take so long for what waits.
CLOSE_TIMEOUT_S = 20.0

_Work = Callable[[Sink], None]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class BackgroundSink(Sink):
    """Another sink, called by a thread. Its methods neither wait nor raise; only ``close`` waits, up to a limit.

    A sink that fails is reopened and retried, less and less often; ``dropped`` counts the measurements lost. A sink
    whose package is missing is disabled.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[RunFacts], Sink],
        run: RunFacts,
        *,
        say: Callable[[str], None] = _say,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        """``name``: for messages; ``open_sink``: called by the thread, not before the first measurement."""
        self.failures, self.dropped = 0, 0
        self._name, self._open, self._run, self._say = name, open_sink, run, say
        self._close_timeout_s = close_timeout_s
        self._sink: Sink | None = None
        self._failing = 0  # times in a row
        self._waiting: deque[_Work] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._off = False
        # A daemon: the end of the process must not wait for a call that hangs.
        self._thread = threading.Thread(target=self._serve, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, measurement: Measurement) -> None:
        """See ``Sink``."""
        with self._changed:
            if self._off or len(self._waiting) >= MOST_WAITING:
                self._drop(1)
                return
            self._waiting.append(lambda sink: sink.write(measurement))
            self._changed.notify()

    def go_back(self, step: int) -> None:
        """See ``Sink``."""
        # However many wait: without it the sink would show steps twice.
        with self._changed:
            self._waiting.append(lambda sink: sink.go_back(step))
            self._changed.notify()

    def close(self) -> None:
        """See ``Sink``. After a time limit the sink is abandoned, and its pending measurements are dropped."""
        with self._changed:
            self._closing.set()
            self._changed.notify()
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            self._say(f"metrics: sink {self._name} did not close within {self._close_timeout_s:g} s and is abandoned")
            self._drop(len(self._waiting) + 1)
        if self.dropped:
            self._say(f"metrics: sink {self._name} lost {self.dropped} measurements; metrics.jsonl has all")

    def _serve(self) -> None:
        """The thread: work until the sink is closed and nothing waits, or it is switched off."""
        while not self._off and (work := self._next()) is not None:
            self._do(work)
        with self._changed:
            self._drop(len(self._waiting))
            self._waiting.clear()
        if self._sink is not None:
            try:
                self._sink.close()
            except Exception as error:  # noqa: BLE001 - it is another package's, and no metric is worth the run
                self._failed(error)

    def _next(self) -> _Work | None:
        with self._changed:
            while not self._waiting and not self._closing.is_set():
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None

    def _do(self, work: _Work) -> None:
        for _ in range(MOST_TRIES):
            try:
                if self._sink is None:
                    self._sink = self._open(self._run)
                    # What this attempt has written is valid, if the sink must be opened again.
                    self._run = replace(self._run, first_step=None)
                work(self._sink)
            except ImportError as error:
                self._switch_off(str(error))
                return
            except Exception as error:  # noqa: BLE001 - it is another package's, and no metric is worth the run
                self._failed(error)
                # At the end there is no time to try again.
                if self._closing.is_set():
                    self._off = True
                    break
                self._closing.wait(PAUSES_S[min(self._failing, len(PAUSES_S)) - 1])
            else:
                if self._failing:
                    self._say(f"metrics: sink {self._name} works again after {self._failing} failures")
                self._failing = 0
                return
        self._drop(1)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        self._failing += 1
        if self._failing == 1:
            kind = type(error).__name__
            self._say(f"metrics: sink {self._name} failed, {kind}: {error}; training continues, the sink is retried")
        sink, self._sink = self._sink, None
        if sink is not None:
            with contextlib.suppress(Exception):
                sink.close()

    def _switch_off(self, reason: str) -> None:
        self.failures += 1
        self._off = True
        self._drop(1)
        self._say(f"metrics: sink {self._name} is disabled: {reason}")

    def _drop(self, number: int) -> None:
        with self._changed:
            self.dropped += number
