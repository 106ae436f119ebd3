"""The scan of Toeplitz positional encoding in chunks with a hand-written backward, in passes for sequence parallelism.

The mathematics, with the derivation of the backward, is in docs/reference/operators/tpe.md. Names of shapes: B rows, T
tokens, D channels, E modes, N chunks of C slots. Inside, everything is fp32, or fp64 for fp64 inputs; outputs and
gradients have the dtype of their inputs. Channels are independent and computed in slices of W: the workspace beside
inputs and outputs does not grow with D.

Arguments of all passes: x and cotangents dy of the outputs (B, T, D), log_decay (E,) and gamma (D, E). T may be 0.
cu_seqlens (N+1,) are the boundaries of documents, or None. chunk_size is the number of tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from lightscale.kernels.common.documents import document_numbers
from lightscale.kernels.common.states import Arriving, arrived, state_dtype, without_state
from lightscale.kernels.tpe.chunk_batches import ChunkSlots, TPEChunkBatch, chunk_batches, powers

DEFAULT_CHUNK_SIZE = 64

# Channels that are computed at once: their Toeplitz matrices (64, C, C) take 1 MiB in fp32.
_SLICE_CHANNELS = 64

# Tokens that one product of state_fwd and state_bwd sums over; bounds the copy in the arithmetic's dtype.
_SUM_TOKENS = 1024


def _toeplitz(kernel: Tensor) -> Tensor:
    """kernel[c, t - s] at [c, s, t], 0 for t < s: (W, C, C) from (W, C)."""
    return pad(kernel, (kernel.shape[1] - 1, 0)).unfold(1, kernel.shape[1], 1).flip(1)


def _diagonal_sums(pairs: Tensor) -> Tensor:
    """Σ_s pairs[c, s, s + τ] at [c, τ]: (W, C) from (W, C, C)."""
    width, size, _ = pairs.shape
    # In rows that are one element longer each diagonal becomes a column; elements below the main diagonal are 0.
    return pad(pairs.triu().flatten(1), (0, size)).view(width, size, size + 1)[:, :, :size].sum(1)


class _Power(NamedTuple):
    """λ to the power of integers, and the same times the exponent: its derivative by log λ."""

    value: Tensor
    slope: Tensor


class _Tables(NamedTuple):
    """Powers of λ by slot and chunk.

    A chunk that is not full ends a document. Its state is read only at the end of a row: hence each row has a table of
    its own for its last chunk.
    """

    kernel: _Power  # (C, E): λ^τ, of two tokens at distance τ
    read: _Power  # (C, E): λ^(t+1), the decay of the state that enters a chunk up to its slot t
    write: _Power  # (C, E): λ^(C-1-s), the decay from slot s to the end of a full chunk
    write_last: _Power  # (B, C, E): λ^(length-1-s), the decay from slot s to the end of a row's last chunk
    through: _Power  # (B, N, E): λ^length, the decay through a chunk
    last: tuple[Tensor, Tensor]  # (B,) and (B,): the rows, and which of the N+1 states leaves their last chunk

    def write_states(self, x: Tensor) -> Tensor:
        """The share of each chunk of x (W, B, N+1, C) in the state: (W, B, N+1, E)."""
        states = x @ self.write.value
        states[:, *self.last] = torch.einsum("wbc,bce->wbe", x[:, *self.last], self.write_last.value)
        return states

    def write_gradients(self, dstates: Tensor) -> Tensor:
        """The adjoint of ``write_states``: (W, B, N+1, C) from (W, B, N+1, E)."""
        dx = dstates @ self.write.value.mT
        dx[:, *self.last] = torch.einsum("wbe,bce->wbc", dstates[:, *self.last], self.write_last.value)
        return dx

    def write_slope_(self, x: Tensor, dstates: Tensor) -> Tensor:
        """Σ dstates ⊙ (derivative of ``write_states`` by log λ), (E,). Overwrites x."""
        last = torch.einsum("wbc,wbe,bce->e", x[:, *self.last], dstates[:, *self.last], self.write_last.slope)
        x[:, *self.last] = 0.0
        return last + (_over_chunks(x, dstates) * self.write.slope).sum(0)


def _over_chunks(x: Tensor, states: Tensor) -> Tensor:
    """Σ x ⊗ states over channels and chunks: (C, E) from (W, B, N+1, C) and (W, B, N+1, E)."""
    return x.flatten(0, 2).mT @ states.flatten(0, 2)


def _tables(log_decay: Tensor, slots: ChunkSlots, dtype: torch.dtype) -> _Tables:
    slot = torch.arange(slots.chunk_size, device=log_decay.device)
    chunks, lengths = slots.last

    def power(steps: Tensor) -> _Power:
        value = powers(log_decay, steps, dtype)
        return _Power(value, value * steps.unsqueeze(-1))

    kernel = power(slot)
    steps = lengths.unsqueeze(1) - 1 - slot
    write_last = [x.masked_fill((steps < 0).unsqueeze(-1), 0.0) for x in power(steps.clamp(min=0))]
    return _Tables(
        kernel=kernel,
        read=power(slot + 1),
        write=_Power(kernel.value.flip(0), kernel.slope.flip(0)),
        write_last=_Power(*write_last),
        through=power(slots.lengths),
        last=(torch.arange(len(chunks), device=chunks.device), chunks + 1),
    )


def _scan_(states: Tensor, through: Tensor, begins: Tensor | None) -> None:
    """Turn the chunks' shares into the states between the chunks, in place.

    states (W, B, N+1, E) holds the state that enters the row, then each chunk's share. Afterwards it holds the states
    that enter the chunks, then the state that leaves the row. through (B, N, E); begins (B, N) or None. Where a
    document begins, zeros are written, not multiplied: an overflow in one document gives no NaN in the next.
    """
    resets = _resets(begins)
    for n in range(through.shape[1]):
        if n in resets:
            states[:, :, n].masked_fill_(resets[n], 0.0)
        states[:, :, n + 1].addcmul_(states[:, :, n], through[:, n])


def _scan_back_(dstates: Tensor, through: Tensor, begins: Tensor | None) -> None:
    """The adjoint of ``_scan_``, in place.

    dstates (W, B, N+1, E) holds each chunk's own cotangent of its entering state, then the cotangent of the state that
    leaves the row. Afterwards it holds the cotangents of the states that enter the chunks, then the one of the state
    that leaves the row.
    """
    resets = _resets(begins)
    for n in reversed(range(through.shape[1])):
        dstates[:, :, n].addcmul_(dstates[:, :, n + 1], through[:, n])
        if n in resets:
            dstates[:, :, n].masked_fill_(resets[n], 0.0)


def _resets(begins: Tensor | None) -> dict[int, Tensor]:
    """Masks (B, 1) of the rows in which chunk n begins a document, by n."""
    if begins is None:
        return {}
    return {n: begins[:, n, None] for n in begins.any(0).nonzero().flatten().tolist()}


class _ChannelSlice(NamedTuple):
    """W channels of a chunk batch: inputs by slot, behind an empty chunk, and the states around the chunks."""

    x: Tensor  # (W, B, 1+N, C)
    gamma: Tensor  # (W, E)
    states: Tensor  # (W, B, N+1, E): the states that enter the chunks, and the one that leaves the last
    kernel: Tensor  # (W, C, C): Σ_r γ λ^(t-s) at [c, s, t]


def _channel_slice(x: Tensor, gamma: Tensor, u: Tensor, slots: ChunkSlots, tables: _Tables) -> _ChannelSlice:
    """The slice of x (B, T, W) and gamma (W, E) that the state u (B, W, E) enters."""
    gamma = gamma.to(u.dtype)
    by_slot = slots.load(x, u.dtype, shift=1)
    states = tables.write_states(by_slot)
    states[:, :, 0] = u.transpose(0, 1)
    _scan_(states, tables.through.value, slots.begins)
    return _ChannelSlice(by_slot, gamma, states, _toeplitz(gamma @ tables.kernel.value.mT))


def _channel_slices(width: int) -> list[slice]:
    return [slice(first, first + _SLICE_CHANNELS) for first in range(0, width, _SLICE_CHANNELS)]


def _by_channel(x: Tensor) -> Tensor:
    """Chunks of all rows, (W, B·(N+1), width), as a view of (W, B, N+1, width)."""
    return x.flatten(1, 2)


def _state_or_zeros(state: Tensor | None, x: Tensor, log_decay: Tensor) -> Tensor:
    """A copy of a state (B, D, E) in the arithmetic's dtype."""
    if state is not None:
        return state.to(state_dtype(x.dtype), copy=True)
    shape = (x.shape[0], x.shape[2], log_decay.shape[0])
    return torch.zeros(shape, dtype=state_dtype(x.dtype), device=x.device)


def _weighted_sum(x: Tensor, log_decay: Tensor, steps: Tensor, kept: Tensor | None) -> Tensor:
    """Σ_t λ^steps_t x_t (B, D, E) over the kept tokens; steps (T,), kept (B, T)."""
    total = _state_or_zeros(None, x, log_decay)
    for start in range(0, x.shape[1], _SUM_TOKENS):
        batch = slice(start, start + _SUM_TOKENS)
        part = x[:, batch].to(total.dtype)
        if kept is not None:
            part = part.masked_fill(~kept[:, batch, None], 0.0)
        total += part.mT @ powers(log_decay, steps[batch], total.dtype)
    return total


def _with_states(
    x: Tensor, log_decay: Tensor, u: Tensor, row: list[TPEChunkBatch]
) -> list[tuple[TPEChunkBatch, Tensor]]:
    """The chunk batches of a row of x (B, T, D), each with the state (B, D, E) that enters it, the first with u."""
    entering = []
    for batch in row:
        entering.append((batch, u))
        if batch is not row[-1]:
            u = _leaving(x[:, batch.tokens], log_decay, u, batch)
    return entering


def _leaving(x: Tensor, log_decay: Tensor, u: Tensor, batch: TPEChunkBatch) -> Tensor:
    """The state that leaves a batch of x (B, T, D) which u (B, D, E) enters."""
    steps = torch.arange(x.shape[1] - 1, -1, -1, device=x.device)
    passed = u * powers(log_decay, steps[0] + 1, u.dtype)
    if batch.passes is not None:
        passed.masked_fill_(~batch.passes[:, None, None], 0.0)
    return passed.add_(_weighted_sum(x, log_decay, steps, batch.kept))


@torch.no_grad()
def state_fwd(x: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The summary of a row for the ranks behind it: u_out = D ⊙ u_in + u_loc.

    Args:
        cu_seqlens: (N+1,) or None. A caller whose row begins with a new document takes D as 0.

    Returns:
        u_loc (B, D, E), the row's outgoing state from a zero incoming state. D (B, E), the decay from the row's start
        to its end: λ^T, or 0 where a document begins inside the row.
    """
    with torch.autocast(x.device.type, enabled=False):
        num_rows, num_tokens, _ = x.shape
        steps = torch.arange(num_tokens - 1, -1, -1, device=x.device)
        through = powers(log_decay, steps.new_full((num_rows,), num_tokens), state_dtype(x.dtype))
        if cu_seqlens is None:
            return _weighted_sum(x, log_decay, steps, None), through
        documents = document_numbers(cu_seqlens, num_rows=num_rows, num_tokens=num_tokens)
        last = documents[:, -1:]  # (B, 1), or (B, 0) when T is 0
        local = _weighted_sum(x, log_decay, steps, documents == last)
        return local, through.masked_fill((last > 0).any(1, keepdim=True), 0.0)


@torch.no_grad()
def out_fwd(
    x: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    u_in: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """The outputs y (B, T, D) of a row that u_in (B, D, E) enters, and the state that leaves it.

    Args:
        u_in: zero when None; only the row's first document reads it.
    """
    with torch.autocast(x.device.type, enabled=False):
        u = _state_or_zeros(u_in, x, log_decay)
        y = x.new_empty(x.shape)
        for batch in chunk_batches(x, cu_seqlens, chunk_size):
            tokens, slots = batch.tokens, batch.slots
            # Once per batch: all channels have the same decays.
            tables = _tables(log_decay, slots, u.dtype)
            for channels in _channel_slices(x.shape[2]):
                part = _channel_slice(x[:, tokens, channels], gamma[channels], u[:, channels], slots, tables)
                y_b = _by_channel(part.x) @ part.kernel
                # State n enters the chunk at index n + 1: index 0 is the empty chunk.
                read = (part.states * part.gamma[:, None, None]) @ tables.read.value.mT
                y_b[:, 1:] += _by_channel(read)[:, :-1]
                slots.store(y[:, tokens, channels], y_b.view_as(part.x), shift=1)
                # Channels are independent: this slice's state can be replaced before the other slices are computed.
                u[:, channels] = part.states[:, :, -1].transpose(0, 1)
        return y, u


@torch.no_grad()
def state_bwd(dy: Tensor, log_decay: Tensor, gamma: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The cotangent U (B, D, E) of a row's incoming state that comes from the row's own outputs.

    The whole cotangent is U + D ⊙ du_end with the D of ``state_fwd``. Only the first document reads the
    incoming state; a caller whose row begins with a new document takes U as 0.
    """
    with torch.autocast(dy.device.type, enabled=False):
        num_rows, num_tokens, _ = dy.shape
        steps = torch.arange(1, num_tokens + 1, device=dy.device)
        kept = None
        if cu_seqlens is not None:
            kept = document_numbers(cu_seqlens, num_rows=num_rows, num_tokens=num_tokens) == 0
        return gamma.to(state_dtype(dy.dtype)) * _weighted_sum(dy, log_decay, steps, kept)


class TPEGradients(NamedTuple):
    """Gradients of a row's inputs; log_decay's (E,) and gamma's (D, E) have the states' dtype."""

    x: Tensor
    log_decay: Tensor
    gamma: Tensor


@torch.no_grad()
def row_gradients(
    x: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    dy: Tensor,
    u_in: Tensor | None,
    du_end: Arriving[Tensor | None],
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[TPEGradients, Tensor]:
    """The gradients of a row's x, log_decay, gamma and incoming state.

    Args:
        u_in: the state (B, D, E) that entered the row; zero when None.
        du_end: the cotangent (B, D, E) of the state that left it, or a function that waits for it; zero when None.

    Returns:
        dx in x's dtype, and dlog_decay (E,) and dgamma (D, E) of these rows in the states' dtype. The caller sums the
        last two over ranks.
    """
    with torch.autocast(x.device.type, enabled=False):
        # One state per batch is kept; the way back recomputes the states of its chunks.
        row = _with_states(x, log_decay, _state_or_zeros(u_in, x, log_decay), chunk_batches(x, cu_seqlens, chunk_size))
        du = _state_or_zeros(arrived(du_end), x, log_decay)
        dx = x.new_empty(x.shape)
        dlog_decay, dgamma = (torch.zeros(p.shape, dtype=du.dtype, device=x.device) for p in (log_decay, gamma))
        for batch, u in reversed(row):
            tokens, slots = batch.tokens, batch.slots
            tables = _tables(log_decay, slots, u.dtype)
            for channels in _channel_slices(x.shape[2]):
                part = _channel_slice(x[:, tokens, channels], gamma[channels], u[:, channels], slots, tables)
                dy_b = slots.load(dy[:, tokens, channels], u.dtype, shift=0)
                reads = dy_b @ tables.read.value
                dstates = reads * part.gamma[:, None, None]
                dstates[:, :, -1] = du[:, channels].transpose(0, 1)
                _scan_back_(dstates, tables.through.value, slots.begins)
                du[:, channels] = dstates[:, :, 0].transpose(0, 1)

                dx_b = _by_channel(dy_b) @ part.kernel.mT
                dx_b[:, :-1] += _by_channel(tables.write_gradients(dstates))[:, 1:]
                slots.store(dx[:, tokens, channels], dx_b.view_as(dy_b), shift=0)
                dgamma_b, dlog_decay_b = _parameter_gradients_(part, dy_b, reads, dstates, tables)
                dgamma[channels] += dgamma_b
                dlog_decay += dlog_decay_b
        return TPEGradients(dx, dlog_decay, dgamma), du


def _parameter_gradients_(
    part: _ChannelSlice, dy: Tensor, reads: Tensor, dstates: Tensor, tables: _Tables
) -> tuple[Tensor, Tensor]:
    """dγ (W, E) and the slice's part of dlog λ (E,). Overwrites part.x.

    The inputs are the cotangents dy (W, B, N+1, C), their sums ``reads`` (W, B, N+1, E) by the entering states, and the
    cotangents of the states.
    """
    # Σ x_s dy_t over pairs of one chunk at distance τ: the gradient of the kernel.
    # One product of tokens with tokens per channel gives the pairs of every distance.
    dkernel = _diagonal_sums(_by_channel(part.x)[:, 1:].mT @ _by_channel(dy)[:, :-1])
    dgamma = dkernel @ tables.kernel.value + (part.states * reads).sum((1, 2))

    dlog_decay = (part.gamma * (dkernel @ tables.kernel.slope)).sum(0)
    weighed = part.states * part.gamma[:, None, None]
    dlog_decay += (_over_chunks(dy, weighed) * tables.read.slope).sum(0)
    dlog_decay += tables.write_slope_(part.x, dstates)
    passed = (part.states[:, :, :-1] * dstates[:, :, 1:]).sum(0)
    dlog_decay += (passed * tables.through.slope).sum((0, 1))
    return dgamma, dlog_decay


grad_bwd = without_state(row_gradients)


def recurrent_step(x: Tensor, log_decay: Tensor, gamma: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """One token: x (B, D), log_decay (E,), gamma (D, E), u (B, D, E) → y (B, D) and the next state.

    The state is read and written once, at any position. Autograd differentiates the step.
    """
    dtype = state_dtype(x.dtype)
    u = u * log_decay.to(dtype).exp() + x.to(dtype).unsqueeze(-1)
    return (u * gamma.to(dtype)).sum(-1).to(x.dtype), u


class ChunkedTPEScan(torch.autograd.Function):
    """``out_fwd`` and ``row_gradients`` as one differentiable call; only the inputs are saved."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """(y, final state) of x, log_decay, gamma, initial_state, cu_seqlens, chunk_size; see ``out_fwd``."""
        *tensors, ctx.chunk_size = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return out_fwd(*tensors, chunk_size=ctx.chunk_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of ``forward``'s arguments; the cotangent of an unused result is None."""
        x, log_decay, gamma, initial_state, cu_seqlens = ctx.saved_tensors
        gradients, du_in = row_gradients(
            x,
            log_decay,
            gamma,
            torch.zeros_like(x) if dy is None else dy,
            initial_state,
            dstate,
            cu_seqlens,
            chunk_size=ctx.chunk_size,
        )
        dinitial_state = du_in if ctx.needs_input_grad[3] else None
        dlog_decay, dgamma = gradients.log_decay.to(log_decay.dtype), gradients.gamma.to(gamma.dtype)
        return gradients.x, dlog_decay, dgamma, dinitial_state, None, None
