"""Lightning attention on GPUs: the passes of ``../chunked.py`` by the kernels of ``kernels.py``.

``common/triton`` describes these passes.
"""

from typing import Any

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Angles, angles_of, parts_of
from lightscale.kernels.common.once import once
from lightscale.kernels.common.states import Arriving, arrived
from lightscale.kernels.common.triton.recurrent import recurrent_step as one_token
from lightscale.kernels.lightning.chunked import Gradients
from lightscale.kernels.lightning.triton.cases import COMPILE_CASES
from lightscale.kernels.lightning.triton.passes import LightningRows, decay_gradient, products, scan

__all__ = ["COMPILE_CASES", "grad_bwd", "out_fwd", "recurrent_step", "state_bwd", "state_fwd"]


@torch.library.custom_op("lightscale::lightning_state_fwd", mutates_args=())
def _state_fwd(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    theta: Tensor | None,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows = LightningRows.of(k, log_decay, cu_seqlens, angles_of(theta, positions))
    local = scan(rows, k, v, None, reverse=False, with_chunks=False).final
    if log_decay is not None and rows.rate is not None and rows.num_tokens:
        through = once(log_decay, ("through", rows.num_tokens), lambda: _through(log_decay, rows.num_tokens))
        through = through.repeat(rows.num_rows, 1)
    elif rows.sums is not None and log_decay is not None:
        # In fp64, because a sum over a million tokens drifts in fp32.
        through = log_decay.sum(1, dtype=torch.float64).exp().float()
    else:
        through = local.new_ones(rows.num_rows, rows.num_heads)
    if rows.starts is not None and rows.num_tokens:
        through.masked_fill_(rows.starts[:, -1:] >= 0, 0.0)
    return local, through


def _through(log_decay: Tensor, num_tokens: int) -> Tensor:
    return (log_decay.detach().double() * num_tokens).exp().float()


@_state_fwd.register_fake
def _(k: Tensor, v: Tensor, log_decay: Tensor | None, theta: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake_state(k, v, theta), k.new_empty(k.size(0), k.size(2), dtype=torch.float32)


def _fake_state(k: Tensor, v: Tensor, theta: Tensor | None) -> Tensor:
    width = k.size(3) * (1 if theta is None else 2)
    return k.new_empty(k.size(0), k.size(2), width, v.size(3), dtype=torch.float32)


@torch.library.custom_op("lightscale::lightning_out_fwd", mutates_args=())
def _out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    theta: Tensor | None,
    positions: Tensor | None,
    S_in: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows = LightningRows.of(q, log_decay, cu_seqlens, angles_of(theta, positions))
    scanned = scan(rows, k, v, S_in, reverse=False)
    return products(rows, q, k, v, scanned.chunks, reverse=False, transposed=False).out, scanned.final


@_out_fwd.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, theta: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), _fake_state(k, v, theta)


@torch.library.custom_op("lightscale::lightning_state_bwd", mutates_args=())
def _state_bwd(
    q: Tensor,
    do: Tensor,
    log_decay: Tensor | None,
    theta: Tensor | None,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    rows = LightningRows.of(q, log_decay, cu_seqlens, angles_of(theta, positions))
    return scan(rows, q, do, None, reverse=True, with_chunks=False).final


@_state_bwd.register_fake
def _(q: Tensor, do: Tensor, log_decay: Tensor | None, theta: Tensor | None, *_: Any) -> Tensor:
    return _fake_state(q, do, theta)


@torch.library.custom_op("lightscale::lightning_gradients", mutates_args=())
def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    theta: Tensor | None,
    positions: Tensor | None,
    do: Tensor,
    S_in: Tensor | None,
    dS_end: Tensor | None,
    cu_seqlens: Tensor | None,
    with_decay: bool,
    with_theta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``_row_gradients``, registered."""
    rows = LightningRows.of(q, log_decay, cu_seqlens, angles_of(theta, positions))
    return _row_gradients(rows, (q, k, v, do), S_in, dS_end, with_decay=with_decay, with_theta=with_theta)


def _row_gradients(
    rows: LightningRows,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    S_in: Tensor | None,
    dS_end: Arriving[Tensor | None],
    *,
    with_decay: bool,
    with_theta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dlog_decay in fp32 and dtheta (H, K) in fp64 (both empty unless requested), and dS_in."""
    q, k, v, do = inputs
    learned = {"with_decay": with_decay, "with_theta": with_theta}
    states = scan(rows, k, v, S_in, reverse=False).chunks
    dq = products(rows, do, v, k, states, reverse=False, transposed=True, own=q, **learned)
    if not with_decay:
        states = None  # as large as an input: freed before its cotangents are allocated
    # The queries' gradients do not need the cotangent: their computation overlaps its exchange.
    dstates, dS_in, of_states = scan(rows, q, do, arrived(dS_end), reverse=True, other=states)
    dk = products(rows, v, do, q, dstates, reverse=True, transposed=True, own=k, **learned)
    dv = products(rows, k, q, do, dstates, reverse=True, transposed=False).out
    dlog_decay, dtheta = dS_in.new_empty(0), dS_in.new_empty(0, dtype=torch.float64)
    if dq.decay_parts is not None and dk.decay_parts is not None and of_states is not None:
        dlog_decay = decay_gradient(rows, dq.decay_parts, dk.decay_parts, of_states)
    if dq.dtheta is not None and dk.dtheta is not None:
        dtheta = dq.dtheta + dk.dtheta
    return dq.out, dk.out, dv, dlog_decay, dtheta, dS_in


@_gradients.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, theta: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *_, with_decay, with_theta = others
    shape = q.shape[2:3] if log_decay is None else log_decay.shape
    dlog_decay = q.new_empty(shape if with_decay else (0,), dtype=torch.float32)
    dtheta = q.new_empty(q.shape[2:] if with_theta else (0,), dtype=torch.float64)
    dS_in = _fake_state(k, v, theta)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dlog_decay, dtheta, dS_in


def _save_inputs(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of ``_out_fwd``'s arguments; the cotangent of an unused result is None."""
    q, k, v, log_decay, theta, positions, S_in, cu_seqlens = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do
    with_decay, with_theta = ctx.needs_input_grad[3:5]
    dq, dk, dv, dlog_decay, dtheta, dS_in = _gradients(
        q, k, v, log_decay, theta, positions, do, S_in, dstate, cu_seqlens, with_decay, with_theta
    )
    of_decay = dlog_decay.to(log_decay.dtype) if with_decay else None
    of_theta = dtheta.to(theta.dtype).view(theta.shape) if with_theta else None
    return dq, dk, dv, of_decay, of_theta, None, dS_in if ctx.needs_input_grad[6] else None, None


_out_fwd.register_autograd(_backward, setup_context=_save_inputs)


def state_fwd(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    angles: Angles | None = None,
) -> tuple[Tensor, Tensor]:
    """S_loc and D, see ``chunked.state_fwd``."""
    local, through = _state_fwd(k, v, log_decay, *parts_of(angles), cu_seqlens)
    return local, through


def out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    S_in: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    angles: Angles | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs and the state that leaves, see ``chunked.out_fwd``; only the inputs are saved for its gradient."""
    o, state = _out_fwd(q, k, v, log_decay, *parts_of(angles), S_in, cu_seqlens)
    return o, state


def state_bwd(
    q: Tensor,
    do: Tensor,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    angles: Angles | None = None,
) -> Tensor:
    """The cotangent U of the incoming state, see ``chunked.state_bwd``."""
    own: Tensor = _state_bwd(q, do, log_decay, *parts_of(angles), cu_seqlens)
    return own


@torch.no_grad()
def grad_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    do: Tensor,
    S_in: Tensor | None,
    dS_end: Arriving[Tensor | None],
    cu_seqlens: Tensor | None = None,
    *,
    angles: Angles | None = None,
    with_decay: bool = False,
    with_theta: bool = False,
) -> Gradients:
    """The gradients of a row's inputs, see ``chunked.grad_bwd``."""
    rows = LightningRows.of(q, log_decay, cu_seqlens, angles)
    dq, dk, dv, dlog_decay, dtheta, _ = _row_gradients(
        rows, (q, k, v, do), S_in, dS_end, with_decay=with_decay, with_theta=with_theta
    )
    of_theta = dtheta.view(angles.theta.shape) if with_theta and angles else None
    return Gradients(dq, dk, dv, dlog_decay if with_decay else None, of_theta)


def recurrent_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """One token, see ``chunked.recurrent_step``, in one launch; it has no gradient."""
    # A decay per head is a decay per channel, constant over the channels.
    by_channel = None if log_decay is None else log_decay[..., None].expand(k.shape)
    return one_token(q, k, v, by_channel, S)
