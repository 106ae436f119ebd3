"""The dtype of states, initial states, and cotangents whose exchange is in flight."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

Arriving: TypeAlias = _T | Callable[[], _T]
"""A value, or a function that waits for it: called once, when all that does not need it has been begun."""


def arrived(x: Arriving[_T]) -> _T:
    """``x``, after the wait for its exchange, if any."""
    return x() if callable(x) else x


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and of all arithmetic for inputs of ``dtype``: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_state_dtype(
    reference: Callable[..., tuple[Tensor, _T]], first: Tensor, *others: Tensor | None, **options: Any
) -> tuple[Tensor, _T]:
    """An operator's recurrence in the dtype of the states, which is fp32 for half-precision inputs.

    Args:
        reference: the recurrence; returns outputs and the final state.
        first: the operator's first input, usually queries; the outputs have its dtype.
        others: the operator's other tensors, or None.
        options: keyword arguments of ``reference``.
    """
    dtype = state_dtype(first.dtype)
    inputs = [None if x is None else x.to(dtype) for x in (first, *others)]
    outputs, state = reference(*inputs, **options)
    return outputs.to(first.dtype), state


def without_autocast(function: Callable[Concatenate[Tensor, _P], _R]) -> Callable[Concatenate[Tensor, _P], _R]:
    """``function`` without autocast, which would round the fp32 states to bf16 before each product."""

    @wraps(function)
    def run(first: Tensor, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *args, **kwargs)

    return run


def without_state(row_gradients: Callable[_P, tuple[_R, Any]]) -> Callable[_P, _R]:
    """The pass ``grad_bwd``: ``row_gradients`` without the gradient of the incoming state."""

    @wraps(row_gradients, assigned=("__module__", "__doc__"))
    def grad_bwd(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return row_gradients(*args, **kwargs)[0]

    return grad_bwd


def kept_states(states: list[Tensor], v: Tensor) -> list[Tensor]:
    """The states of a forward pass that its backward pass gets: ``states``, unless they are larger than v (B, T, H, V).

    Without them the backward pass computes the states from left to right once more.
    """
    return states if sum(state.numel() for state in states) <= v.numel() else []


def state_or_zeros(state: Tensor | None, q: Tensor, v: Tensor, key_width: int | None = None) -> Tensor:
    """A copy of ``state`` (B, H, K, V) in the states' dtype, or zeros for rows of q (B, T, H, K), v (B, T, H, V).

    ``key_width`` is K where K differs from q's width.
    """
    if state is not None:
        return state.to(state_dtype(q.dtype), copy=True)
    shape = (q.shape[0], q.shape[2], q.shape[3] if key_width is None else key_width, v.shape[3])
    return torch.zeros(shape, dtype=state_dtype(q.dtype), device=q.device)
