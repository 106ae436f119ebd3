"""One compilation of a kernel's variant at a time on a node; the processes that wait read its result from the cache.

Without the lock, the ranks of a node that start together each compile every kernel.
"""

import errno
import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager

from lightscale.errors import UserError

_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class LockedCache(FileCacheManager):
    """Triton's folder of one variant, locked from the search that finds no result until the result is stored.

    The lock is ``flock`` on the file ``lock`` of the folder. The kernel releases it when the process ends.

    Raises:
        UserError: the cache lacks the variant, and its folder is not writable.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._descriptor: int | None = None
        with _writable():
            super().__init__(key, override, dump)

    def get_group(self, filename: str) -> Any:
        """The files of a compiled variant by name; None, with the lock held, if this process is to compile it."""
        found = super().get_group(filename)
        if found is None and self._descriptor is None:
            self._lock()
            # Another process has compiled it meanwhile.
            found = super().get_group(filename)
            if found is not None:
                self._release()
        return found

    def put(self, data: Any, filename: str, binary: bool = True) -> Any:
        """Store one file of a variant."""
        with _writable():
            return super().put(data, filename, binary)

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        """Store the list of a variant's files, the last file of a compilation."""
        path = super().put_group(filename, group)
        self._release()
        return path

    def _lock(self) -> None:
        with _writable():
            self._descriptor = os.open(self.lock_path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:
            os.close(self._descriptor)
            self._descriptor = None
            if error.errno not in _UNSUPPORTED:
                raise
            warnings.warn(
                f"Triton's cache {knobs.cache.dir}: its file system has no locks, so that each rank compiles the "
                "kernels; set TRITON_CACHE_DIR to a folder on a local disk",
                stacklevel=2,
            )

    def _release(self) -> None:
        if self._descriptor is not None:
            # Closing alone would not do in a process that has forked meanwhile.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        # A compilation that failed stores no group.
        self._release()


@contextmanager
def _writable() -> Iterator[None]:
    """Turn errors of the file system into an error of the user's."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"Triton's cache {knobs.cache.dir}: {error.strerror or error}; set TRITON_CACHE_DIR to a writable "
            "folder, or fill the cache first (lightscale doctor --warm CONFIG)"
        ) from None
