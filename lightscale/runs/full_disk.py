"""Records of a run on a full disk: kept in memory and reported once, while training continues.

A full disk often recovers when somebody frees space; so does one that is read-only or forbidden for a while. Records
are small: memory holds those of days.
"""

import errno
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from lightscale.errors import UserError

Record = dict[str, Any]
Result = TypeVar("Result")

# EFBIG: the limit of a file's size, which `prlimit` raises from outside.
_MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
# How long a launcher whose ranks have failed waits for its disk, and between two attempts.
_PATIENCE_S, _PAUSE_S = 900.0, 1.0


class MayNotWrite(UserError):
    """The user has no permission to write a record: an error at a start, perhaps temporary later."""


def may_pass(error: Exception) -> bool:
    """Whether `error` comes from a disk that is full or not writable, perhaps for a while."""
    return isinstance(error, MayNotWrite) or (isinstance(error, OSError) and error.errno in _MAY_PASS)


def when_possible(write: Callable[[], Result], *, give_up: Callable[[], bool] = lambda: False) -> Result:
    """The result of `write`, retried while its disk is full or read-only, for at most 15 minutes.

    Raises the last error after that, or when `give_up` returns true; raises other errors at once.
    """
    began_s: float | None = None
    while True:
        try:
            return write()
        except (OSError, MayNotWrite) as error:
            if not may_pass(error):
                raise
            now_s = time.monotonic()
            if began_s is None:
                began_s = now_s
                print(f"{error}; waiting until the disk accepts writes", file=sys.stderr, flush=True)
            if give_up() or now_s - began_s > _PATIENCE_S:
                raise
        time.sleep(_PAUSE_S)


class PendingRecords:
    """Records in order, each passed to ``write`` as soon as the disk accepts it.

    ``passes`` selects the errors of ``write`` to wait for; all others are raised.
    """

    def __init__(self, write: Callable[[Record], None], *, passes: Callable[[Exception], bool] = may_pass) -> None:
        self._write, self._passes = write, passes
        self._records: deque[Record] = deque()

    def add(self, record: Record) -> None:
        """Write the pending records and ``record``; keep what the disk does not accept."""
        is_new = not self._records
        self._records.append(record)
        try:
            self.flush()
        except (OSError, MayNotWrite) as error:
            if not self._passes(error):
                raise
            # Once per full disk, not per record: the message goes to a log, which may be on the same disk.
            if is_new:
                print(f"{error}; training continues, records are kept in memory", file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Write all pending records. Raises OSError or MayNotWrite on failure."""
        while self._records:
            self._write(self._records[0])
            # Only when it is written: a record must be neither lost nor written twice.
            self._records.popleft()
