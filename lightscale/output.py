"""Output of a process that trains: what nobody takes is dropped, as no line of a log is worth the run.

A job's output may go to a terminal that was closed, to a pipe whose reader has ended or has stopped reading, or to a
log on a disk that is full, read-only or gone. Written as usual, it would end the run there, or stop it for ever. All
that ranks say is in files of the run as well.
"""

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO, cast

# How long a reader that has stopped is waited for, once: it may only be slow.
_PATIENCE_S = 5.0
# What a pipe that is ready takes without waiting.
_MOST_BYTES = select.PIPE_BUF


def offer(descriptor: int, data: bytes, patience_s: float = 0.0) -> bool:
    """Write `data` as far as it is taken, waiting at most `patience_s`; returns whether all of it was.

    May be called in a signal handler.
    """
    rest = memoryview(data)
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    deadline_s = time.monotonic() + patience_s
    while rest:
        left_s = max(0.0, deadline_s - time.monotonic())
        try:
            if not poll.poll(left_s * 1000):
                return False
            rest = rest[os.write(descriptor, rest[:_MOST_BYTES]) :]
        except OSError:
            return False
    return True


class LogStream:
    """A stream to a log, which neither fails nor waits for long."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # Whatever the launcher's threads show of ranks, and what it says itself, comes here.
        self._lock = threading.Lock()
        self._is_stuck, self._lines_dropped = False, 0
        self._descriptor: int | None = None
        # Streams of tests, and of interpreters within others, have no descriptor.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._descriptor = stream.fileno()
            stream.flush()

    def write(self, text: str) -> int:
        """As of any stream."""
        if self._descriptor is None:
            with contextlib.suppress(OSError):
                self._stream.write(text)
        else:
            with self._lock:
                self._offer(self._descriptor, text.encode("utf-8", errors="backslashreplace"))
        return len(text)

    def _offer(self, descriptor: int, data: bytes) -> None:
        # Once: whoever does not read does not delay the next lines too.
        patience_s = 0.0 if self._is_stuck else _PATIENCE_S
        gap = f"\n[{self._lines_dropped} lines were dropped here: nobody took them]\n" if self._is_stuck else ""
        self._is_stuck = not offer(descriptor, gap.encode() + data, patience_s)
        self._lines_dropped = self._lines_dropped + data.count(b"\n") if self._is_stuck else 0

    def flush(self) -> None:
        """As of any stream."""
        if self._descriptor is None:
            with contextlib.suppress(OSError):
                self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def take_over_output() -> None:
    """Have stdout and stderr be such streams until this process ends."""
    sys.stdout, sys.stderr = (cast(TextIO, LogStream(stream)) for stream in (sys.stdout, sys.stderr))


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """The same within."""
    before = sys.stdout, sys.stderr
    take_over_output()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def open_missing_streams() -> None:
    """Where this process was started with closed streams (`>&-`), open them to nothing.

    Otherwise the next files that it opens, records of the run among them, would get the numbers of the streams.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Gets the lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Python has None for those that were closed.
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - a descriptor, for as long as we live
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
