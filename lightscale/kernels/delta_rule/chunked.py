"""The gated delta rule in chunks with a hand-written backward, in the passes that sequence parallelism needs.

The mathematics, with the derivation of the backward and the counts of FLOPs and bytes, is in
docs/reference/operators/delta-rule.md. Names of shapes: B rows, T tokens, H heads of queries and keys, N heads of
values, K key width, V value width, L tokens of a chunk. Inside, everything is fp32, or fp64 for fp64 inputs; outputs
and gradients have the dtype of their inputs.

Chunks, their masks and their decays are those of gated linear attention (``../gla``); here writes also depend on the
state. A decay per head is computed as one decay for its K channels.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.kernels.common.states import Arriving, arrived, state_dtype, without_autocast, without_state
from lightscale.kernels.gla.chunk_batches import GLAChunkBatch, chunk_batches
from lightscale.kernels.gla.decays import GLADecays

# Tokens of a chunk. The limit is gated linear attention's; the triangular inverse grows with the chunk too.
DEFAULT_CHUNK_SIZE = 16


class DeltaRuleGradients(NamedTuple):
    """Gradients of a row's inputs, each of its input's shape and dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A row's inputs, with one head of queries, keys and decays for each head of values."""

    k: Tensor  # (B, T, N, K)
    log_decay: Tensor  # (B, T, N, K)
    beta: Tensor  # (B, T, N, 1)
    batches: list[GLAChunkBatch]

    @classmethod
    def of(
        cls, k: Tensor, log_decay: Tensor | None, beta: Tensor, width: int, cu_seqlens: Tensor | None, chunk_size: int
    ) -> "_Row":
        """The row, with batches for values of ``width`` columns."""
        k = of_value_heads(k, beta.shape[2])
        # Only its shape is read, for the sizes of batches.
        sizes = k[..., :1].expand(*k.shape[:3], width)
        decays = torch.zeros_like(beta, dtype=state_dtype(k.dtype)) if log_decay is None else log_decay
        if decays.dim() == 3:
            decays = decays.unsqueeze(-1).expand(k.shape)
        return cls(
            k=k, log_decay=decays, beta=beta.unsqueeze(-1), batches=chunk_batches(k, sizes, cu_seqlens, chunk_size)
        )

    def state(self, width: int, state: Tensor | None) -> Tensor:
        """A copy of ``state`` (B, N, K, width), or zeros."""
        dtype = state_dtype(self.k.dtype)
        if state is not None:
            return state.to(dtype, copy=True)
        return torch.zeros(self.k.shape[0], *self.k.shape[2:], width, dtype=dtype, device=self.k.device)


@dataclass(frozen=True, kw_only=True)
class _Chunks:
    """The chunks' matrices that do not depend on values and states: (G, B, N, L, …)."""

    batch: GLAChunkBatch
    decays: GLADecays
    k: Tensor  # (…, K)
    beta: Tensor  # (…, 1)
    k_in: Tensor  # k ⊙ upto
    k_back: Tensor  # k / upto
    k_out: Tensor  # k ⊙ after, of the tokens whose document leaves the chunk
    products: Tensor  # (…, L): k_i (decay from j to i) k_j, j < i in one document
    inverse: Tensor  # (…, L): (I + β ⊙ products)⁻¹
    returned: Tensor  # (…, K): W, the dependence of written values on the entering state

    @classmethod
    def of(cls, batch: GLAChunkBatch, row: _Row) -> "_Chunks":
        decays = batch.decays(row.log_decay)
        k, beta = batch.load(row.k), batch.load(row.beta)
        k_in, k_back = k * decays.upto, k / decays.upto
        products = batch.causal_(decays.scores(k, k, k_in, k_back), -1)
        # fp32 or wider: with β up to 2 and repeated keys, the entries of the inverse do not decay.
        unit = torch.eye(batch.chunk_tokens, dtype=k.dtype, device=k.device)
        inverse = torch.linalg.solve_triangular(
            beta * products + unit, unit.expand_as(products), upper=False, unitriangular=True
        )
        return cls(
            batch=batch,
            decays=decays,
            k=k,
            beta=beta,
            k_in=k_in,
            k_back=k_back,
            k_out=batch.outgoing_(k * decays.after),
            products=products,
            inverse=inverse,
            returned=inverse @ batch.incoming_(beta * k_in),
        )

    def scan(self, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The writes for values v (G, B, N, L, V), and the states (G + 1, B, N, K, V), from the entering state."""
        written = self.inverse @ (self.beta * v)
        states = state.new_empty(self.batch.num_chunks + 1, *state.shape)
        states[0] = state
        for chunk in range(self.batch.num_chunks):
            read = self.returned[chunk] @ states[chunk]
            if self.batch.masks is not None:
                read.masked_fill_(~self.batch.masks.incoming[chunk], 0.0)
            written[chunk] -= read
            leaving = written[chunk]
            if self.batch.masks is not None:
                leaving = leaving.masked_fill(~self.batch.masks.outgoing[chunk], 0.0)
            states[chunk + 1] = self._passed(states[chunk], chunk) + self.k_out[chunk].mT @ leaving
        return written, states

    def scan_back(self, dwritten: Tensor, reads: Tensor, dstate: Tensor) -> Tensor:
        """Cotangents (G + 1, B, N, K, V) of the states of ``scan``, from the cotangent of the batch's leaving state.

        Completes ``dwritten`` (G, B, N, L, V), the writes' cotangents by the outputs of their chunk, in place.
        ``reads`` (G, B, N, K, V): cotangents of the states that enter the chunks, by the outputs.
        """
        dstates = dstate.new_empty(self.batch.num_chunks + 1, *dstate.shape)
        dstates[-1] = dstate
        for chunk in reversed(range(self.batch.num_chunks)):
            dwritten[chunk] += self.k_out[chunk] @ dstates[chunk + 1]
            own = reads[chunk] - self.returned[chunk].mT @ dwritten[chunk]
            dstates[chunk] = self._passed(dstates[chunk + 1], chunk) + own
        return dstates

    def _passed(self, state: Tensor, chunk: int) -> Tensor:
        passed = state * self.decays.through[chunk]
        # Selected, not multiplied: an overflow in one document must give no NaN in the next.
        return passed if self.batch.masks is None else passed.masked_fill_(~self.batch.masks.through[chunk], 0.0)


def of_value_heads(x: Tensor, num_heads: int) -> Tensor:
    """x (B, T, H, K) for N heads of values: each head repeated for its N / H heads of values."""
    return x if x.shape[2] == num_heads else x.repeat_interleave(num_heads // x.shape[2], dim=2)


def of_key_heads(gradient: Tensor, num_heads: int) -> Tensor:
    """The gradient (B, T, H, K) of x, from the gradient (B, T, N, K) of the result of ``of_value_heads``."""
    return gradient if gradient.shape[2] == num_heads else gradient.unflatten(2, (num_heads, -1)).sum(3)


@torch.no_grad()
@without_autocast
def state_fwd(
    k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The summary of a row for the ranks behind it: S_out = M S_in + S_loc.

    Args:
        k: keys (B, T, H, K); T may be 0.
        v: values (B, T, N, V).
        log_decay: (B, T, N), (B, T, N, K) or None.
        beta: (B, T, N).
        cu_seqlens: (M+1,) or None. A caller whose row begins with a new document takes M as 0.

    Returns:
        S_loc (B, N, K, V), the row's outgoing state from a zero incoming state. M (B, N, K, K), the product of the
        tokens' transitions of a state, or 0 where a document begins inside the row.
    """
    width, key_width = v.shape[3], k.shape[3]
    row = _Row.of(k, log_decay, beta, width + key_width, cu_seqlens, DEFAULT_CHUNK_SIZE)
    # The row, without values, maps the identity to M: its columns pass beside the state's columns.
    state = row.state(width + key_width, None)
    state[..., width:] = torch.eye(key_width, dtype=state.dtype, device=state.device)
    for batch in row.batches:
        chunks = _Chunks.of(batch, row)
        values = torch.nn.functional.pad(batch.load(v), (0, key_width))
        state = chunks.scan(values, state)[1][-1]
    return state[..., :width].contiguous(), state[..., width:].contiguous()


@torch.no_grad()
@without_autocast
def out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    S_in: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """The outputs o (B, T, N, V) of a row that S_in (B, N, K, V) enters, and the state that leaves it.

    Args:
        q: queries (B, T, H, K); T may be 0.
        k: keys (B, T, H, K).
        v: values (B, T, N, V).
        log_decay: (B, T, N), (B, T, N, K) or None.
        beta: (B, T, N).
        S_in: zero when None; only the row's first document reads it.
        cu_seqlens: (M+1,) or None.
        chunk_size: tokens of a chunk.
    """
    row = _Row.of(k, log_decay, beta, v.shape[3], cu_seqlens, chunk_size)
    q = of_value_heads(q, v.shape[2])
    state = row.state(v.shape[3], S_in)
    o = v.new_empty(v.shape)
    for batch in row.batches:
        chunks = _Chunks.of(batch, row)
        q_g = batch.load(q)
        q_in = q_g * chunks.decays.upto
        scores = batch.causal_(chunks.decays.scores(q_g, chunks.k, q_in, chunks.k_back))
        written, states = chunks.scan(batch.load(v), state)
        batch.store(o, (scores @ written).add_(batch.incoming_(q_in @ states[:-1])))
        # A clone, because a view would keep the states of the whole batch in memory.
        state = states[-1].clone()
    return o, state


@torch.no_grad()
@without_autocast
def state_bwd(
    q: Tensor, k: Tensor, do: Tensor, log_decay: Tensor | None, beta: Tensor, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The cotangent (B, N, K, V) of a row's incoming state that comes from the row's own outputs.

    The whole cotangent is the result + Mᵀ dS_end with the M of ``state_fwd``. Only the first document reads the
    incoming state; a caller whose row begins with a new document takes 0.

    Args:
        q: queries (B, T, H, K); T may be 0.
        k: keys (B, T, H, K).
        do: cotangents of the outputs (B, T, N, V).
        log_decay: (B, T, N), (B, T, N, K) or None.
        beta: (B, T, N).
        cu_seqlens: (M+1,) or None.
    """
    row = _Row.of(k, log_decay, beta, do.shape[3], cu_seqlens, DEFAULT_CHUNK_SIZE)
    q = of_value_heads(q, do.shape[2])
    dstate = row.state(do.shape[3], None)
    for batch in reversed(row.batches):
        chunks = _Chunks.of(batch, row)
        q_g, do_g = batch.load(q), batch.load(do)
        q_in = q_g * chunks.decays.upto
        scores = batch.causal_(chunks.decays.scores(q_g, chunks.k, q_in, chunks.k_back))
        reads = batch.incoming_(q_in).mT @ do_g
        dstate = chunks.scan_back(scores.mT @ do_g, reads, dstate)[0].clone()
    return dstate


class _BatchGradients(NamedTuple):
    """Gradients of a batch's inputs (G, B, N, L, width)."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    state: Tensor  # (B, N, K, V)


def _batch_gradients(
    chunks: _Chunks, row: _Row, q: Tensor, v: Tensor, do: Tensor, state: Tensor, dstate: Tensor
) -> _BatchGradients:
    """The gradients from the batch's q, v, do, the entering state, and the leaving state's cotangent."""
    batch, decays, k, beta = chunks.batch, chunks.decays, chunks.k, chunks.beta
    q_in = q * decays.upto
    scores = batch.causal_(decays.scores(q, k, q_in, chunks.k_back))
    written, states = chunks.scan(v.clone(), state)
    dscores = do @ written.mT
    # A token reads its own write undecayed: the diagonal is added to dq and dk at the end, and is no part of
    # dlog_decay.
    own = dscores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).clone()
    batch.causal_(dscores, -1)
    dwritten = scores.mT @ do
    reads = batch.incoming_(q_in.clone()).mT @ do
    dstates = chunks.scan_back(dwritten, reads, dstate)

    # written = inverse β (v - k_in S), with the inverse of I + β ⊙ products.
    dvalues = chunks.inverse.mT @ dwritten
    returned = batch.incoming_(chunks.k_in @ states[:-1])
    dproducts = batch.causal_(dvalues @ written.mT, -1).neg_()
    dbeta = (dvalues * (v - returned)).sum(-1, keepdim=True)
    dbeta += (dproducts * chunks.products).sum(-1, keepdim=True)
    dv = dvalues.mul_(beta)
    dproducts.mul_(beta)

    dq = decays.query_gradient(dscores, k, chunks.k_back)
    dk_read = decays.query_gradient(dproducts, k, chunks.k_back)
    dk_written = decays.key_gradient(dscores, q, q_in)
    dk_written += decays.key_gradient(dproducts, k, chunks.k_in)
    entering = states[:-1].mT
    dq.addcmul_(batch.incoming_(do @ entering), decays.upto)
    dk_read.addcmul_(batch.incoming_(dv @ entering), decays.upto, value=-1)
    dk_leaving = batch.outgoing_(written @ dstates[1:].mT).mul_(decays.after)
    # As in gated linear attention, with two readers, the query and the key, of one key.
    inside = (q * dq).addcmul_(k, dk_read).addcmul_(k, dk_written, value=-1)
    dk = dk_read.add_(dk_written).add_(dk_leaving)
    dlog_decay = batch.decay_gradient(inside, dk_leaving.mul_(k), decays.through, states[:-1], dstates[1:])
    # Only a chunk with a decay that underflows can be one of these; no state passes through it.
    if decays.steep is not None:
        dlog_decay.masked_fill_(batch.load(row.log_decay).exp_() == 0, 0.0)
    return _BatchGradients(dq.addcmul_(own, k), dk.addcmul_(own, q), dv, dlog_decay, dbeta, dstates[0].clone())


@torch.no_grad()
@without_autocast
def row_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    do: Tensor,
    S_in: Tensor | None,
    dS_end: Arriving[Tensor | None],
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[DeltaRuleGradients, Tensor]:
    """The gradients of a row's inputs and incoming state.

    Args:
        do: cotangents of the outputs (B, T, N, V).
        S_in: the state (B, N, K, V) that entered the row; zero when None.
        dS_end: the cotangent (B, N, K, V) of the state that left it, or a function that waits for it; zero when None.

    """
    row = _Row.of(k, log_decay, beta, v.shape[3], cu_seqlens, chunk_size)
    queries = of_value_heads(q, v.shape[2])
    # Forward once more for the states that enter the batches: one per batch, without those between chunks.
    state = row.state(v.shape[3], S_in)
    entering = []
    for batch in row.batches:
        entering.append(state)
        state = _Chunks.of(batch, row).scan(batch.load(v), state)[1][-1].clone()
    dq, dk = (torch.empty(row.k.shape, dtype=q.dtype, device=q.device) for _ in range(2))
    dv, dbeta = torch.empty_like(v), torch.empty(row.beta.shape, dtype=beta.dtype, device=beta.device)
    dlog_decay = None if log_decay is None else torch.empty(row.k.shape, dtype=log_decay.dtype, device=q.device)
    dstate = row.state(v.shape[3], arrived(dS_end))
    for batch, state in zip(reversed(row.batches), reversed(entering), strict=True):
        chunks = _Chunks.of(batch, row)
        found = _batch_gradients(chunks, row, batch.load(queries), batch.load(v), batch.load(do), state, dstate)
        for out, gradient in ((dq, found.q), (dk, found.k), (dv, found.v), (dbeta, found.beta)):
            batch.store(out, gradient)
        if dlog_decay is not None:
            batch.store(dlog_decay, found.log_decay)
        dstate = found.state
    if dlog_decay is not None and log_decay is not None and log_decay.dim() == 3:
        dlog_decay = dlog_decay.sum(-1)
    num_heads = q.shape[2]
    dq, dk = (of_key_heads(x, num_heads) for x in (dq, dk))
    return DeltaRuleGradients(dq, dk, dv, dlog_decay, dbeta.squeeze(-1)), dstate


grad_bwd = without_state(row_gradients)


@without_autocast
def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: q, k (B, H, K), v (B, N, V), log_decay (B, N), (B, N, K) or None, beta (B, N), S (B, N, K, V)
    → o (B, N, V) and the next state.

    The state is read and written once, at any position. Autograd differentiates the step.
    """
    dtype, groups = state_dtype(q.dtype), v.shape[1] // q.shape[1]
    q, k = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (q, k))
    if log_decay is not None:
        decay = log_decay.to(dtype).exp()
        S = decay.view(*decay.shape, *[1] * (4 - decay.dim())) * S
    written = beta.to(dtype).unsqueeze(-1) * (v.to(dtype) - (k.unsqueeze(-2) @ S).squeeze(-2))
    S = S + k.unsqueeze(-1) * written.unsqueeze(-2)
    return (q.unsqueeze(-2) @ S).squeeze(-2).to(v.dtype), S


class ChunkedDeltaRule(torch.autograd.Function):
    """``out_fwd`` and ``row_gradients`` as one differentiable call; only the inputs are saved."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """(o, final state) of q, k, v, log_decay, beta, initial_state, cu_seqlens, chunk_size; see ``out_fwd``."""
        *tensors, ctx.chunk_size = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return out_fwd(*tensors, chunk_size=ctx.chunk_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of ``forward``'s arguments; the cotangent of an unused result is None."""
        q, k, v, log_decay, beta, initial_state, cu_seqlens = ctx.saved_tensors
        gradients, dS_in = row_gradients(
            q,
            k,
            v,
            log_decay,
            beta,
            torch.zeros_like(v) if do is None else do,
            initial_state,
            dstate,
            cu_seqlens,
            chunk_size=ctx.chunk_size,
        )
        return *gradients, dS_in if ctx.needs_input_grad[5] else None, None, None
