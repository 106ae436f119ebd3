"""LightNet's operator on GPUs: the passes of ``../chunked.py`` by the kernels of ``kernels.py``.

``common/triton`` describes these passes.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from lightscale.kernels.common.angles import Angles, angles_of, parts_of, phases_of
from lightscale.kernels.common.states import Arriving, arrived
from lightscale.kernels.common.triton.launch import LAUNCH, on_device_of
from lightscale.kernels.lightnet.chunked import LightNetGradients
from lightscale.kernels.lightnet.initial_z import initial_z_gradient
from lightscale.kernels.lightnet.state import LightNetState, StateCotangent, exchanged_cotangent, plain_cotangent
from lightscale.kernels.lightnet.triton.cases import COMPILE_CASES
from lightscale.kernels.lightnet.triton.kernels import recurrent
from lightscale.kernels.lightnet.triton.passes import Backward, LightNetRow, attend, scan, weights_of
from lightscale.kernels.lightnet.triton.tiling import recurrent_constants

__all__ = ["COMPILE_CASES", "grad_bwd", "out_fwd", "recurrent_step", "state_bwd", "state_fwd"]


def _state(z: Tensor | None, S: Tensor | None) -> LightNetState | None:
    return None if z is None or S is None else LightNetState(z, S)


@torch.library.custom_op("lightscale::lightnet_state_fwd", mutates_args=())
def _state_fwd(
    k: Tensor, v: Tensor, theta: Tensor | None, positions: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """z, S and through."""
    row = LightNetRow.of(k, v, angles_of(theta, positions), cu_seqlens)
    _, state = scan(row, None, with_chunks=False)
    through = torch.ones(k.size(0), dtype=torch.float32, device=k.device)
    if row.starts is not None and k.size(1):
        through.masked_fill_(row.starts[:, -1] >= 0, 0.0)
    return state.z, state.S, through


@_state_fwd.register_fake
def _(k: Tensor, v: Tensor, theta: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return *_fake_state(k, v, theta), k.new_empty(k.size(0), dtype=torch.float32)


def _fake_state(k: Tensor, v: Tensor, theta: Tensor | None) -> tuple[Tensor, Tensor]:
    num_rows, _, num_heads, key_width = k.shape
    state_rows = key_width if theta is None else 2 * key_width
    z = k.new_empty(num_rows, num_heads, key_width, dtype=torch.float32)
    return z, k.new_empty(num_rows, num_heads, state_rows, v.size(3), dtype=torch.float32)


@torch.library.custom_op("lightscale::lightnet_out_fwd", mutates_args=())
def _out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor | None,
    positions: Tensor | None,
    z: Tensor | None,
    S: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """o, and z and S of the state that leaves."""
    row = LightNetRow.of(k, v, angles_of(theta, positions), cu_seqlens)
    chunks, end = scan(row, _state(z, S))
    assert chunks is not None
    return attend(row, q, chunks, weights_of(row, chunks)), end.z, end.S


@_out_fwd.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, theta: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty(v.shape), *_fake_state(k, v, theta)


@torch.library.custom_op("lightscale::lightnet_state_bwd", mutates_args=())
def _state_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor | None,
    positions: Tensor | None,
    do: Tensor,
    z: Tensor | None,
    S: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """U and R of the entering state, by the row's own outputs."""
    backward = Backward.of(LightNetRow.of(k, v, angles_of(theta, positions), cu_seqlens), q, do, _state(z, S))
    _, own = backward.scan(backward.query_gradients(), None, with_chunks=False)
    return own.U, own.R


@_state_bwd.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, theta: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    R, U = _fake_state(k, v, theta)
    return U, R


@torch.library.custom_op("lightscale::lightnet_gradients", mutates_args=())
def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor | None,
    positions: Tensor | None,
    do: Tensor,
    z: Tensor | None,
    S: Tensor | None,
    U: Tensor | None,
    R: Tensor | None,
    cu_seqlens: Tensor | None,
    with_theta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dtheta (H, K) in fp64 (empty unless requested), and U and R of the entering state."""
    backward = Backward.of(LightNetRow.of(k, v, angles_of(theta, positions), cu_seqlens), q, do, _state(z, S))
    cotangent = None if U is None or R is None else StateCotangent(U, R)
    return _row_gradients(backward, cotangent, with_theta=with_theta)


def _row_gradients(
    backward: Backward, cotangent: Arriving[StateCotangent | None], *, with_theta: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    by_queries, by_keys = (backward.angle_parts(), backward.angle_parts()) if with_theta else (None, None)
    # dq first: it needs no cotangent of other ranks, and gives R, which the scan of cotangents passes back.
    dq = backward.query_gradients(by_queries)
    by_chunk, start = backward.scan(dq, arrived(cotangent))
    assert by_chunk is not None
    dk, dv = backward.key_gradients(dq, by_chunk, by_keys), backward.value_gradients(by_chunk)
    dtheta = dq.new_empty(0, dtype=torch.float64)
    if by_queries is not None and by_keys is not None:
        dtheta = by_queries.sum((0, 2), dtype=torch.float64) + by_keys.sum((0, 2), dtype=torch.float64)
    return dq, dk, dv, dtheta, start.U, start.R


@_gradients.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *_, with_theta = others
    R_in, U_in = _fake_state(k, v, theta)
    dtheta = q.new_empty(q.shape[2:] if with_theta else (0,), dtype=torch.float64)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dtheta, U_in, R_in


def _save(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.set_materialize_grads(False)


def _or_zeros(cotangent: Tensor | None, of: Tensor) -> Tensor:
    return torch.zeros_like(of) if cotangent is None else cotangent


def _backward(ctx: Any, do: Tensor | None, dz: Tensor | None, dS: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of ``_out_fwd``'s arguments; the cotangent of an unused result is None."""
    q, k, v, theta, positions, z, S, cu_seqlens, z_end, S_end = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do
    cotangent: tuple[Tensor | None, Tensor | None] = None, None
    if dz is not None or dS is not None:
        cotangent = exchanged_cotangent(LightNetState(z_end, S_end), _or_zeros(dz, z_end), _or_zeros(dS, S_end))
    with_theta = ctx.needs_input_grad[3]
    dq, dk, dv, dtheta, U, R = _gradients(q, k, v, theta, positions, do, z, S, *cotangent, cu_seqlens, with_theta)
    dz_in, dS_in = None, None
    if z is not None:
        state_in = LightNetState(z, S)
        _, dS_in = plain_cotangent(state_in, StateCotangent(U, R))
        if ctx.needs_input_grad[5]:
            angles = angles_of(theta, positions)
            end = _or_zeros(dz, z_end), _or_zeros(dS, S_end)
            dz_in = initial_z_gradient(state_fwd, state_bwd, q, k, v, angles, do, state_in, end, cu_seqlens)
    return dq, dk, dv, dtheta.to(theta.dtype).view(theta.shape) if with_theta else None, None, dz_in, dS_in, None


_out_fwd.register_autograd(_backward, setup_context=_save)


def state_fwd(
    k: Tensor, v: Tensor, angles: Angles | None = None, cu_seqlens: Tensor | None = None
) -> tuple[LightNetState, Tensor]:
    """(z_loc, S_loc) and ``through``, see ``chunked.state_fwd``."""
    z, S, through = _state_fwd(k, v, *parts_of(angles), cu_seqlens)
    return LightNetState(z, S), through


def out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    state_in: LightNetState | None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, LightNetState]:
    """The outputs and the leaving state, see ``chunked.out_fwd``; saves the inputs and this state."""
    o, z, S = _out_fwd(q, k, v, *parts_of(angles), *(state_in or (None, None)), cu_seqlens)
    return o, LightNetState(z, S)


def state_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    do: Tensor,
    state_in: LightNetState | None,
    cu_seqlens: Tensor | None = None,
) -> StateCotangent:
    """The cotangent (U, R) of the incoming state, see ``chunked.state_bwd``."""
    U, R = _state_bwd(q, k, v, *parts_of(angles), do, *(state_in or (None, None)), cu_seqlens)
    return StateCotangent(U, R)


@torch.no_grad()
def grad_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    do: Tensor,
    state_in: LightNetState | None,
    cotangent: Arriving[StateCotangent | None],
    cu_seqlens: Tensor | None = None,
    *,
    with_theta: bool = False,
) -> LightNetGradients:
    """The gradients of a row's inputs, see ``chunked.grad_bwd``."""
    backward = Backward.of(LightNetRow.of(k, v, angles, cu_seqlens), q, do, state_in)
    dq, dk, dv, dtheta, _, _ = _row_gradients(backward, cotangent, with_theta=with_theta)
    return LightNetGradients(dq, dk, dv, dtheta.view(angles.theta.shape) if with_theta and angles else None)


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, state: LightNetState, angles: Angles | None = None
) -> tuple[Tensor, LightNetState]:
    """One token, see ``chunked.recurrent_step``, in one launch; it has no gradient."""
    phases = None if angles is None else phases_of(angles, state.z.dtype)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    after = LightNetState(*(x.new_empty(x.shape) for x in state))
    constants = recurrent_constants(q.size(2), v.size(2))
    num_programs = q.size(0) * q.size(1) * triton.cdiv(v.size(2), constants["BLOCK_V"])
    if num_programs:
        with on_device_of(q):
            recurrent[(num_programs,)](
                q.contiguous(),
                k.contiguous(),
                v.contiguous(),
                *((None, None) if phases is None else (x.contiguous() for x in phases)),
                *(x.contiguous() for x in state),
                o,
                *after,
                **constants,
                **LAUNCH,
            )
    return o, after
