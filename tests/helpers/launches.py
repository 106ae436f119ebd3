"""What a GPU would be given to do by the state passing of a layer, counted on a CPU; loaded by path.

Triton's kernels are counted and not run; PyTorch's operators are counted, but for those that only make views or memory.
The other ranks are stood in for by copies of this rank's messages, so that any number of them costs nothing.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from lightscale.kernels.common.backends import set_default_backend
from lightscale.kernels.common.triton import launch
from lightscale.parallel.sequence import Gather, Ring, Scan, StateExchange, TwoLevel, begin

# An H100's: rows are cut into splits to keep them busy, which takes more launches.
_MULTIPROCESSORS = 132
_WITHOUT_KERNEL = ("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "alias", "lift_fresh")


class Launches(TorchDispatchMode):
    """By name, in order: Triton's kernels, and PyTorch's operators, each of which is at least one kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.num_kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and not func.is_view and name not in _WITHOUT_KERNEL:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def by_name(self) -> Counter[str]:
        """How often each was launched."""
        return Counter(self.names)


@contextmanager
def counted() -> Iterator[Launches]:
    """Count what is launched inside, with Triton as the back-end of all operators."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    launches = Launches()

    def count(executor: Any, *args: Any, **kwargs: Any) -> None:
        launches.names.append(executor.fn.__name__)
        launches.num_kernels += 1

    set_default_backend("triton")
    try:
        with (
            mock.patch.object(GridExecutor, "__call__", count),
            mock.patch.object(launch, "num_multiprocessors", return_value=_MULTIPROCESSORS),
            launches,
        ):
            yield launches
    finally:
        set_default_backend("auto")


def exchange_of(name: str, ranks: int) -> StateExchange:
    """An exchange of the middle one of ``ranks`` ranks, on nodes of 8; all send what it sends."""

    def group(size: int) -> Any:
        return SimpleNamespace(rank=lambda: size // 2, size=lambda: size)

    if name == "two_level":
        return TwoLevel(group(ranks), node=group(8), across=group(ranks // 8))
    return {"gather": Gather, "ring": Ring}[name](group(ranks))


def pass_states(scan: Scan, exchange: StateExchange, written: list[Tensor | None], read: Tensor) -> None:
    """A layer's state passing, forward and backward, at once instead of beside the computation."""

    def gather(out: Tensor, own: Tensor, group: Any) -> None:
        out.view(group.size(), -1).copy_(own)

    def submit(work: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        result = work(*args)
        return lambda: result

    with (
        mock.patch.object(exchange, "submit", submit),
        mock.patch.object(dist, "all_gather_into_tensor", gather),
        mock.patch.object(dist, "send"),
        mock.patch.object(dist, "recv"),
    ):
        o = begin(scan, exchange, *written)(read)
        o.backward(torch.ones_like(o))
