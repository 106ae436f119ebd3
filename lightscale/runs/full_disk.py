"""Records of a run while their disk is full: they are held back, which is reported once, and training continues.

A full disk often passes: somebody frees space. Records are small, so that memory holds those of days.
"""

import errno
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

Record = dict[str, Any]

_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: OSError) -> bool:
    """Whether a disk or a quota is full, which may pass."""
    return error.errno in _FULL


class PendingRecords:
    """Records in order, each passed to ``write`` as soon as the disk accepts it.

    ``may_pass``: which errors of ``write`` are waited for; all others are raised.
    """

    def __init__(self, write: Callable[[Record], None], *, may_pass: Callable[[OSError], bool] = is_full) -> None:
        self._write, self._may_pass = write, may_pass
        self._records: deque[Record] = deque()

    def add(self, record: Record) -> None:
        """Write the pending records and ``record``; keep what the disk does not accept."""
        is_new = not self._records
        self._records.append(record)
        try:
            self.flush()
        except OSError as error:
            if not self._may_pass(error):
                raise
            # Once per full disk, not per record: the message goes to a log, which may be on the same disk.
            if is_new:
                print(f"{error}; training continues, records are kept in memory", file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Write all pending records. Raises OSError where that fails."""
        while self._records:
            self._write(self._records[0])
            # Only when it is written: a record must be neither lost nor written twice.
            self._records.popleft()


class LogStream:
    """A stream to a log: what a full disk does not accept is dropped, as no line of a log is worth the run."""

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
