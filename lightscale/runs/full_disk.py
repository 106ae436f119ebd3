"""What a run does while the disk of its records is full: it holds them back, says so once, and goes on."""

import errno
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

Record = dict[str, Any]

_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: OSError) -> bool:
    """Whether it says that a disk or a quota is full: that may pass."""
    return error.errno in _FULL


class Held:
    """Records in order, each passed to ``write`` as soon as the disk takes it."""

    def __init__(self, write: Callable[[Record], None]) -> None:
        self._write = write
        self._records: deque[Record] = deque()

    def add(self, record: Record) -> None:
        """Write what is held back, and ``record``; hold back what the disk does not take."""
        is_new = not self._records
        self._records.append(record)
        try:
            self.flush()
        except OSError as error:
            if not is_full(error):
                raise
            if is_new:
                print(f"{error}; training goes on, records are held back", file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Write all that is held back. Raises OSError where that fails."""
        while self._records:
            self._write(self._records[0])
            self._records.popleft()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held back."""
        return not self._records


class Log:
    """A stream to a log: what a full disk does not take is left out."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As of any stream."""
        try:
            return self._stream.write(text)
        except OSError as error:
            if not is_full(error):
                raise
            return len(text)

    def flush(self) -> None:
        """As of any stream."""
        try:
            self._stream.flush()
        except OSError as error:
            if not is_full(error):
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
