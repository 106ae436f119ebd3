"""Gated linear attention in chunks with a hand-written backward, in the passes that sequence parallelism needs.

The mathematics, with the derivation of the backward and the counts of FLOPs and bytes, is in
docs/reference/operators/gla.md. Names of shapes: B rows, T tokens, H heads, K key width, V value width. Inside,
everything is fp32, or fp64 for fp64 inputs; outputs and gradients have the dtype of their inputs.

Arguments of all passes: queries q and keys k (B, T, H, K), values v and cotangents do of the outputs (B, T, H, V).
log_decay is (B, T, H, K). T may be 0. cu_seqlens (N+1,) are the boundaries of documents, or None. chunk_size is the
number of tokens of a chunk.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.kernels.common.documents import document_numbers
from lightscale.kernels.common.states import (
    Arriving,
    arrived,
    kept_states,
    state_dtype,
    state_or_zeros,
    without_autocast,
    without_state,
)
from lightscale.kernels.gla.chunk_batches import GLAChunkBatch, chunk_batches

# Tokens of a chunk. A chunk takes the slower form by halves if a channel decays below e^-60 in it. With 32 tokens an
# average decay of 0.15 in one channel is enough. Hence chunks are short (docs/reference/operators/gla.md, "What was
# tried").
DEFAULT_CHUNK_SIZE = 16


@torch.no_grad()
@without_autocast
def state_fwd(k: Tensor, v: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The summary of a row for the ranks behind it: S_out = D ⊙ S_in + S_loc.

    Args:
        cu_seqlens: (N+1,) or None. A caller whose row begins with a new document takes D as 0.

    Returns:
        S_loc (B, H, K, V), the row's outgoing state from a zero incoming state. D (B, H, K), the decay from the row's
        start to its end, or 0 where a document begins inside the row.
    """
    state = state_or_zeros(None, k, v)
    for batch in chunk_batches(k, v, cu_seqlens, DEFAULT_CHUNK_SIZE):
        # Whole batches at once: this pass does not read the states between the chunks.
        state = batch.leave(k, v, log_decay, state)
    # In fp64, because a sum over a million tokens drifts in fp32.
    through = log_decay.sum(1, dtype=torch.float64).exp().to(state.dtype)
    if cu_seqlens is not None:
        documents = document_numbers(cu_seqlens, num_rows=k.shape[0], num_tokens=k.shape[1])
        through.masked_fill_((documents[:, -1:] > 0).any(1)[:, None, None], 0.0)
    return state, through


@torch.no_grad()
@without_autocast
def out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    S_in: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    entering: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs o (B, T, H, V) of a row that S_in (B, H, K, V) enters, and the state that leaves it.

    Args:
        S_in: zero when None; only the row's first document reads it.
        entering: receives the states that enter the batches behind the first, for ``row_gradients``.
    """
    state = state_or_zeros(S_in, q, v)
    o = v.new_empty(v.shape)
    for batch in chunk_batches(q, v, cu_seqlens, chunk_size):
        if entering is not None and batch.start:
            entering.append(state)
        q_g, k_g, v_g = batch.load(q), batch.load(k), batch.load(v)
        decays = batch.decays(log_decay)
        q_in = q_g * decays.upto
        # 1 / upto grows up to e^60 in chunks that are not steep; ``decays.scores`` replaces the scores of steep chunks.
        o_g = batch.causal_(decays.scores(q_g, k_g, q_in, k_g / decays.upto)) @ v_g
        # ``load`` copies: after the scores, which read plain keys, the keys can be decayed in place.
        states = batch.scan(batch.outgoing_(k_g.mul_(decays.after)), v_g, decays.through, state)
        o_g.add_(batch.incoming_(q_in @ states[:-1]))
        batch.store(o, o_g)
        # A clone, because a view would keep the states of the whole batch in memory.
        state = states[-1].clone()
    return o, state


@torch.no_grad()
@without_autocast
def query_grad(
    k: Tensor, v: Tensor, log_decay: Tensor, do: Tensor, S_in: Tensor | None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """dq (B, T, H, K) of ``grad_bwd`` alone; queries and the cotangents of the leaving state have no part in it.

    dq_i = S_i do_i: a read of the states along their values. ``../lion/vector.py`` uses this as its operator.
    """
    state = state_or_zeros(S_in, k, v)
    dq = k.new_empty(k.shape)
    for batch in chunk_batches(k, v, cu_seqlens, DEFAULT_CHUNK_SIZE):
        k_g, v_g, do_g = batch.load(k), batch.load(v), batch.load(do)
        decays = batch.decays(log_decay)
        dscores = do_g @ v_g.mT
        own = dscores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * k_g
        dq_g = decays.query_gradient(batch.causal_(dscores, -1), k_g, k_g / decays.upto).add_(own)
        states = batch.scan(batch.outgoing_(k_g.mul_(decays.after)), v_g, decays.through, state)
        batch.store(dq, dq_g.addcmul_(batch.incoming_(do_g @ states[:-1].mT), decays.upto))
        state = states[-1].clone()
    return dq


@torch.no_grad()
@without_autocast
def state_bwd(q: Tensor, do: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The cotangent U (B, H, K, V) of a row's incoming state that comes from the row's own outputs.

    The whole cotangent is U + D ⊙ dS_end with the D of ``state_fwd``. Only the first document reads the
    incoming state; a caller whose row begins with a new document takes U as 0.
    """
    dstate = state_or_zeros(None, q, do)
    for batch in reversed(chunk_batches(q, do, cu_seqlens, DEFAULT_CHUNK_SIZE)):
        dstate = batch.leave_back(q, do, log_decay, dstate)
    return dstate


class GLAGradients(NamedTuple):
    """Gradients of a row's inputs, each of its input's shape and dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor


class _BatchGradients(NamedTuple):
    """Gradients of a batch's inputs (G, B, H, L, width)."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    state: Tensor  # (B, H, K, V)


def _batch_gradients(
    batch: GLAChunkBatch, inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], state: Tensor, dstate: Tensor
) -> _BatchGradients:
    """The gradients from (q, k, v, log_decay, do) of the row, the entering state, and the leaving state's cotangent."""
    q, k, v, log_decay, do = inputs
    decays = batch.decays(log_decay)
    q, k, v, do = batch.load(q), batch.load(k), batch.load(v), batch.load(do)
    q_in, k_back, k_out = q * decays.upto, k / decays.upto, k * decays.after
    scores = batch.causal_(decays.scores(q, k, q_in, k_back))
    dscores = do @ v.mT
    # A token reads its own write undecayed: the diagonal is added to dq and dk at the end, and is no part of
    # dlog_decay.
    own = dscores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).clone()
    batch.causal_(dscores, -1)
    dq, dk = decays.query_gradient(dscores, k, k_back), decays.key_gradient(dscores, q, q_in)
    dv = scores.mT @ do

    states = batch.scan(batch.outgoing_(k_out), v, decays.through, state)
    dstates = batch.scan_back(batch.incoming_(q_in), do, decays.through, dstate)
    dq.addcmul_(batch.incoming_(do @ states[:-1].mT), decays.upto)
    dk_leaving = batch.outgoing_(v @ dstates[1:].mT).mul_(decays.after)
    dv.add_(batch.outgoing_(k_out @ dstates[1:]))
    # Before dk gets its part through the leaving state. In that part a decay acts on the writes before it, in all other
    # parts on the tokens behind it (docs/reference/operators/gla.md, "dlog_decay").
    inside = (q * dq).addcmul_(k, dk, value=-1)
    dk.add_(dk_leaving)
    dlog_decay = batch.decay_gradient(inside, dk_leaving.mul_(k), decays.through, states[:-1], dstates[1:])
    # Only a chunk with a decay that underflows can be one of these; no state passes through it.
    if decays.steep is not None:
        dlog_decay.masked_fill_(batch.load(log_decay).exp_() == 0, 0.0)
    # No decay lies between a token and itself: these parts come last. In q·dq - k·dk they cancel only up to rounding,
    # which would swamp the gradient of a strong decay.
    return _BatchGradients(dq.addcmul_(own, k), dk.addcmul_(own, q), dv, dlog_decay, dstates[0].clone())


@torch.no_grad()
@without_autocast
def row_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    do: Tensor,
    S_in: Tensor | None,
    dS_end: Arriving[Tensor | None],
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    entering: Sequence[Tensor] = (),
) -> tuple[GLAGradients, Tensor]:
    """The gradients of a row's q, k, v, log_decay and incoming state.

    Args:
        S_in: the state (B, H, K, V) that entered the row; zero when None.
        dS_end: the cotangent (B, H, K, V) of the state that left it, or a function that waits for it; zero when None.
        entering: the states that entered the batches behind the first, from ``out_fwd``; without them they are
            computed again.
    """
    batches = chunk_batches(q, v, cu_seqlens, chunk_size)
    # One state per batch: the way back recomputes the states inside it, so that a state is kept for many chunks.
    states = [state_or_zeros(S_in, q, v), *entering]
    for batch in batches[len(states) - 1 : -1]:
        states.append(batch.leave(k, v, log_decay, states[-1]))

    dq, dk, dv, dlog_decay = (x.new_empty(x.shape) for x in (q, k, v, log_decay))
    dstate = state_or_zeros(arrived(dS_end), q, v)
    for batch in reversed(batches):
        gradients = _batch_gradients(batch, (q, k, v, log_decay, do), states.pop(), dstate)
        for out, x in zip((dq, dk, dv, dlog_decay), gradients[:4], strict=True):
            batch.store(out, x)
        dstate = gradients.state
    return GLAGradients(dq, dk, dv, dlog_decay), dstate


grad_bwd = without_state(row_gradients)


@without_autocast
def recurrent_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """One token: q, k, log_decay (B, H, K), v (B, H, V), S (B, H, K, V) → o (B, H, V) and the next state.

    The state is read and written once, at any position. Autograd differentiates the step.
    """
    dtype = state_dtype(q.dtype)
    write = k.to(dtype).unsqueeze(-1) * v.to(dtype).unsqueeze(-2)
    S = write + log_decay.to(dtype).exp().unsqueeze(-1) * S
    return (q.to(dtype).unsqueeze(-2) @ S).squeeze(-2).to(v.dtype), S


class ChunkedGLA(torch.autograd.Function):
    """``out_fwd`` and ``row_gradients`` as one differentiable call; the inputs and ``kept_states`` are saved."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """(o, final state) of q, k, v, log_decay, initial_state, cu_seqlens, chunk_size; see ``out_fwd``."""
        *tensors, ctx.chunk_size = inputs
        entering: list[Tensor] = []
        found = out_fwd(*tensors, chunk_size=ctx.chunk_size, entering=entering)
        ctx.save_for_backward(*tensors, *kept_states(entering, tensors[2]))
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of ``forward``'s arguments; the cotangent of an unused result is None."""
        q, k, v, log_decay, initial_state, cu_seqlens, *entering = ctx.saved_tensors
        gradients, dS_in = row_gradients(
            q,
            k,
            v,
            log_decay,
            torch.zeros_like(v) if do is None else do,
            initial_state,
            dstate,
            cu_seqlens,
            chunk_size=ctx.chunk_size,
            entering=entering,
        )
        return *gradients, dS_in if ctx.needs_input_grad[4] else None, None, None
