"""Opening a regular file: whatever else lies under its name is an error at once, nothing large is read. And locks."""

import errno
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from lightscale.errors import UserError
from lightscale.files import lock_or_refuse, open_regular, read_regular

WHAT = "the state of a run"


def test_the_content_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"1234")
    assert read_regular(path, what=WHAT, most_bytes=4) == b"1234"
    with open_regular(path, what=WHAT) as file:
        assert not os.get_inheritable(file.fileno())
        assert file.read() == b"1234"


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 << 30)  # sparse


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Path.mkdir, "a directory; the state of a run is a regular file"),
        (make_pipe, "a named pipe; the state of a run"),
        (make_socket, "a socket or device; the state of a run"),
        (lambda path: path.symlink_to("/dev/zero"), "a symbolic link"),
        (lambda path: path.symlink_to(path), "links in a circle"),
        (make_large, "10,737,418,240 bytes; the state of a run has at most 1,000"),
    ],
)
def test_anything_else_is_named(tmp_path: Path, make: object, message: str) -> None:
    assert callable(make)
    make(tmp_path / "state.json")
    with pytest.raises(UserError, match=message) as raised:
        read_regular(tmp_path / "state.json", what=WHAT, most_bytes=1000)
    assert str(tmp_path / "state.json") in str(raised.value)


def test_a_file_system_without_locks_is_not_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "lock").open("w") as file, (tmp_path / "lock").open("w") as other:
        lock_or_refuse(file.fileno(), tmp_path, held="another process is at it")
        with pytest.raises(UserError, match="another process is at it"):
            lock_or_refuse(other.fileno(), tmp_path, held="another process is at it")
        for code in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):

            def flock(descriptor: int, operation: int, code: int = code) -> None:
                raise OSError(code, os.strerror(code))

            monkeypatch.setattr(fcntl, "flock", flock)
            with pytest.raises(UserError, match=r"cannot be locked .* use a file system with flock"):
                lock_or_refuse(file.fileno(), tmp_path, held="another process is at it")


def test_a_missing_file_is_the_callers_to_explain(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", what=WHAT, most_bytes=1)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="a directory on the way to it is none"):
        read_regular(tmp_path / "file" / "state.json", what=WHAT, most_bytes=1)


def test_links_are_followed_where_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", what=WHAT, most_bytes=1, follow_links=True) == b"x"
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="a character device"):
        read_regular(tmp_path / "zero", what=WHAT, most_bytes=1, follow_links=True)


def test_a_file_that_says_no_size_is_bounded_too() -> None:
    with pytest.raises(UserError, match="more than 10 bytes"):
        read_regular(Path("/proc/self/status"), what=WHAT, most_bytes=10)


def test_a_file_of_somebody_else_is_named(tmp_path: Path, needs: Callable[..., None]) -> None:
    needs("root")  # becomes another user
    path = tmp_path / "state.json"
    path.write_bytes(b"x")
    path.chmod(0o600)
    os.seteuid(65534)
    try:
        with pytest.raises(UserError, match=r"state.json: user 65534 may not read it: Permission denied"):
            read_regular(path, what=WHAT, most_bytes=1)
    finally:
        os.seteuid(0)
