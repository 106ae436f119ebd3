"""Gated linear attention on GPUs: the passes of ``../chunked.py`` by the kernels of ``kernels.py``.

``common/triton`` describes these passes.
"""

from typing import Any

import torch
from torch import Tensor

from lightscale.kernels.common.states import Arriving, arrived
from lightscale.kernels.common.triton.recurrent import recurrent_step as one_token
from lightscale.kernels.gla.triton.cases import COMPILE_CASES
from lightscale.kernels.gla.triton.passes import GLARows, decayed, key_gradients, outputs, scan

__all__ = ["COMPILE_CASES", "grad_bwd", "out_fwd", "query_grad", "recurrent_step", "state_bwd", "state_fwd"]


@torch.library.custom_op("lightscale::gla_state_fwd", mutates_args=())
def _state_fwd(k: Tensor, v: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = GLARows.of(k, log_decay, cu_seqlens)
    # The order of launches is the order of the data: decays into q and k first, then products without decays.
    prepared = decayed(rows, None, k)
    local = scan(rows, prepared.k_out, v, prepared.through, None, reverse=False, with_chunks=False).final
    # In fp64, because a sum over a million tokens drifts in fp32.
    through = log_decay.sum(1, dtype=torch.float64).exp().float()
    if rows.starts is not None and rows.num_tokens:
        through.masked_fill_((rows.starts[:, -1:] >= 0)[..., None], 0.0)
    return local, through


@_state_fwd.register_fake
def _(k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake_state(k, v), k.new_empty(k.size(0), k.size(2), k.size(3), dtype=torch.float32)


def _fake_state(k: Tensor, v: Tensor) -> Tensor:
    return k.new_empty(k.size(0), k.size(2), k.size(3), v.size(3), dtype=torch.float32)


@torch.library.custom_op("lightscale::gla_out_fwd", mutates_args=())
def _out_fwd(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, S_in: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows = GLARows.of(q, log_decay, cu_seqlens)
    prepared = decayed(rows, q, k)
    states, final = scan(rows, prepared.k_out, v, prepared.through, S_in, reverse=False)
    return outputs(rows, prepared.q_in, prepared.scores, v, states, reverse=False), final


@_out_fwd.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), _fake_state(k, v)


@torch.library.custom_op("lightscale::gla_state_bwd", mutates_args=())
def _state_bwd(q: Tensor, do: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    rows = GLARows.of(q, log_decay, cu_seqlens)
    prepared = decayed(rows, q, None)
    return scan(rows, prepared.q_in, do, prepared.through, None, reverse=True, with_chunks=False).final


@_state_bwd.register_fake
def _(q: Tensor, do: Tensor, *_: Any) -> Tensor:
    return _fake_state(q, do)


@torch.library.custom_op("lightscale::gla_gradients", mutates_args=())
def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    do: Tensor,
    S_in: Tensor | None,
    dS_end: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``_row_gradients``, registered."""
    rows = GLARows.of(q, log_decay, cu_seqlens)
    dq, dk, dv, dlog_decay, dS_in = _row_gradients(rows, (q, k, v, do), S_in, dS_end)
    return dq, dk, dv, dlog_decay.to(log_decay.dtype), dS_in


def _row_gradients(
    rows: GLARows,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    S_in: Tensor | None,
    dS_end: Arriving[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dlog_decay (fp32) and dS_in, from q, k, v and do."""
    q, k, v, do = inputs
    q_in, k_out, through, scores = decayed(rows, q, k)
    states = scan(rows, k_out, v, through, S_in, reverse=False).chunks
    dstates, dS_in = scan(rows, q_in, do, through, arrived(dS_end), reverse=True)
    dv = outputs(rows, k_out, scores, do, dstates, reverse=True)
    del q_in, k_out, scores  # as large as inputs: freed before the other gradients are allocated
    dq, dk, dlog_decay = key_gradients(rows, inputs, states, dstates, through)
    return dq, dk, dv, dlog_decay, dS_in


@_gradients.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dlog_decay = (x.new_empty(x.shape) for x in (q, k, v, log_decay))
    return dq, dk, dv, dlog_decay, _fake_state(k, v)


def _save_inputs(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of ``_out_fwd``'s arguments; the cotangent of an unused result is None."""
    q, k, v, log_decay, S_in, cu_seqlens = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do
    dq, dk, dv, dlog_decay, dS_in = _gradients(q, k, v, log_decay, do, S_in, dstate, cu_seqlens)
    return dq, dk, dv, dlog_decay, dS_in if ctx.needs_input_grad[4] else None, None


_out_fwd.register_autograd(_backward, setup_context=_save_inputs)


def state_fwd(k: Tensor, v: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S_loc and D, see ``chunked.state_fwd``."""
    local, through = _state_fwd(k, v, log_decay, cu_seqlens)
    return local, through


def out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    S_in: Tensor | None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs and the state that leaves, see ``chunked.out_fwd``; only the inputs are saved for its gradient."""
    o, state = _out_fwd(q, k, v, log_decay, S_in, cu_seqlens)
    return o, state


def state_bwd(q: Tensor, do: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The cotangent U of the incoming state, see ``chunked.state_bwd``."""
    own: Tensor = _state_bwd(q, do, log_decay, cu_seqlens)
    return own


@torch.no_grad()
def grad_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    do: Tensor,
    S_in: Tensor | None,
    dS_end: Arriving[Tensor | None],
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of a row's inputs, see ``chunked.grad_bwd``."""
    rows = GLARows.of(q, log_decay, cu_seqlens)
    dq, dk, dv, dlog_decay, _ = _row_gradients(rows, (q, k, v, do), S_in, dS_end)
    return dq, dk, dv, dlog_decay.to(log_decay.dtype)


@torch.no_grad()
def query_grad(
    k: Tensor, v: Tensor, log_decay: Tensor, do: Tensor, S_in: Tensor | None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """dq alone, see ``chunked.query_grad``; the kernel also computes dk and dlog_decay."""
    rows = GLARows.of(k, log_decay, cu_seqlens)
    no_queries = torch.zeros_like(k)
    _, k_out, through, _ = decayed(rows, None, k)
    states = scan(rows, k_out, v, through, S_in, reverse=False).chunks
    # Only dk and dlog_decay depend on the cotangents of the leaving states.
    dstates = torch.zeros_like(states) if states is not None else None
    return key_gradients(rows, (no_queries, k, v, do), states, dstates, through)[0]


def recurrent_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """One token, see ``chunked.recurrent_step``, in one launch; it has no gradient."""
    return one_token(q, k, v, log_decay, S)
