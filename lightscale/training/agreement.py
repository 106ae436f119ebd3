"""What all ranks do together on the host: every result, or the first error, comes to all of them."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from lightscale.errors import UserError

_T = TypeVar("_T")


class Agreement:
    """Actions over the ranks of a gloo ``group``, which only one thread may use.

    An ``OSError`` or ``UserError`` of any rank is raised on all, so that none goes on alone; anything else ends the
    rank, and with it the run.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    def on_all(self, action: Callable[[], _T]) -> list[_T]:
        """Run ``action`` on every rank and return all results, by rank."""
        result: tuple[_T | None, Exception | None]
        try:
            result = (action(), None)
        except (OSError, UserError) as error:
            result = (None, error)
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, result, group=self._group)
        for _, failure in every:
            if failure is not None:
                raise failure
        return [value for value, _ in every]

    def on_first(self, action: Callable[[], _T]) -> _T:
        """Run ``action`` on rank 0 only; every rank gets its result or its error."""
        first: Any = self.on_all(lambda: action() if self.rank == 0 else None)[0]
        return first
