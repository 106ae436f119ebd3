"""Interface of executors, which run the tasks of a preparation on any engine.

All executors run the same tasks and leave the same files. A task returns no value: its result is a file that appears by
one rename when it is complete. An executor therefore needs no results, no order of tasks and no record of finished
ones. Interrupted tasks run again and find finished files. A task that was taken for lost may run beside its repetition.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from lightscale.errors import UserError

Advance = Callable[[int], None]
"""Called with numbers of bytes of the files that were read since the last call."""
Task = Callable[[Any, Any, Advance], None]
"""(context that all tasks share, the item, called with bytes done): writes files, returns nothing."""
Progress = Callable[[str, int, int], None]
"""(step, bytes done, total bytes)."""
MakeContext = Callable[[], Any]
"""Makes the object that all tasks share. Every process calls it once: it loads a tokenizer, which is slow."""

MOST_LOSSES = 10
"""Limit of dead workers without a finished task between them; more end the preparation."""
_POLL_S = 0.2
# Tasks that an engine knows of at a time: more than there are workers, and few enough that they take little memory.
_IN_HAND = 4096


class Executor(Protocol):
    """Runs tasks. A context manager; an error in any worker ends the work of all."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def run(self, step: str, task: Task, items: Sequence[Any], sizes: Sequence[int], progress: Progress) -> None:
        """Run ``task`` on every item, with ``sizes`` in bytes; returns when all items are finished.

        Raises the first error of a task, which ends the step, and ``UserError`` where workers die again and again.
        """


ExecutorFactory = Callable[[MakeContext], Executor]


class WorkerLost(Exception):
    """A task's worker died; another can do it."""


_Handle = TypeVar("_Handle", bound=Hashable)


class HandsOut(Generic[_Handle]):
    """The part of an executor that is the same for all engines: tasks go to workers as these become free.

    An engine starts a task and identifies it by a handle.
    """

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def _submit(self, task: Task, item: Any) -> _Handle:
        """Hand out a task."""

    @abstractmethod
    def _wait(self, handles: Collection[_Handle], timeout_s: float) -> Collection[_Handle]:
        """Those of ``handles`` that have ended; returns when there is one, or after ``timeout_s``."""

    @abstractmethod
    def _raise_error(self, handle: _Handle) -> None:
        """Raise the error of a task that has ended, if it has one; ``WorkerLost`` if it was its worker that ended."""

    @abstractmethod
    def _cancel(self, handle: _Handle) -> None:
        """Do not start the task, if it has not begun."""

    def _bytes_in_hand(self) -> int:
        """Bytes that tasks of this step have said that they are done with, where the engine is told of it."""
        return 0

    def run(self, step: str, task: Task, items: Sequence[Any], sizes: Sequence[int], progress: Progress) -> None:
        """See ``Executor``."""
        meter = ProgressMeter(step, sum(sizes), progress)
        waiting = deque(range(len(items)))
        in_hand: dict[_Handle, int] = {}
        num_losses = done = 0
        try:
            while waiting or in_hand:
                while waiting and len(in_hand) < _IN_HAND:
                    number = waiting.popleft()
                    in_hand[self._submit(task, items[number])] = number
                ended = [(handle, in_hand.pop(handle)) for handle in self._wait(in_hand, _POLL_S)]
                lost = [number for handle, number in ended if self._is_lost(handle)]
                waiting.extend(lost)
                done += sum(sizes[number] for _, number in ended) - sum(sizes[number] for number in lost)
                num_losses = (num_losses if len(lost) == len(ended) else 0) + bool(lost)
                if num_losses > MOST_LOSSES:
                    raise UserError(
                        f"{step}: workers died {num_losses} times (out of memory or killed) without finishing a task; "
                        f"finished work is kept: run the same command again, with fewer workers if memory ran out"
                    )
                meter.show(min(max(done, self._bytes_in_hand()), sum(sizes)))
        finally:
            # After an error nothing new is started; tasks that are running are left to finish their files.
            for handle in in_hand:
                self._cancel(handle)
        meter.show(sum(sizes))

    def _is_lost(self, handle: _Handle) -> bool:
        try:
            self._raise_error(handle)
        except WorkerLost:
            return True
        return False


class ProgressMeter:
    """Shows the progress of a step."""

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
