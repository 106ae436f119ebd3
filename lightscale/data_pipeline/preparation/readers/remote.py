"""Files that are not on this machine: s3://BUCKET/KEY, http:// and https://, through fsspec.

A failed request is repeated for some seconds; then it raises ``OSError``, like a disk. Files of servers that send no
parts are fetched whole into a temporary file; no other data is written to disk.
"""

import importlib
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

import xxhash

from lightscale.errors import UserError

SCHEMES = ("s3://", "http://", "https://")
# Five attempts within nine seconds: a server that restarts is waited for, one that is gone does not take an hour.
_WAITS_S = (0.2, 0.8, 2.4, 5.6)
_GONE = (404, 410)
# A request for a part costs a round trip, so that smaller ones would mostly wait.
_BUFFER_BYTES = 4 * 2**20
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteStatus:
    """As ``os.stat_result`` names them."""

    st_size: int
    st_mtime_ns: int
    """A hash of the ETag or of the time of change that the server sends; 0 without both."""
    gives_parts: bool
    """Whether the server gives ranges of bytes."""


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file by its URL, with the part of ``pathlib.Path`` that reading needs."""

    url: str
    """With the scheme in lower case, which RFC 3986 allows in any."""

    def __post_init__(self) -> None:
        scheme, mark, rest = self.url.partition("://")
        object.__setattr__(self, "url", f"{scheme.lower()}{mark}{rest}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL without its query."""
        return self.url.partition("?")[0].rstrip("/").rpartition("/")[2]

    def stat(self) -> RemoteStatus:
        """Its size, and a number that changes with its content. Raises ``OSError`` if the server reports no length."""
        system = _system(self.url)
        info = _retried(self.url, lambda: system.info(self.url))
        if info.get("size") is None:
            raise OSError("the server does not report its length")
        version = info.get("ETag") or info.get("LastModified") or ""
        return RemoteStatus(
            st_size=int(info["size"]),
            st_mtime_ns=xxhash.xxh3_64_intdigest(str(version).encode()) >> 1 if version else 0,
            gives_parts=not self.url.startswith("http") or bool(info.get("partial")),
        )

    def open(self, mode: str = "rb", *, buffering: int = -1) -> BinaryIO:
        """Its content."""
        status = self.stat()
        if status.gives_parts:
            return io.BufferedReader(_Parts(self.url, status.st_size), _BUFFER_BYTES)
        whole = tempfile.NamedTemporaryFile(prefix="lightscale-")  # noqa: SIM115 - the caller closes it
        try:
            system = _system(self.url)
            _retried(self.url, lambda: system.get_file(self.url, whole.name))
        except BaseException:
            whole.close()
            raise
        return whole  # type: ignore[return-value]

    def read_bytes(self) -> bytes:
        """All of its content."""
        with self.open() as content:
            return content.read()


class _Parts(io.RawIOBase):
    """A file that is read by requests for parts of it."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._position = url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, out: Any) -> int:
        begin, end = self._position, min(self._position + len(out), self._size)
        if begin >= end:
            return 0
        system = _system(self._url)

        def part() -> bytes:
            found: bytes = system.cat_file(self._url, start=begin, end=end)
            if len(found) != end - begin:
                raise OSError(f"the server sent {len(found)} bytes of {end - begin}")
            return found

        out[: end - begin] = _retried(self._url, part)
        self._position = end
        return end - begin


def is_remote(entry: str) -> bool:
    """Whether an entry of a corpus is a URL."""
    return entry.lower().startswith(SCHEMES)


def list_files(entry: str) -> Iterator[tuple[str, RemotePath]]:
    """(its path below ``entry``, or its name; file) for the files of a URL: a file, a pattern or a prefix, by name.

    ``UserError`` where there is nothing, and for patterns and directories of http, which cannot be listed.
    """
    file = RemotePath(entry)
    entry = file.url
    try:
        if entry.startswith("http"):
            if entry.endswith("/"):
                raise UserError(f"{entry}: directories of a server cannot be listed; list its files")
            yield file.name, file
            return
        system = _system(entry)
        if any(mark in entry for mark in "*?["):
            found = _retried(entry, lambda: system.glob(entry))
            names = [(name.rpartition("/")[2], name) for name in sorted(found)]
        else:
            base = entry.removeprefix("s3://").rstrip("/")
            found = _retried(entry, lambda: system.find(base))
            top = base.rpartition("/")[2]
            names = [(top + name.removeprefix(base), name) for name in sorted(found)]
    except OSError as error:
        raise UserError(f"{entry}: {error}") from error
    if not names:
        raise UserError(f"{entry}: it does not exist")
    for name, key in names:
        yield name, RemotePath(f"s3://{key}")


def _system(url: str) -> Any:
    """The file system of a URL; fsspec keeps one for each process."""
    scheme = url.partition("://")[0]
    try:
        fsspec = importlib.import_module("fsspec")
        # Without its cache of listings: what was changed meanwhile must be seen.
        return fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        extra = "s3" if scheme == "s3" else "remote"
        raise UserError(f"{url}: {error}; pip install 'lightscale[{extra}]'") from error


def _is_gone(url: str, cause: BaseException) -> bool:
    """Whether what is said to be no file is none: of http fsspec says so whatever failed, also if nobody answers."""
    status = getattr(cause, "status", None)
    return status in _GONE if status else isinstance(cause, FileNotFoundError) or not url.startswith("http")


def _retried(url: str, request: Callable[[], T]) -> T:
    """What ``request`` gives; made again where it fails in a way that may pass. ``OSError`` where it does not pass."""
    for wait_s in (*_WAITS_S, None):
        try:
            return request()
        except PermissionError:
            raise
        except Exception as error:
            cause = error.__cause__ or error
            if isinstance(error, FileNotFoundError) and _is_gone(url, cause):
                if url.startswith("http"):  # where fsspec says nothing but the URL
                    raise FileNotFoundError("the server has no such file") from error
                raise
            if wait_s is None:
                attempts = len(_WAITS_S) + 1
                raise OSError(f"{attempts} requests failed, the last with: {cause or type(cause).__name__}") from error
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")
