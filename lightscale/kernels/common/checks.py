"""Checks of the arguments of operators: each error names the argument, what was given, and what fits."""

import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.common.states import state_dtype


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse q, k, v whose shapes (B, T, H, K), (B, T, H, K), (B, T, H, V), dtypes or devices do not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise UserError(f"{name} must have 4 dimensions (B, T, H, width), got shape {tuple(x.shape)}")
    if q.shape != k.shape:
        raise UserError(f"q and k must have the same shape (B, T, H, K), got {tuple(q.shape)} and {tuple(k.shape)}")
    if v.shape[:3] != q.shape[:3]:
        raise UserError(f"v must be (B, T, H, V) = {_shape_of(q.shape[:3], 'V')}, got {tuple(v.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise UserError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise UserError(f"q, k and v must be fp16, bf16, fp32 or fp64, got {q.dtype}")
    check_device("k", k, q)
    check_device("v", v, q)


def check_state(initial_state: Tensor | None, q: Tensor, v: Tensor, key_width: int | None = None) -> None:
    """Refuse an initial state that is not (B, H, K, V) in the states' dtype on q's device.

    ``key_width`` is K where it is not q's width.
    """
    if initial_state is None:
        return
    expected = (q.shape[0], q.shape[2], q.shape[3] if key_width is None else key_width, v.shape[3])
    if initial_state.shape != expected:
        raise UserError(f"initial_state must be (B, H, K, V) = {expected}, got shape {tuple(initial_state.shape)}")
    if initial_state.dtype != state_dtype(q.dtype):
        raise UserError(
            f"initial_state must be {state_dtype(q.dtype)} for inputs of {q.dtype}, got {initial_state.dtype}"
        )
    check_device("initial_state", initial_state, q)


def check_device(name: str, x: Tensor, q: Tensor) -> None:
    """Refuse ``x`` on another device than q."""
    if x.device != q.device:
        raise UserError(f"{name} is on {x.device}, but q is on {q.device}")


def _shape_of(sizes: torch.Size, rest: str) -> str:
    return f"({', '.join([*map(str, sizes), rest])})"
