"""Stop requests: a signal or the deadline becomes one flag that all ranks agree on at the end of a step."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Self

from lightscale.output.streams import offer

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# When to stop without a signal, in seconds since the epoch; set by the launcher for its ranks.
DEADLINE_VARIABLE = "LIGHTSCALE_DEADLINE"
DEADLINE = "deadline"
# What ranks that reached it contribute to the all-reduce instead of a signal's number: more than any of those.
_DEADLINE_NUMBER = 1 << 10

# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1


class StopSignal:
    """Remembers the first stop signal of this process; the training loop asks at the end of every step.

    The deadline in the environment, if there is one, counts like a signal.

    From `install` on, a stop signal no longer ends the process: it means "finish the step, save, leave".
    Later ones change nothing. Before `install` the signals end the process, as there is nothing to save.

        with StopSignal(announce=rank == 0) as stop:
            for step in …:
                …
                if stop.should_stop(all_reduce_max):
                    break
    """

    def __init__(self, *, announce: bool, environ: Mapping[str, str] = os.environ) -> None:
        """`announce`: write one line to stderr when the signal comes; one rank should."""
        self._announce = announce
        # On the monotonic clock from here on: the other may be set while this process runs.
        self._deadline_s = time.monotonic() + float(environ.get(DEADLINE_VARIABLE, "inf")) - time.time()
        self._agreed = 0
        self._previous: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None
        """The first stop signal that this process itself got."""

    @property
    def reason(self) -> str | None:
        """Why the ranks agreed to stop ("SIGTERM", "deadline"), the same on all; None before that."""
        if self._agreed == _DEADLINE_NUMBER:
            return DEADLINE
        return signal.Signals(self._agreed).name if self._agreed else None

    def install(self) -> None:
        """Handle the stop signals. Only the main thread may call it."""
        for signum in STOP_SIGNALS:
            self._previous[signum] = signal.signal(signum, self._handle)

    def uninstall(self) -> None:
        """Restore the handlers from before `install`."""
        while self._previous:
            signal.signal(*self._previous.popitem())

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, *error: object) -> None:
        self.uninstall()

    def should_stop(self, all_reduce_max: Callable[[int], int]) -> bool:
        """Whether to leave after this step; the same answer on every rank.

        `all_reduce_max(value)` returns the largest `value` of all ranks. Every rank calls it once a step,
        until they have agreed to stop.
        """
        if not self._agreed:
            is_late = time.monotonic() >= self._deadline_s
            self._agreed = all_reduce_max(_DEADLINE_NUMBER if is_late else self.received or 0)
            if self._agreed == _DEADLINE_NUMBER and self._announce:
                print(f"{DEADLINE}: saving and exiting", file=sys.stderr, flush=True)
        return bool(self._agreed)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            return
        self.received = signal.Signals(signum)
        if self._announce:
            # print() is not reentrant, and the signal may have interrupted one; nor may anything here wait, or fail.
            offer(2, f"{self.received.name}: finishing this step, then saving and exiting\n".encode())


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process (SIGKILL) as soon as its parent, the process `parent`, is gone.

    Without it, a launcher killed with SIGKILL leaves its ranks behind, and these keep the GPUs. Long-lived children
    of a rank need it too. Linux only; elsewhere without effect.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        # The parent ended before prctl was called.
        os.kill(os.getpid(), signal.SIGKILL)
