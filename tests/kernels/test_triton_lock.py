"""One compilation of a variant at a time on a node, counted; a lock that is never left behind."""

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.runtime.jit import JITFunction

from lightscale.errors import UserError
from lightscale.kernels.common.triton import lock
from lightscale.kernels.common.triton.lock import LockedCache
from lightscale.kernels.common.triton.tracing import KernelLaunch, compile_launch

KEY, FILE = "VARIANT", "kernel.json"


def one(x):  # type: ignore[no-untyped-def]
    tl.store(x, 1.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def is_locked(cache: Path) -> bool:
    with (cache / KEY / "lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def forked(work: Callable[[], int]) -> int:
    """A process that ends with the exit code of ``work``."""
    process = os.fork()
    if process == 0:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    return process


def test_processes_that_compile_one_kernel_at_once_compile_it_once() -> None:
    assert knobs.cache.manager_class is LockedCache
    launch = KernelLaunch(JITFunction(one), (1,), (torch.empty(4, device="meta"),), {"enable_fp_fusion": True})
    ready, begin = os.pipe(), os.pipe()

    def compile_together() -> int:
        os.write(ready[1], b".")
        os.read(begin[0], 1)
        return int(compile_launch(launch, 90))

    processes = [forked(compile_together) for _ in range(3)]
    assert sum(len(os.read(ready[0], 1)) for _ in processes) == 3
    os.write(begin[1], b"...")
    hits = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    assert sorted(hits) == [0, 1, 1]


def test_a_killed_process_leaves_no_lock(cache: Path) -> None:
    ready = os.pipe()

    def hold() -> int:
        manager = LockedCache(KEY)
        manager.get_group(FILE)
        os.write(ready[1], b".")
        signal.pause()
        return int(manager is None)

    holder = forked(hold)
    os.read(ready[0], 1)
    try:
        assert is_locked(cache)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    manager = LockedCache(KEY)
    assert manager.get_group(FILE) is None
    assert is_locked(cache)


def test_the_lock_ends_with_the_compilation_and_with_its_failure(cache: Path) -> None:
    manager = LockedCache(KEY)
    assert manager.get_group(FILE) is None
    assert is_locked(cache)
    del manager  # an error of the compiler
    assert not is_locked(cache)
    manager = LockedCache(KEY)
    assert manager.get_group(FILE) is None
    stored = {FILE: manager.put("{}", FILE)}
    manager.put_group(FILE, stored)
    assert not is_locked(cache)
    other = LockedCache(KEY)
    assert other.get_group(FILE) == stored
    assert not is_locked(cache), "a result in the cache needs no lock"


def test_a_cache_that_cannot_be_written_is_an_error_with_a_remedy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache / "file" / "cache"))
    with pytest.raises(UserError, match=r"file/cache: Not a directory; set TRITON_CACHE_DIR to a writable folder"):
        LockedCache(KEY)


def test_a_file_system_without_locks_compiles_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    manager = LockedCache(KEY)
    with pytest.warns(UserWarning, match="has no locks"):
        assert manager.get_group(FILE) is None
    manager.put_group(FILE, {FILE: manager.put("{}", FILE)})
    assert LockedCache(KEY).get_group(FILE) is not None
