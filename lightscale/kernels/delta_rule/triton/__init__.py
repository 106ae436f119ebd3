"""The delta rule on GPUs: the passes of ``../chunked.py`` by the kernels of this folder.

The passes have the arguments, results and meaning of those in ``../chunked.py``, for fp16, bf16 and fp32. The passes
that launch kernels are registered with torch as operators. ``torch.compile`` calls these without a trace of their code,
and ``out_fwd`` has its gradient.
"""

from typing import Any

import torch
from torch import Tensor

from lightscale.kernels.common.states import Arriving, arrived, without_state
from lightscale.kernels.delta_rule.chunked import DeltaRuleGradients, of_key_heads
from lightscale.kernels.delta_rule.triton.cases import COMPILE_CASES
from lightscale.kernels.delta_rule.triton.passes import (
    DeltaRows,
    key_gradients,
    prepared,
    scan,
    scan_reverse,
    through_rows,
)
from lightscale.kernels.delta_rule.triton.step import recurrent_step

__all__ = ["COMPILE_CASES", "grad_bwd", "out_fwd", "recurrent_step", "state_bwd", "state_fwd"]


@torch.library.custom_op("lightscale::delta_rule_state_fwd", mutates_args=())
def _state_fwd(
    k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows = DeltaRows.of(k, log_decay, beta, cu_seqlens)
    of = prepared(rows, None, k)
    return scan(rows, of, v, None).final, through_rows(rows, of).contiguous()


@_state_fwd.register_fake
def _(k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake_state(k, v), k.new_empty(k.size(0), v.size(2), k.size(3), k.size(3), dtype=torch.float32)


def _fake_state(k: Tensor, v: Tensor) -> Tensor:
    return k.new_empty(k.size(0), v.size(2), k.size(3), v.size(3), dtype=torch.float32)


@torch.library.custom_op("lightscale::delta_rule_out_fwd", mutates_args=())
def _out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    S_in: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows = DeltaRows.of(k, log_decay, beta, cu_seqlens)
    o, final, *_ = scan(rows, prepared(rows, q, k), v, S_in, outputs=True)
    assert o is not None
    return o, final


@_out_fwd.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), _fake_state(k, v)


@torch.library.custom_op("lightscale::delta_rule_state_bwd", mutates_args=())
def _state_bwd(
    q: Tensor, k: Tensor, do: Tensor, log_decay: Tensor | None, beta: Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    rows = DeltaRows.of(k, log_decay, beta, cu_seqlens)
    return scan_reverse(rows, prepared(rows, q, k), do, None)[3]


@_state_bwd.register_fake
def _(q: Tensor, k: Tensor, do: Tensor, *_: Any) -> Tensor:
    return _fake_state(k, do)


@torch.library.custom_op("lightscale::delta_rule_gradients", mutates_args=())
def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    do: Tensor,
    S_in: Tensor | None,
    dS_end: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``_row_gradients``, registered; without decays their gradient is empty."""
    found, dS_in = _row_gradients(q, k, v, log_decay, beta, do, S_in, dS_end, cu_seqlens)
    dlog_decay = found.beta.new_empty(0) if found.log_decay is None else found.log_decay
    return found.q, found.k, found.v, dlog_decay, found.beta, dS_in


@torch.no_grad()
def _row_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    do: Tensor,
    S_in: Tensor | None,
    dS_end: Arriving[Tensor | None],
    cu_seqlens: Tensor | None = None,
) -> tuple[DeltaRuleGradients, Tensor]:
    """The gradients of a row's inputs and incoming state, see ``chunked.row_gradients``."""
    rows = DeltaRows.of(k, log_decay, beta, cu_seqlens)
    of = prepared(rows, q, k)
    _, _, states, z, transitions = scan(rows, of, v, S_in, chunks=True)
    assert states is not None and z is not None
    dstates, dv, dbeta, dS_in = scan_reverse(rows, of, do, arrived(dS_end), z=z, transitions=transitions)
    assert dstates is not None and dv is not None and dbeta is not None
    # As large as inputs, and read by scans alone: freed before the other gradients are allocated.
    of = of._replace(q_in=None, k_in=k, k_out=k, corrections=of.through, scores=None)
    dq, dk, dlog_decay = key_gradients(rows, (q, k, do), of, (dv, z), (states, dstates))
    dq, dk = (of_key_heads(x, q.size(2)) for x in (dq, dk))
    if dlog_decay is not None and log_decay is not None:
        dlog_decay = dlog_decay.to(log_decay.dtype).contiguous()
    return DeltaRuleGradients(dq, dk, dv, dlog_decay, dbeta.to(beta.dtype).contiguous()), dS_in


@_gradients.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dbeta = (x.new_empty(x.shape) for x in (q, k, v, beta))
    dlog_decay = beta.new_empty(0) if log_decay is None else log_decay.new_empty(log_decay.shape)
    return dq, dk, dv, dlog_decay, dbeta, _fake_state(k, v)


def _save_inputs(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of ``_out_fwd``'s arguments; the cotangent of an unused result is None."""
    q, k, v, log_decay, beta, S_in, cu_seqlens = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do
    dq, dk, dv, dlog_decay, dbeta, dS_in = _gradients(q, k, v, log_decay, beta, do, S_in, dstate, cu_seqlens)
    of_decay = None if log_decay is None else dlog_decay
    return dq, dk, dv, of_decay, dbeta, dS_in if ctx.needs_input_grad[5] else None, None


_out_fwd.register_autograd(_backward, setup_context=_save_inputs)


def state_fwd(
    k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_loc and M, see ``chunked.state_fwd``."""
    local, through = _state_fwd(k, v, log_decay, beta, cu_seqlens)
    return local, through


def out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    S_in: Tensor | None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs and the state that leaves, see ``chunked.out_fwd``; only the inputs are saved for its gradient."""
    o, state = _out_fwd(q, k, v, log_decay, beta, S_in, cu_seqlens)
    return o, state


def state_bwd(
    q: Tensor, k: Tensor, do: Tensor, log_decay: Tensor | None, beta: Tensor, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The cotangent U of the incoming state, see ``chunked.state_bwd``."""
    own: Tensor = _state_bwd(q, k, do, log_decay, beta, cu_seqlens)
    return own


grad_bwd = without_state(_row_gradients)
