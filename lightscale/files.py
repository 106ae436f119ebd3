"""Opening what lies under a name: a regular file of a bounded size, or a `UserError` that says what is there instead.

A name that is expected to be a file can be anything by the time it is read: a named pipe, on which a plain ``open``
waits for ever, a directory, a link to elsewhere, a sparse file of terabytes. Everything that lightscale reads and
others can have changed is opened here.
"""

import errno
import fcntl
import gzip
import io
import os
import stat
import zlib
from io import BufferedReader
from pathlib import Path

from lightscale.errors import UserError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFREG: "a regular file",
}
_SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def size_text(num_bytes: float) -> str:
    """1.62e12 -> "1.62 TB"."""
    unit, size = next((one for one in _SIZES if num_bytes >= one[1]), _SIZES[-1])
    return f"{num_bytes / size:.3g} {unit}"


def existing_part(path: Path) -> Path:
    """`path`, or the closest directory above it that exists."""
    absolute = path.absolute()
    return next(part for part in (absolute, *absolute.parents) if part.is_dir())


def sync(path: Path) -> None:
    """Bring what was written to `path`, a file or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class NotRegular(UserError):
    """What lies there is no file of the kind that was expected, whoever put it there: no regular one, or too large."""


def kind(mode: int) -> str:
    """What a file of `mode` (``st_mode``) is, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "no regular file")


def open_regular(path: Path, *, what: str, most_bytes: int | None = None, follow_links: bool = False) -> BufferedReader:
    """The regular file `path`, open for reading; never waits for a writer, as an open of a named pipe does.

    Args:
        path: The file.
        what: What it should be, for messages, as in "the state of a run".
        most_bytes: The largest size that makes sense; None: any, for files that are read in parts.
        follow_links: Open what a symbolic link at `path` points to; else a link is refused. Links among the directories
            that lead to it are always followed.

    Raises:
        FileNotFoundError: There is nothing: what this means is the caller's to say.
        NotRegular: It is no regular file, or larger than `most_bytes`.
        UserError: It may not be read.
        OSError: The storage failed.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise _refusal(error, path, what) from error
    except ValueError as error:  # NUL, or half of a character, which no name of a file has
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotRegular(f"{path}: {kind(status.st_mode)}; {what} is a regular file")
        if most_bytes is not None and status.st_size > most_bytes:
            raise _too_large(path, what, f"{status.st_size:,}", most_bytes)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, *, what: str, most_bytes: int, follow_links: bool = False) -> bytes:
    """The content of the regular file `path`, of at most `most_bytes`; arguments and errors as of `open_regular`."""
    with open_regular(path, what=what, most_bytes=most_bytes, follow_links=follow_links) as file:
        # Not `most_bytes` at once: a read takes that much memory, whatever the file has.
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1)
        if len(content) > size:  # it grew since, or says no size, as in /proc
            content += file.read(most_bytes + 1 - len(content))
    if len(content) > most_bytes:
        raise _too_large(path, what, f"more than {most_bytes:,}", most_bytes)
    return content


def unpacked_gzip(data: bytes, path: Path, *, most_bytes: int) -> bytes:
    """The unpacked content of the file `path`, which is `data`. UserError: damaged, or more than `most_bytes`."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            content = file.read(most_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip file ({error})") from None
    if len(content) > most_bytes:
        raise UserError(f"{path}: more than {most_bytes:,} bytes unpacked; divide the file")
    return content


def _too_large(path: Path, what: str, size: str, most_bytes: int) -> NotRegular:
    return NotRegular(f"{path}: {size} bytes; {what} has at most {most_bytes:,}")


def _refusal(error: OSError, path: Path, what: str) -> OSError | UserError:
    """`error` of opening `path`; where the user can correct it, a `UserError`."""
    match error.errno:
        case errno.ELOOP:
            return NotRegular(f"{path}: a symbolic link, or links in a circle; {what} is a regular file")
        case errno.ENXIO | errno.ENODEV:
            return NotRegular(f"{path}: a socket or device; {what} is a regular file")
        case errno.EACCES | errno.EPERM:
            return UserError(f"{path}: user {os.geteuid()} may not read it: {error.strerror}")
        case errno.ENOTDIR:
            return UserError(f"{path}: a directory on the way to it is none")
        case _:
            return error


def lock_or_refuse(descriptor: int, path: Path, *, held: str) -> None:
    """Lock an open file (flock), until it is closed or this process ends.

    Args:
        descriptor: The open file.
        path: What is locked, for messages.
        held: What it means that another process has the lock, and what to do.

    Raises:
        UserError: Another process has it, or the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path}: {held}") from None
    except OSError as error:
        raise UserError(
            f"{path}: cannot be locked ({error.strerror}), so that two processes could change it at once; use a file "
            "system with flock (Lustre: mounted with -o flock)"
        ) from error
