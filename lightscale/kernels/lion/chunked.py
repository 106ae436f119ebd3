"""LION in chunks with a hand-written backward, in the passes that sequence parallelism needs.

The mathematics, with the derivation of the backward and the counts of FLOPs and bytes, is in
docs/reference/operators/lion.md. Names of shapes: B rows, T tokens, H heads, K key width, V value width, W = V + 1 with
the normaliser's column, else V. Inside, everything is fp32, or fp64 for fp64 inputs; outputs and gradients have the
dtype of their inputs.

Arguments of all passes: queries q and keys k (B, T, H, K), values v and cotangents do of the outputs (B, T, H, V).
log_decay is (H,), (B, T, H) or None. T may be 0. cu_seqlens (N+1,) are the boundaries of documents, or None. gate is
the argument of ``lion``. chunk_size is the number of tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.kernels.common.documents import document_numbers
from lightscale.kernels.common.states import Arriving, arrived, state_dtype, without_autocast
from lightscale.kernels.lion.chunk_batches import (
    LionBatch,
    chunk_batches,
    read_weights,
    sums_of,
    write_weights,
)
from lightscale.kernels.lion.state import Gate, LionOutputs, LionState

# Tokens of a chunk: products inside it grow with its length, states to keep fall with it
# (docs/reference/operators/lion.md, "What was tried").
DEFAULT_CHUNK_SIZE = 64

# Tokens that one product of state_fwd and state_bwd sums over; bounds the copy in head-major order.
_SUM_TOKENS = 1024


def decays_or_none(log_decay: Tensor | None, q: Tensor) -> Tensor:
    """``log_decay`` (H,) or (B, T, H), or zeros (H,)."""
    return torch.zeros(q.shape[2], device=q.device) if log_decay is None else log_decay


def _last(normalize: bool) -> float | None:
    return 1.0 if normalize else None


class LionCotangents(NamedTuple):
    """Cotangents of the sums Y = [o · normaliser, normaliser] (…, W) before the division."""

    scale: Tensor | None
    """(B, T, H): 1 / normaliser, the factor of do in the first V columns; 0 where the normaliser is 0."""
    last: Tensor | None
    """(B, T, H): the last column, -(do · o) / normaliser."""


def cotangents_of(do: Tensor, outputs: LionOutputs) -> LionCotangents:
    """The cotangents of the sums, from do (B, T, H, V)."""
    o, normalizer = outputs
    if normalizer is None:
        return LionCotangents(None, None)
    dtype = normalizer.dtype
    scale = torch.where(normalizer == 0, 0.0, 1.0 / torch.where(normalizer == 0, 1.0, normalizer))
    return LionCotangents(scale, -scale * torch.linalg.vecdot(do.to(dtype), o.to(dtype)))


def _load_cotangents(batch: LionBatch, do: Tensor, of_sums: LionCotangents, dtype: torch.dtype) -> Tensor:
    """dY (B, G, H, L, W) of a batch."""
    if of_sums.scale is None or of_sums.last is None:
        return batch.load(do, dtype)
    dY = batch.load(do, dtype, last=batch.tokens(of_sums.last).transpose(2, 3))
    dY[..., :-1] *= batch.tokens(of_sums.scale).transpose(2, 3)[..., None]
    return dY


def _weighted_outers(x: Tensor, y: Tensor, last: Tensor | float | None, weights: Tensor, kept: Tensor) -> LionState:
    """Σ_t weights_t x_t [y_t, last_t]ᵀ of both sides (B, H, K, W); weights and kept (B, T, H, 2) or broadcast to it."""
    dtype = state_dtype(x.dtype)
    num_rows, num_tokens, num_heads, key_width = x.shape
    width = y.shape[3] + (last is not None)
    total = torch.zeros(num_rows, num_heads, 2 * key_width, width, dtype=dtype, device=x.device)
    weights = torch.where(kept, weights.to(dtype), 0.0).expand(num_rows, num_tokens, num_heads, 2)
    for start in range(0, num_tokens, _SUM_TOKENS):
        tokens = slice(start, start + _SUM_TOKENS)
        values = y[:, tokens].to(dtype)
        if last is not None:
            column = last[:, tokens, :, None] if isinstance(last, Tensor) else torch.full_like(values[..., :1], last)
            values = torch.cat([values, column], -1)
        spread = (weights[:, tokens, :, :, None] * x[:, tokens, :, None].to(dtype)).flatten(-2)
        total += spread.permute(0, 2, 3, 1) @ values.transpose(1, 2)
    return LionState(*total.unflatten(2, (2, key_width)).unbind(2))


def _kept(cu_seqlens: Tensor | None, x: Tensor, *, writes: bool) -> tuple[Tensor, Tensor]:
    """(B, T, 1, 2): tokens that write to the states that leave a row, or read those that enter; (B, 1): all do."""
    num_rows, num_tokens = x.shape[:2]
    if cu_seqlens is None:
        through = torch.ones(num_rows, 1, dtype=torch.bool, device=x.device)
        return torch.ones(1, 1, 1, 2, dtype=torch.bool, device=x.device), through
    documents = document_numbers(cu_seqlens, num_rows=num_rows, num_tokens=num_tokens)
    last = documents[:, -1:]
    sides = (documents == last, documents == 0) if writes else (documents == 0, documents == last)
    return torch.stack(sides, -1).unsqueeze(2), ~(last > 0).any(1, keepdim=True)


@without_autocast
def state_fwd(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    gate: Gate = "leave",
    normalize: bool = True,
) -> tuple[LionState, Tensor]:
    """The summary of a row for the ranks on both sides: S_out = D ⊙ S_in + S_loc, for prefix and suffix.

    Args:
        cu_seqlens: (N+1,) or None. If the row's first token begins a document, the caller passes no state across that
            border in either direction.
        normalize: whether states have the normaliser's column.

    Returns:
        S_loc, the states that leave the row on the right and on the left from zero states, (B, H, K, W) each. D (B, H),
        the decay through the row in both directions: 0 where a document begins inside the row.
    """
    sums = sums_of(_by_token(log_decay, k), gate)
    kept, through = _kept(cu_seqlens, k, writes=True)
    local = _weighted_outers(k, v, _last(normalize), write_weights(sums), kept)
    decay = sums.total[:, 0].exp().to(state_dtype(k.dtype)).expand(k.shape[0], k.shape[2])
    return local, torch.where(through, decay, 0.0)


def _by_token(log_decay: Tensor | None, x: Tensor) -> Tensor:
    """Log decays (B, T, H), or (1, T, H), as a view."""
    log_decay = decays_or_none(log_decay, x)
    return log_decay.expand(1, x.shape[1], -1) if log_decay.dim() == 1 else log_decay


def state_bwd(
    q: Tensor,
    do: Tensor,
    outputs: LionOutputs,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    gate: Gate = "leave",
) -> LionState:
    """The cotangents of a row's incoming states that come from the row's own outputs, (B, H, K, W) each.

    The whole cotangent is the result + D ⊙ the cotangent of the state that leaves, with the D of ``state_fwd``. A
    caller whose row begins with a new document takes 0 for the prefix.

    Args:
        outputs: the outputs of ``out_fwd``.
    """
    with torch.autocast(q.device.type, enabled=False):
        sums = sums_of(_by_token(log_decay, q), gate)
        kept, _ = _kept(cu_seqlens, q, writes=False)
        scale, last = cotangents_of(do, outputs)
        values = do if scale is None else do.to(scale.dtype) * scale[..., None]
        return _weighted_outers(q, values, last, read_weights(sums), kept)


def _or_zeros(state: LionState | None, q: Tensor, v: Tensor, *, normalize: bool) -> LionState:
    """Copies of the states, in the states' dtype, or zeros."""
    dtype = state_dtype(q.dtype)
    if state is not None:
        return LionState(*(x.to(dtype, copy=True) for x in state))
    shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3] + normalize)
    return LionState(*(torch.zeros(shape, dtype=dtype, device=q.device) for _ in range(2)))


def _scan(
    batches: list[LionBatch], shares: list[Tensor], prefix: Tensor, suffix: Tensor, *, transposed: bool = False
) -> LionState:
    """Pass two states through all chunks, from both ends of the rows; see ``LionBatch.scan_``.

    When ``transposed`` they are cotangents: the one that goes to the right belongs to the suffix, the second side.
    """
    for batch, of_batch in zip(batches, shares, strict=True):
        prefix = batch.scan_(of_batch, prefix, side=int(transposed), reverse=False)
    for batch, of_batch in zip(reversed(batches), reversed(shares), strict=True):
        suffix = batch.scan_(of_batch, suffix, side=int(not transposed), reverse=True)
    return LionState(prefix, suffix)


@without_autocast
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
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[LionOutputs, LionState]:
    """The outputs of a row that the states of both sides enter, and the states that leave it on the other sides.

    Args:
        state: (B, H, K, W) each, zero when None; only the row's first document reads the prefix, only its last one the
            suffix.
        normalize: whether to divide by the sums of the scores.
        eps: added once to each sum.
    """
    dtype = state_dtype(q.dtype)
    decays = decays_or_none(log_decay, q)
    batches = list(chunk_batches(v, q.shape[3], decays, gate, cu_seqlens, chunk_size))
    shares = [_writes(batch, k, v, dtype, normalize=normalize) for batch in batches]
    leaving = _scan(batches, shares, *_or_zeros(state, q, v, normalize=normalize))
    o = v.new_empty(v.shape)
    normalizer = q.new_empty(v.shape[:3], dtype=dtype) if normalize else None
    for batch, states in zip(batches, shares, strict=True):
        q_g, k_g, v_g = batch.load(q, dtype), batch.load(k, dtype), batch.load(v, dtype, last=_last(normalize))
        Y = batch.decay_(q_g @ k_g.mT) @ v_g
        Y += batch.through_states(q_g, states, batch.decays.reads, writes=False)
        if normalizer is None:
            batch.store(o, Y)
            continue
        below = Y[..., -1:] + eps
        batch.store(normalizer, below[..., 0])
        # The sum is 0 without writes, as in a row of padding.
        batch.store(o, torch.where(below == 0, 0.0, Y[..., :-1] / torch.where(below == 0, 1.0, below)))
    return LionOutputs(o, normalizer), leaving


def _writes(batch: LionBatch, k: Tensor, v: Tensor, dtype: torch.dtype, *, normalize: bool) -> Tensor:
    v_g = batch.load(v, dtype, last=_last(normalize))
    return batch.shares(batch.load(k, dtype), v_g, batch.decays.writes, writes=True)


class LionGradients(NamedTuple):
    """Gradients of a row's inputs, each of its input's shape."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    """None unless requested; for decays per head (H,) the caller sums it over ranks."""
    state: LionState
    """Gradients of the entering states: the result of ``state_bwd`` + D ⊙ the cotangents of the leaving states."""


@without_autocast
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
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> LionGradients:
    """The gradients of a row's q, k, v, of its incoming states and, on request, of log_decay.

    Args:
        outputs: the outputs of ``out_fwd``, with the normaliser if there is one.
        state: the states (B, H, K, W) that entered the row; zero when None.
        dstate: the cotangents (B, H, K, W) of the states that left it, or a function that waits for them; zero when
            None.
        with_decay: compute dlog_decay.
    """
    dtype, normalize = state_dtype(q.dtype), outputs.normalizer is not None
    decays = decays_or_none(log_decay, q)
    batches = list(chunk_batches(v, q.shape[3], decays, gate, cu_seqlens, chunk_size))
    of_sums = cotangents_of(do, outputs)
    states = [_writes(batch, k, v, dtype, normalize=normalize) for batch in batches]
    _scan(batches, states, *_or_zeros(state, q, v, normalize=normalize))
    # A read of a state is a write to its cotangent: the same scans, each in the other direction.
    dstates = []
    for batch in batches:
        dY_g = _load_cotangents(batch, do, of_sums, dtype)
        dstates.append(batch.shares(batch.load(q, dtype), dY_g, batch.decays.reads, writes=False))
    of_leaving = _or_zeros(arrived(dstate), q, v, normalize=normalize)
    of_suffix, of_prefix = _scan(batches, dstates, of_leaving.suffix, of_leaving.prefix, transposed=True)

    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    dlog_decay = torch.zeros(decays.shape, dtype=dtype, device=q.device) if with_decay else None
    for batch, states_g, dstates_g in zip(batches, states, dstates, strict=True):
        q_g, k_g, v_g = batch.load(q, dtype), batch.load(k, dtype), batch.load(v, dtype, last=_last(normalize))
        dY_g = _load_cotangents(batch, do, of_sums, dtype)
        scores = batch.decay_(q_g @ k_g.mT)
        dscores = dY_g @ v_g.mT
        read = batch.through_transposed(dY_g, states_g, batch.decays.reads, writes=False)
        written = batch.through_transposed(v_g, dstates_g, batch.decays.writes, writes=True)
        if dlog_decay is not None:
            of_batch = decay_gradient(
                scores * dscores,
                torch.linalg.vecdot(q_g.unsqueeze(-3), read),
                torch.linalg.vecdot(k_g.unsqueeze(-3), written),
                gate,
            ) + batch.passing(states_g, dstates_g)
            if dlog_decay.dim() == 1:
                dlog_decay += of_batch.sum((0, 1, 3), dtype=torch.float64).to(dtype)
            else:
                batch.store(dlog_decay, of_batch)
        batch.decay_(dscores)
        batch.store(dq, read.sum(-3).add_(dscores @ k_g))
        batch.store(dk, written.sum(-3).add_(dscores.mT @ q_g))
        dv_g = batch.through_states(k_g, dstates_g, batch.decays.writes, writes=True).add_(scores.mT @ dY_g)
        batch.store(dv, dv_g[..., : v.shape[3]])
    return LionGradients(dq, dk, dv, dlog_decay, LionState(of_prefix, of_suffix))


def decay_gradient(pairs: Tensor, reads: Tensor, writes: Tensor, gate: Gate) -> Tensor:
    """The part (…, L) of dlog_decay by the reads and writes in a chunk: the gate of token t decays all that cross t.

    Each pair is added once: most of a difference of sums over tokens would cancel.

    Args:
        pairs: (…, L, L), a pair's decayed score times the cotangent of the score.
        reads: (…, 2, L), q · dq by the states of each side.
        writes: (…, 2, L), k · dk by their cotangents.
        gate: as in ``lion``.
    """
    leaves = gate == "leave"
    # From left tokens to right ones, with the reads of the prefix: a sum over j ≤ t, then over i > t.
    to_the_right = pairs.cumsum(-1).tril_(-1).sum(-2)
    # Then from right ones to left ones.
    to_the_left = pairs.cumsum(-2).triu_(1).sum(-1)
    # A token lies before its own gate, or behind it, and so belongs to the sums of the next token's gate.
    to_the_right, to_the_left = _shifted(to_the_right, not leaves), _shifted(to_the_left, leaves)
    to_the_right += _behind(reads[..., 0, :], not leaves)
    to_the_left += _behind(writes[..., 1, :], leaves)
    return to_the_right + to_the_left + _upto(writes[..., 0, :], not leaves) + _upto(reads[..., 1, :], leaves)


# No products with a matrix of zeros and ones: an overflow in one document would reach others as NaN.


def _shifted(sums: Tensor, exclusive: bool) -> Tensor:
    """``sums`` (…, L), or at each token those of the one before it."""
    return torch.nn.functional.pad(sums, (1, -1)) if exclusive else sums


def _upto(x: Tensor, exclusive: bool) -> Tensor:
    """The sums of x (…, L) through each token, or before it."""
    return _shifted(x.cumsum(-1), exclusive)


def _behind(x: Tensor, inclusive: bool) -> Tensor:
    """The sums of x (…, L) behind each token, or from it on."""
    sums = x.flip(-1).cumsum(-1).flip(-1)
    return sums if inclusive else torch.nn.functional.pad(sums, (-1, 1))


class ChunkedLion(torch.autograd.Function):
    """``out_fwd`` and ``grad_bwd`` as one differentiable call; inputs, outputs and normalisers are saved."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(o, prefix, suffix) of q, k, v, log_decay, prefix, suffix, cu_seqlens, gate, normalize, eps, chunk_size.

        See ``out_fwd``.
        """
        *tensors, ctx.gate, normalize, eps, ctx.chunk_size = inputs
        q, k, v, log_decay, prefix, suffix, cu_seqlens = tensors
        state = None if prefix is None or suffix is None else LionState(prefix, suffix)
        options = {"gate": ctx.gate, "normalize": normalize, "eps": eps, "chunk_size": ctx.chunk_size}
        outputs, leaving = out_fwd(q, k, v, log_decay, state, cu_seqlens, **options)
        ctx.save_for_backward(*tensors, *outputs)
        ctx.set_materialize_grads(False)
        return outputs.o, *leaving

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, do: Tensor | None, dprefix: Tensor | None, dsuffix: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The gradients of ``forward``'s arguments; the cotangent of an unused result is None."""
        q, k, v, log_decay, prefix, suffix, cu_seqlens, o, normalizer = ctx.saved_tensors
        entered = None if prefix is None else LionState(prefix, suffix)
        outputs = LionOutputs(o, normalizer)
        zeros = _or_zeros(None, q, v, normalize=normalizer is not None)
        dstate = LionState(*(zero if x is None else x for x, zero in zip((dprefix, dsuffix), zeros, strict=True)))
        gradients = grad_bwd(
            q,
            k,
            v,
            log_decay,
            torch.zeros_like(v) if do is None else do,
            outputs,
            entered,
            dstate,
            cu_seqlens,
            gate=ctx.gate,
            with_decay=ctx.needs_input_grad[3],
            chunk_size=ctx.chunk_size,
        )
        dlog_decay = None if gradients.log_decay is None else gradients.log_decay.to(log_decay.dtype)
        of_states = [
            x if needed else None for x, needed in zip(gradients.state, ctx.needs_input_grad[4:6], strict=True)
        ]
        return gradients.q, gradients.k, gradients.v, dlog_decay, *of_states, *[None] * 5
