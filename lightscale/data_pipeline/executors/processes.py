"""On this machine: in this process, or in several (``concurrent.futures``)."""

import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import uuid
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, Self

from lightscale.data_pipeline.executors.interface import (
    HandsOut,
    MakeContext,
    Progress,
    ProgressMeter,
    Task,
    WorkerLost,
)
from lightscale.data_pipeline.executors.worker import run_task


class InProcess:
    """Runs every task in this process."""

    def __init__(self, make_context: MakeContext) -> None:
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
        for item, before in zip(items, itertools.accumulate(sizes, initial=0), strict=False):
            meter.show(before)
            task(self._context, item, meter.advance)
        meter.show(sum(sizes))


class FuturesExecutor(HandsOut[Future[None]]):
    """Hands tasks to an executor of ``concurrent.futures``, or to one that is like it."""

    def __init__(self, make_context: MakeContext, pool: Any) -> None:
        """``pool``: has ``submit``, which gives futures of ``concurrent.futures``."""
        self._make_context, self._pool = make_context, pool
        self._id = uuid.uuid4().hex

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def _submit(self, task: Task, item: Any) -> Future[None]:
        future: Future[None] = self._pool.submit(run_task, self._id, self._make_context, task, item)
        return future

    def _wait(self, handles: Collection[Future[None]], timeout_s: float) -> Collection[Future[None]]:
        return wait(handles, timeout=timeout_s, return_when=FIRST_COMPLETED).done

    def _raise_error(self, handle: Future[None]) -> None:
        try:
            handle.result()
        except BrokenProcessPool as error:
            raise WorkerLost from error

    def _cancel(self, handle: Future[None]) -> None:
        handle.cancel()


class ProcessPool(FuturesExecutor):
    """Runs tasks in several processes of this machine.

    ``concurrent.futures`` ends all workers when one dies; others take their place, and do the tasks that were in hand.
    """

    def __init__(self, make_context: MakeContext, num_workers: int) -> None:
        self._num_workers = num_workers
        # Spawned, not forked: a fork copies the locks that threads of the parent (progress bars, Arrow, zarr) hold, but
        # not the threads that would release them.
        self._spawn = multiprocessing.get_context("spawn")
        super().__init__(make_context, self._new_pool())

    def _new_pool(self) -> ProcessPoolExecutor:
        # With every pool a new one: a worker that is killed while it holds the lock never releases it. The parent reads
        # without the lock, for the same reason. Progress may be a little behind; it is only shown.
        self._bytes_done = self._spawn.Value("q", 0)
        pool: Any = ProcessPoolExecutor(
            self._num_workers, mp_context=self._spawn, initializer=_init_worker, initargs=(self._bytes_done,)
        )
        # All workers are started with the first task, as where they are forked. One that is started while another dies
        # the pool does not end but waits for, for ever; or it fails, as what it is to read from is closed already.
        pool._safe_to_dynamically_spawn_children = False
        return pool

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, step: str, task: Task, items: Sequence[Any], sizes: Sequence[int], progress: Progress) -> None:
        """See ``Executor``."""
        self._bytes_done.get_obj().value = 0
        super().run(step, task, items, sizes, progress)

    def _bytes_in_hand(self) -> int:
        return int(self._bytes_done.get_obj().value)

    def _submit(self, task: Task, item: Any) -> Future[None]:
        try:
            return self._pool_submit(task, item)
        except BrokenProcessPool:
            self._pool.shutdown()
            self._pool = self._new_pool()
        return self._pool_submit(task, item)

    def _pool_submit(self, task: Task, item: Any) -> Future[None]:
        future: Future[None] = self._pool.submit(_run_counting, self._id, self._make_context, task, item)
        return future


# Shared by the workers of a pool; in the list once this process is one.
_bytes_done: list[Any] = []


def _init_worker(bytes_done: Any) -> None:
    # Ctrl-C reaches all processes of a terminal: the parent says what there is to say.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _bytes_done.append(bytes_done)


def _exit_with_parent() -> None:
    """End this worker when its parent ends: one whose parent was killed would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _run_counting(executor_id: str, make_context: MakeContext, task: Task, item: Any) -> None:
    run_task(executor_id, make_context, task, item, _count)


def _count(num_bytes: int) -> None:
    (counter,) = _bytes_done
    with counter.get_lock():
        counter.value += num_bytes
