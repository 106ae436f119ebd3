"""Lightning attention in chunks with a hand-written backward, in the passes that sequence parallelism needs.

The mathematics, with the derivation of the backward and the counts of FLOPs and bytes, is in
docs/reference/operators/lightning.md. Names of shapes: B rows, T tokens, H heads, K key width, V value width, F width
of the features of q and k: K, or 2K with angles, which spread q and k where they are read. Inside, everything is fp32,
or fp64 for fp64 inputs; outputs and gradients have the dtype of their inputs.

Arguments of all passes: queries q and keys k (B, T, H, K), values v and cotangents do of the outputs (B, T, H, V).
log_decay is (H,) or None. T may be 0. cu_seqlens (N+1,) are the boundaries of documents, or None. angles are the angles
of queries and keys, or None. chunk_size is the number of tokens of a chunk.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.kernels.common.angles import Angles, angles_of, feature_width, features, phases_of
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
from lightscale.kernels.lightning.chunk_batches import LightningDecays, chunk_batches

# Tokens of a chunk: products inside it grow with its length, states to keep fall with it
# (docs/reference/operators/lightning.md, "What was tried").
DEFAULT_CHUNK_SIZE = 64

# Tokens that one product of state_fwd and state_bwd sums over; bounds the copy in head-major order.
_SUM_TOKENS = 1024


def _weighted_outer(x: Tensor, y: Tensor, weights: Tensor, kept: Tensor | None, angles: Angles | None) -> Tensor:
    """Σ_t weights_t x_t y_tᵀ (B, H, F, V) over the kept tokens, x spread; weights (H, T), kept (B, T)."""
    width = feature_width(x, angles)
    total = torch.zeros(x.shape[0], x.shape[2], width, y.shape[3], dtype=weights.dtype, device=x.device)
    for start in range(0, x.shape[1], _SUM_TOKENS):
        tokens = slice(start, start + _SUM_TOKENS)
        phases = None if angles is None else phases_of(angles.of(tokens), weights.dtype)
        weighted = weights[:, tokens, None] * features(x[:, tokens], phases).transpose(1, 2)
        if kept is not None:
            weighted.masked_fill_(~kept[:, None, tokens, None], 0.0)
        total += weighted.mT @ y[:, tokens].transpose(1, 2).to(weights.dtype)
    return total


@without_autocast
def state_fwd(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    angles: Angles | None = None,
) -> tuple[Tensor, Tensor]:
    """The summary of a row for the ranks behind it: S_out = D ⊙ S_in + S_loc.

    Args:
        cu_seqlens: (N+1,) or None. A caller whose row begins with a new document takes D as 0.

    Returns:
        S_loc (B, H, F, V), the row's outgoing state from a zero incoming state. D (B, H), the decay from the row's
        start to its end: λ^T, or 0 where a document begins inside the row.
    """
    num_rows, num_tokens, num_heads = k.shape[:3]
    decays = LightningDecays(log_decay, num_heads=num_heads, chunk_size=0, like=k)
    steps = torch.arange(num_tokens - 1, -1, -1, device=k.device)
    through = decays.power(steps.new_tensor(num_tokens)).expand(num_rows, -1)
    if cu_seqlens is None:
        # Without chunks: from a zero state the outgoing one is a single weighted product over the whole row.
        return _weighted_outer(k, v, decays.power(steps), None, angles), through.clone()
    documents = document_numbers(cu_seqlens, num_rows=num_rows, num_tokens=num_tokens)
    last = documents[:, -1:]  # (B, 1), or (B, 0) when T is 0
    local = _weighted_outer(k, v, decays.power(steps), documents == last, angles)
    return local, through.masked_fill((last > 0).any(1, keepdim=True), 0.0)


@without_autocast
def out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    S_in: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    angles: Angles | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    entering: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs o (B, T, H, V) of a row that S_in (B, H, F, V) enters, and the state that leaves it.

    Args:
        S_in: zero when None; only the row's first document reads it.
        entering: receives the states that enter the batches behind the first, for ``row_gradients``.
    """
    decays = LightningDecays(log_decay, num_heads=q.shape[2], chunk_size=chunk_size, like=q)
    width = feature_width(q, angles)
    state = state_or_zeros(S_in, q, v, width)
    o = v.new_empty(v.shape)
    for batch in chunk_batches(v, width, decays, cu_seqlens, chunk_size):
        if entering is not None and batch.start:
            entering.append(state)
        phases = batch.phases(angles)
        q_g, k_g, v_g = batch.load(q, phases), batch.load(k, phases), batch.load(v)
        o_g = batch.causal_(q_g @ k_g.mT) @ v_g
        states, state = batch.scan_states(k_g, v_g, state)
        batch.add_incoming_(o_g, batch.weigh_incoming_(q_g), states)
        batch.store(o, o_g)
    return o, state


@without_autocast
def state_bwd(
    q: Tensor,
    do: Tensor,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    angles: Angles | None = None,
) -> Tensor:
    """The cotangent U (B, H, F, V) of a row's incoming state that comes from the row's own outputs.

    The whole cotangent is U + D ⊙ dS_end with the D of ``state_fwd``. Only the first document reads the
    incoming state; a caller whose row begins with a new document takes U as 0.
    """
    num_rows, num_tokens, num_heads = q.shape[:3]
    decays = LightningDecays(log_decay, num_heads=num_heads, chunk_size=0, like=q)
    weights = decays.power(torch.arange(1, num_tokens + 1, device=q.device))
    kept = None
    if cu_seqlens is not None:
        kept = document_numbers(cu_seqlens, num_rows=num_rows, num_tokens=num_tokens) == 0
    return _weighted_outer(q, do, weights, kept, angles)


class Gradients(NamedTuple):
    """Gradients of a row's inputs, each of its input's shape."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    """None unless requested: (H,), which the caller sums over ranks; or (B, T, H) by ``token_decays``."""
    theta: Tensor | None
    """(H, K) fp64, None unless requested; the caller sums it over ranks."""


@without_autocast
def row_gradients(
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
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    entering: Sequence[Tensor] = (),
) -> tuple[Gradients, Tensor]:
    """The gradients of a row's q, k, v, its incoming state and, on request, of log_decay and theta.

    Args:
        S_in: the state (B, H, F, V) that entered the row; zero when None.
        dS_end: the cotangent (B, H, F, V) of the state that left it, or a function that waits for it; zero when None.
        with_decay: compute dlog_decay, which costs one more pass over the states.
        with_theta: compute dtheta; needs angles.
        entering: the states that entered the batches behind the first, from ``out_fwd``; without them they are
            computed again.
    """
    decays = LightningDecays(log_decay, num_heads=q.shape[2], chunk_size=chunk_size, like=q)
    width = feature_width(q, angles)
    batches = list(chunk_batches(v, width, decays, cu_seqlens, chunk_size))
    # One state per batch: the way back recomputes the states inside it.
    before = [state_or_zeros(S_in, q, v, width), *entering]
    for batch in batches[len(before) - 1 : -1]:
        before.append(batch.scan_states(batch.load(k, batch.phases(angles)), batch.load(v), before[-1])[1])

    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    dlog_decay = q.new_zeros(q.shape[2], dtype=torch.float64) if with_decay else None
    dtheta = q.new_zeros(angles.theta.shape, dtype=torch.float64) if with_theta and angles is not None else None
    dstate = state_or_zeros(arrived(dS_end), q, v, width)
    for batch in reversed(batches):
        phases = batch.phases(angles)
        q_g, k_g, v_g, do_g = batch.load(q, phases), batch.load(k, phases), batch.load(v), batch.load(do)
        k_out = batch.weigh_outgoing_(k_g.clone())
        states = batch.states_between(k_out, v_g, before.pop())
        scores = batch.causal_(q_g @ k_g.mT)
        dscores = do_g @ v_g.mT
        if dlog_decay is not None:
            dlog_decay += batch.decay_gradient_of_pairs(scores * dscores)
        batch.causal_(dscores)
        dq_g, dk_g, dv_g = dscores @ k_g, dscores.mT @ q_g, scores.mT @ do_g

        # do_g and v_g are weighted in place from here on, each after the products that read it plain.
        batch.weigh_incoming_(do_g)
        dstates = q_g.mT @ do_g
        dstate = batch.scan_(dstates, dstate, reversed(range(batch.num_chunks)))
        batch.weigh_outgoing_(v_g)
        if dlog_decay is None:
            batch.add_incoming_(dq_g, do_g, states.mT)
            batch.add_outgoing_(dk_g, v_g, dstates.mT)
        else:
            # In dq and dk, other decays act on the parts by states than on the parts inside the chunk.
            dq_in, dk_out = torch.zeros_like(dq_g), torch.zeros_like(dk_g)
            batch.add_incoming_(dq_in, do_g, states.mT)
            batch.add_outgoing_(dk_out, v_g, dstates.mT)
            dlog_decay += batch.decay_gradient_of_states(q_g * dq_in, k_g * dk_out, states, dstates)
            dq_g += dq_in
            dk_g += dk_out
        batch.add_outgoing_(dv_g, k_out, dstates)

        for out, x, dx in ((dq, q, dq_g), (dk, k, dk_g)):
            of_x, of_theta = batch.narrow(x, dx, angles, phases)
            batch.store(out, of_x)
            if dtheta is not None and of_theta is not None:
                dtheta += of_theta
        batch.store(dv, dv_g)
    if dlog_decay is not None:
        dlog_decay = dlog_decay.to(decays.dtype)
    return Gradients(dq, dk, dv, dlog_decay, dtheta), dstate


grad_bwd = without_state(row_gradients)


@without_autocast
def recurrent_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """One token: q, k (B, H, K), v (B, H, V), S (B, H, K, V) → o (B, H, V) and the next state.

    ``log_decay`` is (H,), or this token's (B, H), or None. The state is read and written once, at any position.
    Autograd differentiates the step.
    """
    dtype = state_dtype(q.dtype)
    S = torch.mul(k.to(dtype).unsqueeze(-1), v.to(dtype).unsqueeze(-2)).add_(
        S if log_decay is None else S * log_decay.to(dtype).exp()[..., None, None]
    )
    return (q.to(dtype).unsqueeze(-2) @ S).squeeze(-2).to(v.dtype), S


class ChunkedLightningAttention(torch.autograd.Function):
    """``out_fwd`` and ``row_gradients`` as one differentiable call; the inputs and ``kept_states`` are saved."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """(o, final state) of q, k, v, log_decay, theta, positions, initial_state, cu_seqlens, chunk_size.

        See ``out_fwd``.
        """
        *tensors, ctx.chunk_size = inputs
        q, k, v, log_decay, theta, positions, initial_state, cu_seqlens = tensors
        entering: list[Tensor] = []
        angles = angles_of(theta, positions)
        options: Any = {"angles": angles, "chunk_size": ctx.chunk_size, "entering": entering}
        found = out_fwd(q, k, v, log_decay, initial_state, cu_seqlens, **options)
        ctx.save_for_backward(*tensors, *kept_states(entering, tensors[2]))
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of ``forward``'s arguments; the cotangent of an unused result is None."""
        q, k, v, log_decay, theta, positions, initial_state, cu_seqlens, *entering = ctx.saved_tensors
        with_decay, with_theta = ctx.needs_input_grad[3:5]
        gradients, dS_in = row_gradients(
            q,
            k,
            v,
            log_decay,
            torch.zeros_like(v) if do is None else do,
            initial_state,
            dstate,
            cu_seqlens,
            angles=angles_of(theta, positions),
            with_decay=with_decay,
            with_theta=with_theta,
            chunk_size=ctx.chunk_size,
            entering=entering,
        )
        dlog_decay = None if gradients.log_decay is None else gradients.log_decay.to(log_decay.dtype)
        dtheta = None if gradients.theta is None else gradients.theta.to(theta.dtype)
        dinitial_state = dS_in if ctx.needs_input_grad[6] else None
        return gradients.q, gradients.k, gradients.v, dlog_decay, dtheta, None, dinitial_state, None, None
