"""Where Triton keeps what it has compiled."""

import os
import tempfile
from pathlib import Path

# Either names a folder for Triton itself.
_VARIABLES = ("TRITON_CACHE_DIR", "TRITON_HOME")


def provide_cache() -> None:
    """Where the home directory cannot be written, a folder for temporary files is used; else Triton's own choice stays.

    Read by Triton when it compiles.
    """
    if any(name in os.environ for name in _VARIABLES):
        return
    folder = Path(os.path.expanduser("~")) / ".triton" / "cache"  # noqa: PTH111 - as Triton finds it, without errors
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        os.environ["TRITON_CACHE_DIR"] = str(_own_folder())


def _own_folder() -> Path:
    """The same for all processes of the user; a new one where others can write, for code is read from it."""
    folder = Path(tempfile.gettempdir()) / f"triton-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
        return Path(tempfile.mkdtemp(prefix="triton-"))
    return folder
