"""Files and directories that are there whole or not at all, also after a crash: written, synced, then renamed.

The order matters: a rename that reaches the disk before the content would name an empty file after a power failure. So
the content is synced first, then renamed, then the directory that holds the name is synced.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.errors import UserError
from lightscale.files import sync

TEMPORARY_SUFFIX = ".tmp"
"""Suffix of the names of incomplete files."""
DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""``errno`` of a full disk, a quota, a limit on file sizes."""


def _temporary_name(path: Path) -> Path:
    """A name that no process of any host uses; beside ``path``, because a rename works within one file system only."""
    return path.with_name(f"{path.name}.{os.uname().nodename}-{os.getpid()}{TEMPORARY_SUFFIX}")


def _name(error: OSError, path: Path) -> None:
    """Add the name of the file or directory, which the system does not give for writes."""
    if error.filename is None:
        error.filename = str(path)


@contextmanager
def whole_directory(path: Path, *, others_are_equal: bool = True) -> Iterator[Path]:
    """A new directory to fill; it gets the name ``path`` if the block ends well. Another's of that name stays.

    Args:
        path: of the directory; its parents are made.
        others_are_equal: whether one that another process finishes first has the same content.

    Raises:
        UserError: one was finished first, whose content is another.
    """
    temporary = _temporary_name(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_tree(temporary)
        try:
            temporary.rename(path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if not others_are_equal:
                raise UserError(f"{path}: another process wrote it at the same time; use another directory") from None
        sync(path.parent)
    except OSError as error:
        _name(error, path)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write a file under; it becomes ``path`` if the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    try:
        yield temporary
        sync(temporary)
        temporary.rename(path)
        sync(path.parent)
    except OSError as error:
        _name(error, path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """``content`` as the file ``path``, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def write_array(path: Path, array: NDArray[Any]) -> None:
    """``array`` as the npy file ``path``, whole or not at all."""
    with whole_file(path) as temporary, temporary.open("wb") as file:
        np.save(file, array)


def sync_tree(directory: Path) -> None:
    """Bring every file and directory below ``directory`` to the disk, and itself."""
    for entry in sorted(directory.rglob("*")):
        sync(entry)
    sync(directory)
