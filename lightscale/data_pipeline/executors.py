"""Executors run the tasks of a preparation: in this process, in a pool of processes, or on the ranks of an MPI program.

All three run the same tasks and leave the same files. A task returns nothing: its result is a file that appears by one
rename when it is whole. So an executor needs no results, no order of tasks and no memory of what is done; whatever was
interrupted is run again, and finds finished files.
"""

import itertools
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, Protocol, Self

from lightscale.errors import UserError

Advance = Callable[[int], None]
"""Called with numbers of bytes of the files that were read since the last call."""
Task = Callable[[Any, Any, Advance], None]
"""(context that all tasks share, the item, called with bytes done): writes files, returns nothing."""
Progress = Callable[[str, int, int], None]
"""(step, bytes done, total bytes)."""
_POLL_S = 0.2
_FAILED_TAG = 1


class Executor(Protocol):
    """Runs tasks. A context manager; an error in any worker ends the work of all."""

    is_main: bool
    """Whether this process shows progress and prints results."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def run(self, step: str, task: Task, items: Sequence[Any], sizes: Sequence[int], progress: Progress) -> None:
        """Run ``task`` on every item, of ``sizes`` in bytes; returns when all are done."""

    def once(self, work: Callable[[], Any]) -> Any:
        """The result of ``work``, which one process runs for all; every process gets it."""


class InProcess:
    """Runs every task in this process."""

    is_main = True

    def __init__(self, make_context: Callable[[], Any]) -> None:
        self._make_context = make_context
        self._context: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def run(self, step: str, task: Task, items: Sequence[Any], sizes: Sequence[int], progress: Progress) -> None:
        """See ``Executor``."""
        if self._context is None and items:
            self._context = self._make_context()
        meter = ProgressMeter(step, sum(sizes), progress)
        for item, before in zip(items, _running_sums(sizes), strict=True):
            meter.show(before)
            task(self._context, item, meter.advance)
        meter.show(sum(sizes))

    def once(self, work: Callable[[], Any]) -> Any:
        """See ``Executor``."""
        return work()


class ProcessPool:
    """Runs tasks in several processes on this machine; this one hands them out."""

    is_main = True

    def __init__(self, make_context: Callable[[], Any], num_workers: int) -> None:
        # Spawned, not forked: a fork copies the locks that threads of the parent (progress bars, Arrow, zarr) hold, but
        # not the threads that would release them.
        spawn = multiprocessing.get_context("spawn")
        self._bytes_done = spawn.Value("q", 0)
        # Read without its lock: a worker that is killed while it holds the lock never releases it, and the parent would
        # wait instead of reporting the dead worker. Progress may be a little behind; it is only shown.
        self._bytes_seen = self._bytes_done.get_obj()
        self._pool = ProcessPoolExecutor(
            num_workers, mp_context=spawn, initializer=_init_worker, initargs=(make_context, self._bytes_done)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, step: str, task: Task, items: Sequence[Any], sizes: Sequence[int], progress: Progress) -> None:
        """See ``Executor``."""
        self._bytes_seen.value = 0
        meter = ProgressMeter(step, sum(sizes), progress)
        pending: set[Future[None]] = {self._pool.submit(_run_task, task, item) for item in items}
        try:
            while pending:
                done, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                meter.show(min(self._bytes_seen.value, sum(sizes)))
        except BrokenProcessPool as error:
            raise UserError(
                f"{step}: a worker process died (out of memory, or killed); finished work is kept: "
                "run the same command again, with fewer --workers if memory was short"
            ) from error
        finally:
            # After an error nothing new is started; tasks that are running are left to finish their files.
            for future in pending:
                future.cancel()
        meter.show(sum(sizes))

    def once(self, work: Callable[[], Any]) -> Any:
        """See ``Executor``."""
        return work()


class MPIRanks:
    """Runs tasks on the N ranks of an MPI program, over one file system: rank r runs every N-th, from the r-th on."""

    def __init__(self, make_context: Callable[[], Any], comm: Any) -> None:
        """``comm``: a communicator of mpi4py."""
        self._make_context = make_context
        self._context: Any = None
        self._comm = comm
        self.is_main: bool = comm.rank == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A UserError was shared: all ranks raise it. Of any other error the others know nothing and would wait for this
        # rank in a collective for ever.
        if error is not None and not isinstance(error, UserError):
            _print_exception(error)
            self._comm.Abort(1)

    def run(self, step: str, task: Task, items: Sequence[Any], sizes: Sequence[int], progress: Progress) -> None:
        """See ``Executor``."""
        if self._context is None and items:
            self._context = self._make_context()
        rank, size = self._comm.rank, self._comm.size
        own_sizes = sizes[rank::size]
        meter = ProgressMeter(step, sum(own_sizes), progress)
        fault: str | None = None
        try:
            for item, before in zip(items[rank::size], _running_sums(own_sizes), strict=True):
                # Between tasks, because a rank inside one cannot look: a failed rank does not wait for hours of work.
                if self._comm.Iprobe(tag=_FAILED_TAG):
                    break
                meter.show(before)
                task(self._context, item, meter.advance)
        except UserError as error:
            fault = str(error)
            for other in range(size):
                if other != rank:
                    self._comm.send(None, other, tag=_FAILED_TAG)
        faults = self._comm.allgather(fault)
        # The messages of failed ranks that nobody has read: they must not stop the next step.
        while self._comm.Iprobe(tag=_FAILED_TAG):
            self._comm.recv(tag=_FAILED_TAG)
        self._raise_first(faults)
        meter.show(sum(own_sizes))

    def once(self, work: Callable[[], Any]) -> Any:
        """See ``Executor``."""
        result: Any = None
        fault: str | None = None
        if self.is_main:
            try:
                result = work()
            except UserError as error:
                fault = str(error)
        fault, result = self._comm.bcast((fault, result), root=0)
        self._raise_first([fault])
        return result

    def _raise_first(self, faults: Sequence[str | None]) -> None:
        """Raise the same error on every rank, so that all leave and nobody waits."""
        for fault in faults:
            if fault is not None:
                raise UserError(fault)


class ProgressMeter:
    """Shows how much of a step is done."""

    def __init__(self, step: str, total: int, progress: Progress) -> None:
        self._step, self._total, self._progress = step, total, progress
        self._done = 0
        self.show(0)

    def show(self, done: int) -> None:
        """``done`` bytes are done."""
        self._done = done
        self._progress(self._step, done, self._total)

    def advance(self, num_bytes: int) -> None:
        """``num_bytes`` more bytes are done."""
        self.show(min(self._done + num_bytes, self._total))


def _running_sums(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][: len(sizes)]


# In a worker process of ``ProcessPool``: made once, because a context holds a tokenizer, which is slow to load.
_context: Any = None
_worker_bytes_done: Any = None


def _init_worker(make_context: Callable[[], Any], bytes_done: Any) -> None:
    global _context, _worker_bytes_done
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _context, _worker_bytes_done = make_context(), bytes_done


def _exit_with_parent() -> None:
    """End this worker when its parent ends: one whose parent was killed would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _run_task(task: Task, item: Any) -> None:
    task(_context, item, _advance_worker)


def _advance_worker(num_bytes: int) -> None:
    with _worker_bytes_done.get_lock():
        _worker_bytes_done.value += num_bytes


def _print_exception(error: BaseException) -> None:
    """The traceback, at once: MPI ends the process without flushing anything."""
    traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()
