"""Actions of all ranks together on the host: all ranks get every result, or the first error."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from lightscale.errors import UserError

_T = TypeVar("_T")


class Agreement:
    """Actions over the ranks of a gloo ``group``, which only one thread may use.

    An error of any rank is raised on all ranks, so that none waits for a rank that has left. ``OSError`` and
    ``UserError`` are raised unchanged. Any other error is raised unchanged on its rank, and as a ``RuntimeError`` with
    the rank and the message on the others.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    def on_all(self, action: Callable[[], _T]) -> list[_T]:
        """Run ``action`` on every rank and return all results, by rank."""
        result: tuple[_T | None, Exception | None]
        fault: Exception | None = None
        try:
            result = (action(), None)
        except (OSError, UserError) as error:
            result = (None, error)
        except Exception as error:  # noqa: BLE001 - raised below, once the others know
            result, fault = (None, RuntimeError(f"rank {self.rank}: {type(error).__name__}: {error}")), error
        # Before anything is raised: a rank that left now would let the others wait here until the time limit.
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, result, group=self._group)
        # Where it happened the original is raised, with its traceback; exceptions of other libraries need not survive
        # pickling, so the others get only its message.
        if fault is not None:
            raise fault
        # By rank, so that all raise the same one when several failed.
        for _, failure in every:
            if failure is not None:
                raise failure
        return [value for value, _ in every]

    def on_first(self, action: Callable[[], _T]) -> _T:
        """Run ``action`` on rank 0 only; every rank gets its result or its error."""
        first: Any = self.on_all(lambda: action() if self.rank == 0 else None)[0]
        return first
