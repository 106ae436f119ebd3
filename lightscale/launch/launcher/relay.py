"""Relays the launcher's stop signals to the ranks."""

import contextlib
import os
import signal
from collections.abc import Mapping
from types import FrameType
from typing import Any, Self

import psutil

from lightscale.output.streams import offer
from lightscale.runs.repeated import Repeated
from lightscale.training.signals import STOP_SIGNALS

_POLL_S = 0.1


class StopRelay:
    """Relays the first stop signal of this process to each rank, once.

    A rank has its own session, so that neither Ctrl-C nor a closed terminal (SIGHUP) reaches it directly; other
    children of this process have none. SIGHUP counts as SIGTERM, unless nohup ignores it. The third Ctrl-C kills the
    ranks.
    """

    def __init__(self, translation: Mapping[signal.Signals, signal.Signals] | None = None) -> None:
        """`translation`: what is sent instead, to children that are no ranks themselves but start some."""
        self.received: signal.Signals | None = None
        self._translation = translation or {}
        self._interrupts = 0
        self._previous: dict[signal.Signals, Any] = {}
        self._told: set[int] = set()
        # A handler alone would miss the ranks that start after the signal came.
        self._relaying = Repeated(self._relay, period_s=_POLL_S, name="stop-relay")

    def __enter__(self) -> Self:
        for signum in (*STOP_SIGNALS, signal.SIGHUP):
            if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._handle)
        self._relaying.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._relaying.stop()
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.SIGTERM if signum == signal.SIGHUP else signal.Signals(signum)
        elif signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts == 1:
                offer(2, b"already stopping; press Ctrl-C once more to end the run without saving\n")

    def _relay(self) -> None:
        if self.received is None:
            return
        for rank in psutil.Process().children():
            with contextlib.suppress(ProcessLookupError):
                # Leaders of a session are ranks, or the scheduler's step with the agents. Anything else is a helper of
                # this process.
                if os.getsid(rank.pid) != rank.pid:
                    continue
                # The group, with all processes that the rank has started: data workers end late without a signal.
                if self._interrupts > 1:
                    os.killpg(rank.pid, self._translated(signal.SIGKILL))
                elif rank.pid not in self._told:
                    self._told.add(rank.pid)
                    os.kill(rank.pid, self._translated(self.received))

    def _translated(self, signum: signal.Signals) -> signal.Signals:
        return self._translation.get(signum, signum)
