"""A directory that a job writes to, held by its file descriptor: another one under its name is noticed.

A path names whatever lies there now. Where a run's directory is removed, moved away, replaced by another, or hidden by
a mount while a job writes to it, the job must not write into what is there then, nor make a directory that looks like
its run. As long as the descriptor is open the inode's number is not used again, so that comparing numbers is enough.
"""

import errno
import os
from pathlib import Path

from lightscale.errors import UserError

# That the name stands for nothing, or no directory; and that the server has forgotten the one that is held.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE)


class DirectoryReplaced(UserError):
    """The name of the directory no longer stands for the directory that was opened."""


class HeldDirectory:
    """The directory that `path` names now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def fault(self) -> str | None:
        """What happened to it; None: it is there. Unknown counts as there, as while a file system is out of reach."""
        try:
            now, held = self._path.stat(), os.fstat(self._descriptor)
        except OSError as error:
            return "is no longer there" if error.errno in _GONE else None
        return None if (now.st_dev, now.st_ino) == (held.st_dev, held.st_ino) else "is another directory now"

    def check(self) -> None:
        """Raise DirectoryReplaced where it is not there."""
        if (fault := self.fault()) is not None:
            raise DirectoryReplaced(
                f"{self._path} {fault}: it was removed, renamed, replaced or hidden by a mount while this job wrote to "
                "it; the job stops and writes nothing more. Put the run back there and start the same command again"
            )

    def close(self) -> None:
        """Hold it no longer."""
        os.close(self._descriptor)
