"""Output of a training process: lines that no reader accepts are dropped, so that output never stops the run.

A job's output may go to a closed terminal, to a pipe whose reader has ended or stopped reading, or to a log on a disk
that is full, read-only or gone. Ordinary writes would then end the run, or block it for ever. The run's files hold all
output of the ranks too.
"""

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from lightscale.errors import printable

# How long a reader that has stopped is waited for, once: it may only be slow.
_PATIENCE_S = 5.0
# What a pipe that is ready takes without waiting.
_MOST_BYTES = select.PIPE_BUF


def offer(descriptor: int, data: bytes, patience_s: float = 0.0) -> bool:
    """Write as much of `data` as the reader accepts within `patience_s`; returns whether all of it was written.

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
    """A text stream to a log that never raises and never blocks for long."""

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
        """Write `text`; drops it when the reader does not accept it."""
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
        gap = f"\n[{self._lines_dropped} lines dropped here: the output accepted no more]\n" if self._is_stuck else ""
        self._is_stuck = not offer(descriptor, gap.encode() + data, patience_s)
        self._lines_dropped = self._lines_dropped + data.count(b"\n") if self._is_stuck else 0

    def flush(self) -> None:
        """Flush a stream without a descriptor; other streams have no buffer."""
        if self._descriptor is None:
            with contextlib.suppress(OSError):
                self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class TerminalStream:
    """A text stream to a terminal that obeys nothing in a text: control characters are spelled out (`printable`).

    Names and contents of data may be anybody's. rich writes past it; its consoles spell out themselves (`terminal.py`).
    """

    def __init__(self, stream: TextIO) -> None:
        # rich's name for the stream behind one that it did not make.
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write `text`."""
        self.rich_proxied_file.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write `lines`."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def spell_out_on_terminals() -> None:
    """Replace stdout and stderr with `TerminalStream`s where they are terminals, until this process ends."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream.isatty() and not hasattr(stream, "rich_proxied_file"):
            setattr(sys, name, TerminalStream(stream))


def obeyed(stream: TextIO) -> TextIO:
    """The stream for control sequences of our own."""
    return cast(TextIO, getattr(stream, "rich_proxied_file", stream))


def take_over_output() -> None:
    """Replace stdout and stderr with `LogStream`s until this process ends."""
    sys.stdout, sys.stderr = map(_lasting, (sys.stdout, sys.stderr))


def _lasting(stream: TextIO) -> TextIO:
    lasting = cast(TextIO, LogStream(obeyed(stream)))
    return cast(TextIO, TerminalStream(lasting)) if isinstance(stream, TerminalStream) else lasting


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Replace stdout and stderr with `LogStream`s within the context."""
    before = sys.stdout, sys.stderr
    take_over_output()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def open_missing_streams() -> None:
    """Open standard streams that were closed at the start of this process (`>&-`) to /dev/null.

    Otherwise the next files that it opens, such as the run's records, get the descriptors of the standard streams.
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
