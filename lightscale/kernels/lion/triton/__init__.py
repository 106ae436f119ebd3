"""LION on GPUs: the passes of ``../chunked.py`` by the kernels of ``kernels.py``.

``common/triton`` describes these passes.
"""

from typing import Any

import torch
from torch import Tensor

from lightscale.kernels.common.states import Arriving, arrived
from lightscale.kernels.lion.chunked import LionGradients, cotangents_of
from lightscale.kernels.lion.state import Gate, LionOutputs, LionState
from lightscale.kernels.lion.triton.cases import COMPILE_CASES
from lightscale.kernels.lion.triton.passes import LionRows, decay_gradient, products, scan

__all__ = ["COMPILE_CASES", "grad_bwd", "out_fwd", "state_bwd", "state_fwd", "triton_lion"]


def _fake_state(k: Tensor, v: Tensor, normalize: bool) -> Tensor:
    return k.new_empty(k.size(0), k.size(2), k.size(3), v.size(3) + normalize, dtype=torch.float32)


def _through(rows: LionRows, log_decay: Tensor | None) -> Tensor:
    """D (B, H): the decay through the rows, 0 where a document begins inside."""
    through = rows.empty().fill_(1.0)
    if log_decay is not None:
        # In fp64, because a sum over a million tokens drifts in fp32.
        log = log_decay.double() * rows.num_tokens if log_decay.dim() == 1 else log_decay.sum(1, dtype=torch.float64)
        through *= log.exp() if rows.num_tokens else 1.0
    if rows.starts is not None and rows.num_tokens:
        through.masked_fill_(rows.starts[:, -1:] >= 0, 0.0)
    return through


@torch.library.custom_op("lightscale::lion_out_fwd", mutates_args=())
def _out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    prefix: Tensor | None,
    suffix: Tensor | None,
    cu_seqlens: Tensor | None,
    gate: str,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, the normaliser (empty without one), and the states that leave."""
    rows = LionRows.of(q, log_decay, cu_seqlens, _gate(gate), normalize=normalize)
    left = scan(rows, k, v, None, prefix, reverse=False)
    right = scan(rows, k, v, None, suffix, reverse=True)
    found = products(rows, q, k, v, left.chunks, right.chunks, transposed=False, eps=eps if normalize else None)
    normalizer = left.final.new_empty(0) if found.normalizer is None else found.normalizer
    return found.out, normalizer, left.final, right.final


@_out_fwd.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, normalize, _ = others
    normalizer = q.new_empty(q.shape[:3] if normalize else (0,), dtype=torch.float32)
    return v.new_empty(v.shape), normalizer, _fake_state(k, v, normalize), _fake_state(k, v, normalize)


@torch.library.custom_op("lightscale::lion_gradients", mutates_args=())
def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    do: Tensor,
    o: Tensor,
    normalizer: Tensor | None,
    prefix: Tensor | None,
    suffix: Tensor | None,
    dprefix: Tensor | None,
    dsuffix: Tensor | None,
    cu_seqlens: Tensor | None,
    gate: str,
    with_decay: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``grad_bwd``, registered; dlog_decay is empty unless requested."""
    entered = None if prefix is None or suffix is None else LionState(prefix, suffix)
    leaving = None if dprefix is None or dsuffix is None else LionState(dprefix, dsuffix)
    outputs = LionOutputs(o, normalizer)
    found = grad_bwd(
        q, k, v, log_decay, do, outputs, entered, leaving, cu_seqlens, gate=_gate(gate), with_decay=with_decay
    )
    dlog_decay = q.new_empty(0, dtype=torch.float32) if found.log_decay is None else found.log_decay
    return found.q, found.k, found.v, dlog_decay, *found.state


@_gradients.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, do: Tensor, o: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    normalizer, *_, with_decay = others
    shape = log_decay.shape if with_decay and log_decay is not None else (0,)
    states = [_fake_state(k, v, normalizer is not None) for _ in range(2)]
    dlog_decay = q.new_empty(shape, dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dlog_decay, states[0], states[1]


def _gate(name: str) -> Gate:
    return "leave" if name == "leave" else "enter"


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.gate, ctx.normalize, _ = inputs
    ctx.save_for_backward(*tensors, *output[:2])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, do: Tensor, _: Tensor, dprefix: Tensor, dsuffix: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, log_decay, prefix, suffix, cu_seqlens, o, normalizer = ctx.saved_tensors
    with_decay = ctx.needs_input_grad[3]
    outputs = (o, normalizer if ctx.normalize else None)
    states = (prefix, suffix, dprefix, dsuffix)
    dq, dk, dv, dlog_decay, *of_states = _gradients(
        q, k, v, log_decay, do, *outputs, *states, cu_seqlens, ctx.gate, with_decay
    )
    of_decay = dlog_decay.to(log_decay.dtype) if with_decay else None
    needed = ctx.needs_input_grad[4:6]
    of_entered = [x if need else None for x, need in zip(of_states, needed, strict=True)]
    return dq, dk, dv, of_decay, *of_entered, None, None, None, None


_out_fwd.register_autograd(_backward, setup_context=_save)


def triton_lion(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: LionState | None,
    cu_seqlens: Tensor | None,
    gate: Gate,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, LionState]:
    """The operator (o, final state) of ``lion``, differentiable; saves inputs, outputs and normalisers."""
    sides = (None, None) if state is None else state
    o, _, prefix, suffix = _out_fwd(q, k, v, log_decay, *sides, cu_seqlens, gate, normalize, eps)
    return o, LionState(prefix, suffix)


@torch.no_grad()
def state_fwd(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    gate: Gate = "leave",
    normalize: bool = True,
) -> tuple[LionState, Tensor]:
    """S_loc and D, see ``chunked.state_fwd``."""
    rows = LionRows.of(k, log_decay, cu_seqlens, gate, normalize=normalize)
    left, right = (scan(rows, k, v, None, None, reverse=side, with_chunks=False).final for side in (False, True))
    return LionState(left, right), _through(rows, log_decay)


@torch.no_grad()
def out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: LionState | None,
    cu_seqlens: Tensor | None = None,
    *,
    gate: Gate = "leave",
    normalize: bool = True,
    eps: float = 0.0,
) -> tuple[LionOutputs, LionState]:
    """The outputs and the states that leave, see ``chunked.out_fwd``."""
    sides = (None, None) if state is None else state
    o, normalizer, *leaving = _out_fwd(q, k, v, log_decay, *sides, cu_seqlens, gate, normalize, eps)
    return LionOutputs(o, normalizer if normalize else None), LionState(*leaving)


@torch.no_grad()
def state_bwd(
    q: Tensor,
    do: Tensor,
    outputs: LionOutputs,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    gate: Gate = "leave",
) -> LionState:
    """The cotangents of the incoming states, see ``chunked.state_bwd``."""
    dY, last = _cotangents(q, do, outputs)
    q = q.to(dY.dtype)
    back = LionRows.of(q, log_decay, cu_seqlens, gate, normalize=last is not None).transposed()
    of_prefix, of_suffix = (
        scan(back, q, dY, last, None, reverse=side, with_chunks=False).final for side in (True, False)
    )
    return LionState(of_prefix, of_suffix)


@torch.no_grad()
def grad_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    do: Tensor,
    outputs: LionOutputs,
    state: LionState | None,
    dstate: Arriving[LionState | None],
    cu_seqlens: Tensor | None = None,
    *,
    gate: Gate = "leave",
    with_decay: bool = False,
) -> LionGradients:
    """The gradients of a row's inputs, see ``chunked.grad_bwd``."""
    dY, last = _cotangents(q, do, outputs)
    q, k, v = (x.to(dY.dtype) for x in (q, k, v))
    rows = LionRows.of(q, log_decay, cu_seqlens, gate, normalize=last is not None)
    back = rows.transposed()
    left, right = (
        scan(rows, k, v, None, None if state is None else state[side], reverse=bool(side)).chunks for side in range(2)
    )
    dq = products(rows, dY, v, k, left, right, transposed=True, x_last=last, own=q if with_decay else None)
    # The queries' gradients do not need the cotangent: their computation overlaps its exchange.
    of_leaving = arrived(dstate)
    dprefix, dsuffix = of_leaving if of_leaving is not None else (None, None)
    # The cotangent of the prefix comes from the right, the cotangent of the suffix from the left.
    dright = scan(back, q, dY, last, dprefix, reverse=True, other=left if with_decay else None)
    dleft = scan(back, q, dY, last, dsuffix, reverse=False, other=right if with_decay else None)
    dk = products(
        back, v, dY, q, dleft.chunks, dright.chunks, transposed=True, y_last=last, own=k if with_decay else None
    )
    dv = products(back, k, q, dY, dleft.chunks, dright.chunks, transposed=False).out
    dlog_decay = None
    if dleft.decay_parts is not None and dright.decay_parts is not None and log_decay is not None:
        dlog_decay = decay_gradient(rows, dq, dk, dleft.decay_parts + dright.decay_parts)
        if log_decay.dim() == 1:
            dlog_decay = dlog_decay.sum((0, 1), dtype=torch.float64).float()
    dtype = do.dtype
    of_entered = LionState(dright.final, dleft.final)
    return LionGradients(dq.out.to(dtype), dk.out.to(dtype), dv.to(dtype), dlog_decay, of_entered)


def _cotangents(q: Tensor, do: Tensor, outputs: LionOutputs) -> tuple[Tensor, Tensor | None]:
    """The first V columns of dY, in the dtype of the gradients' arithmetic, and its last one; see ``cotangents_of``."""
    scale, last = cotangents_of(do, outputs)
    if scale is None:
        return do.to(q.dtype), None
    # Divided by sums over many tokens, cotangents leave fp16's range: fp16 inputs, which are rare, are computed in
    # fp32.
    dtype = torch.float32 if q.dtype == torch.float16 else q.dtype
    return (do.float() * scale[..., None]).to(dtype), last
