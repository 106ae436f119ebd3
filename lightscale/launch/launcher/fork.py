"""Ranks as forks of their launcher, so that they do not repeat its imports, which take seconds.

torch's elastic agent starts a rank by one method, ``SubprocessHandler._popen``, and uses only the interface of
``subprocess.Popen``. ``forked_ranks`` replaces it by a fork, and nothing else changes: a rank is a child of the
launcher with its own session and output files, the agent gets its exit code, and a restart is another fork of the same
launcher.

A fork has only the thread that made it. Locks held by other threads stay held: the C library, Python and PyTorch
release their own, and a rank never uses the launcher's objects, which have the rest. The watchdog detects a rank that
hangs nevertheless.

Not for GPUs: CUDA fails in a fork of a process that has used it. Their ranks are new processes.
"""

import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import ForkProcess
from typing import cast

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

Program = Callable[[Sequence[str]], int]
"""A program: from the words of a command line to the exit code."""

_POLL_S = 0.02


@contextlib.contextmanager
def forked_ranks(program: Program) -> Iterator[None]:
    """Within the context, the elastic agent forks this process for each rank, which runs ``program``."""

    def fork(handler: SubprocessHandler, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen:
        assert handler._stdout is not None and handler._stderr is not None
        outputs = (handler._stdout.fileno(), handler._stderr.fileno())
        return cast(subprocess.Popen, ForkedRank(program, command, environment, outputs))

    before = SubprocessHandler._popen
    SubprocessHandler._popen = fork  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        SubprocessHandler._popen = before  # type: ignore[method-assign]


class ForkedRank:
    """A rank's process, with the part of ``subprocess.Popen`` that the agent uses."""

    def __init__(
        self, program: Program, command: Sequence[str], environment: Mapping[str, str], outputs: tuple[int, int]
    ) -> None:
        """``outputs``: descriptors of the files for stdout and stderr."""
        # A signal that comes before the rank has its own handlers waits, or the launcher's would swallow it there.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._process = ForkProcess(target=_rank, args=(program, command, environment, outputs, unblocked))
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, -n after signal n; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired."""
        deadline_s = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(self._process.name, timeout)
            time.sleep(_POLL_S)
        return code


def _rank(
    program: Program,
    command: Sequence[str],
    environment: Mapping[str, str],
    outputs: tuple[int, int],
    unblocked: set[signal.Signals],
) -> None:
    """The rank's process: first everything that a new program would not have from its parent."""
    os.setsid()
    _reset_signals()
    _redirect(outputs)
    os.environ.clear()
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    # Read by torch when it was imported. The first number, where there is one for each level of nesting.
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"].partition(",")[0]))
    # Nothing of what the launcher has made will ever be garbage, and looking through it takes long.
    gc.freeze()
    sys.exit(program(command))


def _reset_signals() -> None:
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    # As Python does at its start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _redirect(outputs: tuple[int, int]) -> None:
    """Write to the files, unbuffered as by PYTHONUNBUFFERED, and let go of whatever else the launcher has open."""
    for number, file in enumerate(outputs, start=1):
        os.dup2(file, number)
    # Not closed: Python objects with these numbers would later close, or write to, other files that got them.
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - the names are numbers
        with contextlib.suppress(OSError):
            if int(name) > 2:
                os.dup2(nothing, int(name))
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", errors=errors, write_through=True)
        for number, errors in ((1, "strict"), (2, "backslashreplace"))
    )
