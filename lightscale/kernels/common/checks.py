"""Checks of the arguments of operators: each error names the argument, the given value, and the expected one."""

import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.common.documents import check_cu_seqlens
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

    ``key_width`` is K where K differs from q's width.
    """
    if initial_state is None:
        return
    shape = (q.shape[0], q.shape[2], q.shape[3] if key_width is None else key_width, v.shape[3])
    check_one_state("initial_state", initial_state, q, "(B, H, K, V)", shape)


def check_one_state(name: str, state: Tensor, x: Tensor, form: str, shape: tuple[int, ...], *, like: str = "q") -> None:
    """Raise UserError unless ``state`` has ``shape`` (``form`` in words), and a dtype and device that fit ``x``."""
    if state.shape != shape:
        raise UserError(f"{name} must be {form} = {shape}, got shape {tuple(state.shape)}")
    if state.dtype != state_dtype(x.dtype):
        raise UserError(f"{name} must be {state_dtype(x.dtype)} for inputs of {x.dtype}, got {state.dtype}")
    check_device(name, state, x, like=like)


def check_head_decay(log_decay: Tensor | None, q: Tensor) -> None:
    """Refuse log decays of neither shape (H,) nor (B, T, H), and those that ``check_decay`` refuses."""
    if log_decay is None:
        return
    if log_decay.shape not in (q.shape[2:3], q.shape[:3]):
        raise UserError(
            f"log_decay must be (H,) = ({q.shape[2]},) or (B, T, H) = {tuple(q.shape[:3])}, "
            f"got shape {tuple(log_decay.shape)}"
        )
    check_decay(log_decay, q)


def check_decay(log_decay: Tensor, q: Tensor) -> None:
    """Refuse log decays, of any shape, whose dtype, device or values do not fit q; raises UserError."""
    if log_decay.dtype not in (torch.float32, torch.float64):
        raise UserError(f"log_decay must be fp32 or fp64, whatever q's dtype, got {log_decay.dtype}")
    check_device("log_decay", log_decay, q)
    if not torch.compiler.is_compiling():
        check_at_most_one(log_decay)


def check_at_most_one(log_decay: Tensor) -> None:
    """Raise UserError for log decays above 0, on a CPU alone: on a GPU a read would stall the stream."""
    if log_decay.device.type == "cpu" and bool((log_decay > 0).any()):
        raise UserError(
            f"log_decay must be at most 0 (a decay of at most 1), got a largest value of {log_decay.max():g}"
        )


def check_documents(cu_seqlens: Tensor | None, x: Tensor, *, like: str = "q") -> None:
    """Refuse document boundaries that do not fit the rows of x (B, T, …); ``like`` names x in messages."""
    if cu_seqlens is None:
        return
    check_device("cu_seqlens", cu_seqlens, x, like=like)
    check_cu_seqlens(cu_seqlens, num_rows=x.shape[0], num_tokens=x.shape[1])


def check_chunk_size(chunk_size: int) -> None:
    """Refuse chunks without tokens."""
    if chunk_size < 1:
        raise UserError(f"chunk_size must be at least 1 token, got {chunk_size}")


def check_device(name: str, x: Tensor, other: Tensor, *, like: str = "q") -> None:
    """Refuse ``x`` on another device than ``other``; ``like`` names ``other`` in messages."""
    if x.device != other.device:
        raise UserError(f"{name} is on {x.device}, but {like} is on {other.device}")


def _shape_of(sizes: torch.Size, rest: str) -> str:
    return f"({', '.join([*map(str, sizes), rest])})"
