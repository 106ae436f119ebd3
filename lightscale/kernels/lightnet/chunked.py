"""LightNet's operator in chunks with a hand-written backward, in the passes that sequence parallelism needs.

The mathematics, with the derivation of the backward, is in docs/reference/operators/lightnet.md. Names of shapes: B
rows, T tokens, H heads, K key width, V value width, R rows of the state: K, or 2K with angles. Inside, everything is
fp32, or fp64 for fp64 inputs; outputs and gradients have the dtype of their inputs.

Arguments of all passes: queries q and log-keys k (B, T, H, K), values v and cotangents do of the outputs (B, T, H, V).
angles have theta (H, K) and positions (B, T), or are None. T may be 0. cu_seqlens (N+1,) are the boundaries of
documents, or None. chunk_size is the number of tokens of a chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.kernels.common.angles import Angles, Phases, angles_of, features, phases_at, phases_of, theta_gradient
from lightscale.kernels.common.chunks import Chunks
from lightscale.kernels.common.documents import numbers_or_none
from lightscale.kernels.common.states import Arriving, arrived, kept_states, state_dtype, without_state
from lightscale.kernels.lightnet.factors import LightNetChunkBatch, chunk_batches, weigh
from lightscale.kernels.lightnet.initial_z import initial_z_gradient
from lightscale.kernels.lightnet.state import (
    LightNetState,
    StateCotangent,
    by_row,
    empty_state,
    exchanged_cotangent,
    merge,
    plain_cotangent,
)

# Tokens of a chunk; chunks in which z rises too far are halved (``factors.py``).
DEFAULT_CHUNK_SIZE = 64


def rotate(x: Tensor, phases: Phases | None) -> Tensor:
    """φ(x): [x cos, x sin] (*, 2K), or x (*, K) itself without phases; no gradients, unlike ``features``."""
    if phases is None:
        return x
    width = x.shape[-1]
    rotated = x.new_empty(*x.shape[:-1], 2 * width)
    # In place: two products and their concatenation would pass over memory twice.
    for half, phase in zip(rotated.split(width, dim=-1), phases, strict=True):
        torch.mul(x, phase, out=half)
    return rotated


def rotate_back(x: Tensor, phases: Phases | None) -> Tensor:
    """The adjoint of ``rotate``."""
    if phases is None:
        return x
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(first * phases[0], second, phases[1])


def turning(x: Tensor, dfeatures: Tensor, phases: Phases) -> Tensor:
    """The gradient (*, K) of each angle, from the gradient of φ(x): x ⊙ (cos ⊙ d sin half - sin ⊙ d cos half)."""
    first, second = dfeatures.chunk(2, dim=-1)
    return x * torch.addcmul(second * phases[0], first, phases[1], value=-1)


class BatchStart(NamedTuple):
    """The chunks of a batch, and the state that enters them."""

    cut: Chunks
    z: Tensor  # (B, H, K), fp64
    S: Tensor  # (B, H, R, V), 0 where z is -inf


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The keys and values of a row, and the scan over them that all passes share."""

    k: Tensor
    v: Tensor
    angles: Angles | None
    documents: Tensor | None
    chunk_size: int

    @property
    def dtype(self) -> torch.dtype:
        return state_dtype(self.k.dtype)

    @property
    def state_rows(self) -> int:
        return self.k.shape[3] * (1 if self.angles is None else 2)

    def entering(self, state: LightNetState | None) -> LightNetState:
        """The state that enters the row, with S = 0 where the state is empty."""
        if state is None:
            num_rows, _, num_heads, key_width = self.k.shape
            sizes = (num_rows, num_heads, key_width, self.state_rows, self.v.shape[3])
            return empty_state(*sizes, dtype=self.dtype, device=self.k.device)
        # Selected: where z is -inf, S may hold any value.
        z, S = state.z.to(self.dtype), state.S.to(self.dtype)
        return LightNetState(z, S.masked_fill(by_row(z == -torch.inf, self.state_rows), 0.0))

    def walk(self, z: Tensor) -> Iterator[LightNetChunkBatch]:
        """The chunk batches from left to right, behind a state with ``z``."""
        width = max(self.state_rows, self.v.shape[3])
        return chunk_batches(self.k, z, self.documents, width=width, chunk_size=self.chunk_size, dtype=self.dtype)

    def batch_at(self, start: BatchStart) -> LightNetChunkBatch:
        """The batch of ``walk`` that begins at ``start``."""
        batch = weigh(start.cut, self.k, start.z, self.documents, self.dtype)
        assert batch is not None, "a batch of walk"
        return batch

    def load(self, batch: LightNetChunkBatch, x: Tensor) -> Tensor:
        return batch.cut.copied(x, self.dtype)

    def load_phases(self, batch: LightNetChunkBatch) -> Phases | None:
        """cos and sin (B, G, H, L, K) each."""
        if self.angles is None:
            return None
        positions, theta = batch.cut.tokens(self.angles.positions), self.angles.theta
        if theta.dim() == 2:
            return phases_at(positions[:, :, None, :, None], theta[:, None], self.dtype)
        along = positions.movedim(-1, 2)[:, :, :, None, :, None]
        cos, sin = phases_at(along, theta[:, :, None], self.dtype)
        return cos.flatten(2, 3), sin.flatten(2, 3)

    def angle_gradient(self, batch: LightNetChunkBatch, of_angles: Tensor) -> Tensor:
        """dtheta, fp64, by the gradients (B, G, H, L, K) of the angles of these tokens."""
        assert self.angles is not None
        here = Angles(self.angles.theta, batch.cut.tokens(self.angles.positions))
        return theta_gradient(here, of_angles.transpose(2, 3))

    def scan_states(self, batch: LightNetChunkBatch, keys: Tensor, v: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        """The states (B, G, H, R, V) that enter the chunks, in units of their references, and the state that leaves."""
        return batch.scan(batch.outgoing(keys).mT @ v, S)


def _row(k: Tensor, v: Tensor, angles: Angles | None, cu_seqlens: Tensor | None, chunk_size: int) -> _Row:
    documents = numbers_or_none(cu_seqlens, k)
    return _Row(k=k, v=v, angles=angles, documents=documents, chunk_size=chunk_size)


@torch.no_grad()
def state_fwd(
    k: Tensor,
    v: Tensor,
    angles: Angles | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[LightNetState, Tensor]:
    """The summary of a row for the ranks behind it: ``merge(entering, local, through)`` is the state that leaves.

    Args:
        cu_seqlens: (N+1,) or None. A caller whose row begins with a new document takes ``through`` as 0.

    Returns:
        The row's outgoing state (z_loc, S_loc) from an empty one, and ``through`` (B,) in the states' dtype: 1,
        or 0 where a document begins inside the row.
    """
    with torch.autocast(k.device.type, enabled=False):
        row = _row(k, v, angles, cu_seqlens, chunk_size)
        z, S = row.entering(None)
        for batch in row.walk(z):
            _, S = row.scan_states(batch, rotate(batch.writes, row.load_phases(batch)), row.load(batch, v), S)
            z = batch.z_end
        through = torch.ones(k.shape[0], dtype=row.dtype, device=k.device)
        if row.documents is not None:
            through.masked_fill_((row.documents[:, -1:] > 0).any(1), 0.0)
        return LightNetState(z.to(row.dtype), S), through


@torch.no_grad()
def out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    state_in: LightNetState | None,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    starts: list[BatchStart] | None = None,
) -> tuple[Tensor, LightNetState]:
    """The outputs o (B, T, H, V) of a row that ``state_in`` enters, and the state that leaves it.

    Args:
        state_in: z (B, H, K) and S (B, H, R, V), empty when None; only the row's first document reads it.
        starts: receives the start of each batch, for ``row_gradients``.
    """
    with torch.autocast(q.device.type, enabled=False):
        row = _row(k, v, angles, cu_seqlens, chunk_size)
        z, S = row.entering(state_in)
        o = v.new_empty(v.shape)
        for batch in row.walk(z):
            if starts is not None:
                starts.append(BatchStart(batch.cut, batch.z_start, S))
            phases_g, v_g = row.load_phases(batch), row.load(batch, v)
            queries = rotate(row.load(batch, q).mul_(batch.reads), phases_g)
            keys = rotate(batch.writes, phases_g)
            o_g = batch.causal_(queries @ keys.mT) @ v_g
            states, S = row.scan_states(batch, keys, v_g, S)
            batch.add_incoming_(o_g, queries, states)
            batch.cut.store(o, o_g)
            z = batch.z_end
        return o, LightNetState(z.to(row.dtype), S)


class _Reads(NamedTuple):
    """Intermediate results of a batch's queries in the backward pass."""

    queries: Tensor  # (B, G, H, L, R): φ(q e^{r - z})
    dscores: Tensor  # (B, G, H, L, L)
    dqueries: Tensor  # (B, G, H, L, R)
    dq: Tensor  # (B, G, H, L, K)
    losses: Tensor  # (B, G, H, L, K): q ⊙ dq e^{r - z}, minus the cotangent of z_t in the chunk's units


class _Loaded(NamedTuple):
    """Inputs of a batch in the backward pass, and the states that enter its chunks."""

    q: Tensor  # (B, G, H, L, K)
    v: Tensor  # (B, G, H, L, V)
    do: Tensor  # (B, G, H, L, V)
    phases: Phases | None
    keys: Tensor  # (B, G, H, L, R): φ(e^{k - r})
    states: Tensor  # (B, G, H, R, V), in units of their references


def _loaded(row: _Row, batch: LightNetChunkBatch, q: Tensor, do: Tensor, S: Tensor) -> _Loaded:
    phases = row.load_phases(batch)
    q_g, v_g, do_g = (row.load(batch, x) for x in (q, row.v, do))
    keys = rotate(batch.writes, phases)
    # What a single chunk writes is read by none of its own tokens.
    states = batch.entered(S) if batch.cut.num_chunks == 1 else row.scan_states(batch, keys, v_g, S)[0]
    return _Loaded(q_g, v_g, do_g, phases, keys, states)


def _read_gradients(batch: LightNetChunkBatch, loaded: _Loaded) -> _Reads:
    q, v, do, phases, keys, states = loaded
    queries = rotate(q * batch.reads, phases)
    dscores = batch.causal_(do @ v.mT)
    dqueries = dscores @ keys
    batch.add_incoming_(dqueries, do, states.mT)
    # Outputs depend on z_t through reads_t alone, and reads ∂/∂reads = q ∂/∂q: hence ``losses`` from q ⊙ dq, without
    # the gradient of a logarithm.
    dq = rotate_back(dqueries, phases).mul_(batch.reads)
    return _Reads(queries, dscores, dqueries, dq, (q * dq).mul_(batch.reads))


def _starts(row: _Row, state: LightNetState) -> list[BatchStart]:
    """The starts of the batches of a row that ``state`` enters."""
    found, S = [], state.S
    for batch in row.walk(state.z):
        found.append(BatchStart(batch.cut, batch.z_start, S))
        keys = rotate(batch.writes, row.load_phases(batch))
        _, S = row.scan_states(batch, keys, row.load(batch, row.v), S)
    return found


def _scan_cotangents(
    batch: LightNetChunkBatch, reads: _Reads, do: Tensor, running: StateCotangent
) -> tuple[StateCotangent, StateCotangent]:
    """Cotangents of the chunks' leaving states, in units of their references, and of the batch's entering state."""
    U, U_before = batch.scan(batch.incoming(reads.queries).mT @ do, running.U, reverse=True)
    R, R_before = batch.scan(batch.incoming(reads.losses).sum(-2), running.R, reverse=True)
    return StateCotangent(U, R), StateCotangent(U_before, R_before)


@torch.no_grad()
def state_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    do: Tensor,
    state_in: LightNetState | None,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> StateCotangent:
    """The cotangent U (B, H, R, V) and R (B, H, K) of a row's incoming state, by the row's own outputs.

    The whole cotangent is the result plus the cotangent of the leaving state, scaled by ``passed_share``. A caller
    whose row begins with a new document takes 0. R needs the gradient of the queries, hence the keys, the values and
    the incoming state. Arguments are those of ``out_fwd``.
    """
    with torch.autocast(q.device.type, enabled=False):
        row = _row(k, v, angles, cu_seqlens, chunk_size)
        entering = row.entering(state_in)
        running = StateCotangent(torch.zeros_like(entering.S), torch.zeros_like(entering.z))
        for start in reversed(_starts(row, entering)):
            batch = row.batch_at(start)
            loaded = _loaded(row, batch, q, do, start.S)
            _, running = _scan_cotangents(batch, _read_gradients(batch, loaded), loaded.do, running)
        return running


class LightNetGradients(NamedTuple):
    """Gradients of a row's inputs, each of its input's shape."""

    q: Tensor
    k: Tensor
    v: Tensor
    theta: Tensor | None
    """(H, K) fp64, None unless requested; the caller sums it over ranks."""


@torch.no_grad()
def row_gradients(
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
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    starts: Sequence[BatchStart] = (),
) -> tuple[LightNetGradients, StateCotangent]:
    """The gradients of a row's q, k and v, in their dtypes, of its incoming state and, on request, of theta.

    Args:
        state_in: the state that entered the row; empty when None.
        cotangent: (dS, ρ) of the state that left it, in the exchanged form, or a function that waits for it; zero when
            None.
        with_theta: compute dtheta; needs angles.
        starts: the starts of all batches, from ``out_fwd``; without them they are computed again.
    """
    with torch.autocast(q.device.type, enabled=False):
        row = _row(k, v, angles, cu_seqlens, chunk_size)
        entering = row.entering(state_in)
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        dtheta = q.new_zeros(angles.theta.shape, dtype=torch.float64) if with_theta and angles is not None else None
        starts = starts or _starts(row, entering)
        running = arrived(cotangent) or StateCotangent(torch.zeros_like(entering.S), torch.zeros_like(entering.z))
        for start in reversed(starts):
            batch = row.batch_at(start)
            loaded = _loaded(row, batch, q, do, start.S)
            reads = _read_gradients(batch, loaded)
            q_g, v_g, do_g, phases_g, keys, _ = loaded
            leaving, running = _scan_cotangents(batch, reads, do_g, running)

            dkeys = reads.dscores.mT @ reads.queries
            batch.add_outgoing_(dkeys, v_g, leaving.U.mT)
            if dtheta is not None:
                assert phases_g is not None, "angles"
                # z does not depend on the angles: only φ does.
                of_angles = turning(q_g * batch.reads, reads.dqueries, phases_g)
                dtheta += row.angle_gradient(batch, of_angles + turning(batch.writes, dkeys, phases_g))
            # A key raises z of all later tokens of its document, and so reduces the weights of their reads.
            lost = batch.suffix_sums(reads.losses) + batch.outgoing(leaving.R.unsqueeze(-2).expand_as(q_g))
            dk_g = rotate_back(dkeys, phases_g).sub_(lost).mul_(batch.writes)

            dv_g = batch.causal_(reads.queries @ keys.mT).mT @ do_g
            batch.add_outgoing_(dv_g, keys, leaving.U)
            for out, x in ((dq, reads.dq), (dk, dk_g), (dv, dv_g)):
                batch.cut.store(out, x)
        return LightNetGradients(dq, dk, dv, dtheta), running


grad_bwd = without_state(row_gradients)


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, state: LightNetState, angles: Angles | None = None
) -> tuple[Tensor, LightNetState]:
    """One token: q, k (B, H, K), v (B, H, V), angles with positions (B,) → o (B, H, V) and the next state.

    The state is read and written once, at any position. Autograd differentiates the step.
    """
    dtype = state_dtype(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        phases = None if angles is None else phases_of(angles, dtype)
        q_wide, k_wide, v_wide = q.to(dtype), k.to(dtype), v.to(dtype)
        # The state of a single token has weight 1 in every channel.
        token = LightNetState(k_wide, features(torch.ones_like(k_wide), phases).unsqueeze(-1) * v_wide.unsqueeze(-2))
        state = merge(state, token)
        o = (features(q_wide, phases).unsqueeze(-2) @ state.S).squeeze(-2)
        return o.to(v.dtype), state


class ChunkedLightNetAttention(torch.autograd.Function):
    """``out_fwd`` and ``row_gradients`` as one call; saves inputs, the final state, and starts of batches."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(o, final z, final S) of q, k, v, theta, positions, z, S, cu_seqlens, chunk_size; see ``out_fwd``."""
        *tensors, ctx.chunk_size = inputs
        q, k, v, theta, positions, z, S, cu_seqlens = tensors
        state_in = None if z is None or S is None else LightNetState(z, S)
        starts: list[BatchStart] = []
        options: Any = {"chunk_size": ctx.chunk_size, "starts": starts}
        o, end = out_fwd(q, k, v, angles_of(theta, positions), state_in, cu_seqlens, **options)
        kept = kept_states([start.S for start in starts], v)
        ctx.cuts = [start.cut for start in starts[: len(kept)]]
        ctx.save_for_backward(*tensors, *end, *[start.z for start in starts[: len(kept)]], *kept)
        ctx.set_materialize_grads(False)
        return o, end.z, end.S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dz: Tensor | None, dS: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of ``forward``'s arguments; the cotangent of an unused result is None."""
        q, k, v, theta, positions, z, S, cu_seqlens, z_end, S_end, *kept = ctx.saved_tensors
        num_batches = len(ctx.cuts)
        starts = [BatchStart(*one) for one in zip(ctx.cuts, kept[:num_batches], kept[num_batches:], strict=True)]
        angles = angles_of(theta, positions)
        do = torch.zeros_like(v) if do is None else do
        dz = torch.zeros_like(z_end) if dz is None else dz
        dS = torch.zeros_like(S_end) if dS is None else dS
        state_in = None if z is None else LightNetState(z, S)
        with_theta = ctx.needs_input_grad[3]
        gradients, cotangent = row_gradients(
            q,
            k,
            v,
            angles,
            do,
            state_in,
            exchanged_cotangent(LightNetState(z_end, S_end), dz, dS),
            cu_seqlens,
            with_theta=with_theta,
            chunk_size=ctx.chunk_size,
            starts=starts,
        )
        dtheta = None if gradients.theta is None else gradients.theta.to(theta.dtype)
        dz_in, dS_in = None, None
        if state_in is not None:
            _, dS_in = plain_cotangent(state_in, cotangent)
            if ctx.needs_input_grad[5]:
                dz_in = initial_z_gradient(
                    partial(state_fwd, chunk_size=ctx.chunk_size),
                    partial(state_bwd, chunk_size=ctx.chunk_size),
                    q,
                    k,
                    v,
                    angles,
                    do,
                    state_in,
                    (dz, dS),
                    cu_seqlens,
                )
        return gradients.q, gradients.k, gradients.v, dtheta, None, dz_in, dS_in, None, None
