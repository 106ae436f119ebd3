"""A directory that a job writes to, held by its file descriptor, so that a replacement under its name is detected.

A run's directory may be removed, moved, replaced, or hidden by a mount while a job writes to it. The job must then not
write into the replacement, nor create a directory that looks like its run. An inode's number is not reused while the
descriptor is open, so that comparing numbers is enough.
"""

import errno
import os
from pathlib import Path

from lightscale.errors import UserError

# That the name stands for nothing, or no directory; and that the server has forgotten the one that is held.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE)


class DirectoryReplaced(UserError):
    """The path of the directory no longer leads to the directory that was opened."""


class HeldDirectory:
    """Holds the directory at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def fault(self) -> str | None:
        """The fault of the path; None: it is in place, or unknown (the file system is out of reach)."""
        try:
            now, held = self._path.stat(), os.fstat(self._descriptor)
        except OSError as error:
            return "is gone" if error.errno in _GONE else None
        return None if (now.st_dev, now.st_ino) == (held.st_dev, held.st_ino) else "is another directory now"

    def check(self) -> None:
        """Raise DirectoryReplaced if the path no longer leads to the directory."""
        if (fault := self.fault()) is not None:
            raise DirectoryReplaced(
                f"{self._path} {fault}: it was removed, renamed, replaced or hidden by a mount while this job wrote to "
                "it. The job stops and writes nothing more. Restore the run and start the same command again"
            )

    def close(self) -> None:
        """Release the directory."""
        os.close(self._descriptor)
