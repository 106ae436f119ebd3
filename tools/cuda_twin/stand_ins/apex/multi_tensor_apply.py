"""How apex calls a kernel on lists of tensors."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

_CHUNK = 2048 * 32


def multi_tensor_applier(
    op: Callable[..., Any], noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
) -> Any:
    """``op`` with the size of a chunk before its arguments."""
    return op(_CHUNK, noop_flag, tensor_lists, *args)
