"""bf16 in Triton's interpreter, which computes it wrongly: kernels get fp32 copies, rounded when they are done.

What a kernel would round within is not rounded, then: what is shown of it is its arithmetic, not its rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from cuda_twin.computing import as_host_tree, captured_here, on_host


class _Copies:
    """fp32 copies of what one launch is given, by storage: arguments may be views of one memory."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, value: Any) -> Any:
        """``value`` in fp32 where it is a tensor of bf16, or bf16 itself; else as it is."""
        if isinstance(value, tl.dtype) and value == tl.bfloat16:
            return tl.float32
        if not isinstance(value, Tensor) or value.dtype != torch.bfloat16:
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._of:
            numbers = storage.nbytes() // value.element_size()
            whole = on_host(torch.empty(0, dtype=value.dtype, device=value.device).set_(storage, 0, (numbers,), (1,)))
            self._of[storage.data_ptr()] = whole, whole.float()
        copy = self._of[storage.data_ptr()][1]
        return copy.as_strided(value.size(), value.stride(), value.storage_offset())

    def round(self) -> None:
        """Back to where they come from; what the kernel has not written is what it was."""
        for whole, copy in self._of.values():
            whole.copy_(copy)


@contextmanager
def upcast() -> Iterator[None]:
    """While this is open, interpreted kernels compute in fp32 what they are given in bf16."""
    launch = GridExecutor.__call__

    def compute(executor: GridExecutor, args: Any, kwargs: Any) -> None:
        copies = _Copies()
        launch(executor, *map(copies.of, args), **{name: copies.of(value) for name, value in kwargs.items()})
        copies.round()

    def launch_upcast(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        captured = captured_here()
        if captured is None:
            compute(executor, args, kwargs)
        else:
            # Of a graph, whenever that is launched.
            captured.append(partial(compute, executor, as_host_tree(args), as_host_tree(kwargs)))

    with mock.patch.object(GridExecutor, "__call__", launch_upcast):
        yield
