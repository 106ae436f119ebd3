"""The folder in which Triton stores compiled kernels, and the class that reads and writes it.

Both are set by Triton's environment variables: Triton chooses between compiler and interpreter when it is imported,
which must not happen here.
"""

import os
import tempfile
from pathlib import Path

# Either names a folder for Triton itself.
_VARIABLES = ("TRITON_CACHE_DIR", "TRITON_HOME")


def provide_cache() -> None:
    """Set Triton's cache to a temporary folder where the home directory is not writable; else keep Triton's choice.

    Triton reads the variable when it compiles.
    """
    if any(name in os.environ for name in _VARIABLES):
        return
    folder = Path(os.path.expanduser("~")) / ".triton" / "cache"  # noqa: PTH111 - as Triton finds it, without errors
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        os.environ["TRITON_CACHE_DIR"] = str(_own_folder())


def compile_once() -> None:
    """Let processes that compile the same kernel wait for the first (``lock.LockedCache``); keep a user's choice."""
    os.environ.setdefault("TRITON_CACHE_MANAGER", "lightscale.kernels.common.triton.lock:LockedCache")


def _own_folder() -> Path:
    """One folder for all processes of the user; a new one if others can write to it, because code is loaded from it."""
    folder = Path(tempfile.gettempdir()) / f"triton-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
        return Path(tempfile.mkdtemp(prefix="triton-"))
    return folder
