"""The running log-sum-exp in chunks, and its gradients by hand.

Forward, a scan per chunk, all chunks side by side; then the sum that enters each chunk is added. Backward,

    dz̄_s = Σ_{t ≥ s} e^{z_s - z_t} dz_t = dz_s + e^{z_s - z_{s+1}} dz̄_{s+1},    db_s = e^{b_s - z_s} dz̄_s

is a scan from the end, in chunks too. z does not fall along a document, so no exponent is above 0. The cotangent of the
state that enters a row is e^{z_in - z_t} dz_t, summed over its first document: sequence ranks exchange z alone.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.kernels.common.states import Arriving, arrived, state_dtype, without_autocast

DEFAULT_CHUNK_SIZE = 64


def weight(x: Tensor, z: Tensor) -> Tensor:
    """e^{x - z} for x and z of one shape, and 0 where z is log 0."""
    return torch.exp(x - z.masked_fill(z == -torch.inf, 0.0))


def document_begins(b: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """(B, T): whether a document begins inside the row at a token; None where no document does."""
    if cu_seqlens is None:
        return None
    found = torch.zeros(b.shape[0] * b.shape[1] + 1, dtype=torch.bool, device=b.device)
    found = found.index_fill(0, cu_seqlens.long(), True)[:-1].view(b.shape[:2]).clone()
    # A row's first token reads the state that enters the row; the caller sets it to log 0 for a new document.
    found[:, :1] = False
    return found


def _chunked(x: Tensor, size: int, value: float) -> Tensor:
    """(B, T, …) -> (B, N, C, …), the last chunk padded with ``value``."""
    num_tokens = x.shape[1]
    chunks = -(-num_tokens // size)
    padding = [0, 0] * (x.dim() - 2) + [0, chunks * size - num_tokens]
    return F.pad(x, padding, value=value).unflatten(1, (chunks, size))


def _size(num_tokens: int, chunk_size: int) -> int:
    """Tokens of a chunk: the same number of steps inside chunks as over the chunks, or ``chunk_size`` if it is less."""
    return max(1, min(chunk_size, math.isqrt(max(0, num_tokens - 1)) + 1))


def _unless(cut: Tensor | None, x: Tensor) -> Tensor:
    """x, and log 0 where ``cut``."""
    return x if cut is None else x.masked_fill(cut[..., None], -torch.inf)


@without_autocast
def out_fwd(
    b: Tensor, state: Tensor | None, cu_seqlens: Tensor | None = None, chunk_size: int = DEFAULT_CHUNK_SIZE
) -> Tensor:
    """z (B, T, D) of b (B, T, D), in the states' dtype, from the ``state`` (B, D) that enters each row."""
    dtype, num_tokens = state_dtype(b.dtype), b.shape[1]
    if not num_tokens:
        return b.to(dtype)
    size = _size(num_tokens, chunk_size)
    terms, starts = _chunked(b.to(dtype), size, -torch.inf), document_begins(b, cu_seqlens)
    cuts = None if starts is None else _chunked(starts, size, False)
    z = torch.empty_like(terms)
    running = torch.full_like(terms[:, :, 0], -torch.inf)
    for i in range(size):
        running = torch.logaddexp(_unless(None if cuts is None else cuts[:, :, i], running), terms[:, :, i])
        z[:, :, i] = running
    entering, carried = [], torch.full_like(z[:, 0, 0], -torch.inf) if state is None else state.to(dtype)
    behind_start = None if cuts is None else cuts.cumsum(2) > 0
    for n in range(z.shape[1]):
        entering.append(carried)
        cut = None if behind_start is None else behind_start[:, n, -1]
        carried = torch.logaddexp(_unless(cut, carried), z[:, n, -1])
    before = torch.stack(entering, dim=1)[:, :, None].expand_as(z)
    return torch.logaddexp(z, _unless(behind_start, before)).flatten(1, 2)[:, :num_tokens]


@without_autocast
def state_fwd(b: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The log-sum (B, D) of each row's last document in the row, and (B,) 0 where it begins inside the row."""
    dtype, starts = state_dtype(b.dtype), document_begins(b, cu_seqlens)
    if not b.shape[1]:
        return torch.full_like(b[:, :0].sum(1), -torch.inf, dtype=dtype), torch.ones_like(
            b[:, :0].sum((1, 2)), dtype=dtype
        )
    through = torch.ones(b.shape[0], dtype=dtype, device=b.device)
    terms = b.to(dtype)
    if starts is not None:
        count = starts.cumsum(1)
        terms = _unless(count < count[:, -1:], terms)
        through = (count[:, -1] == 0).to(dtype)
    return torch.logsumexp(terms, dim=1), through


@without_autocast
def state_bwd(z: Tensor, dz: Tensor, state: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The cotangent (B, D) of the state that enters each row, by the row's own outputs z (B, T, D)."""
    share, starts = weight(state[:, None], z), document_begins(z, cu_seqlens)
    if starts is not None:
        # z of a later document may be smaller than the state: selected, because ∞ · 0 is NaN.
        share = share.masked_fill((starts.cumsum(1) > 0)[..., None], 0.0)
    return (share * dz).sum(1)


@without_autocast
def grad_bwd(
    b: Tensor,
    z: Tensor,
    dz: Tensor,
    dstate: Arriving[Tensor | None] = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> Tensor:
    """The gradient of b (B, T, D).

    Args:
        b, z: inputs and outputs.
        dz: cotangent of the outputs.
        dstate: cotangent of the state (B, D) behind each row's last token, or a function that waits for it.
        cu_seqlens, chunk_size: as in ``out_fwd``.
    """
    num_tokens = z.shape[1]
    from_behind = arrived(dstate)
    if not num_tokens:
        return torch.zeros_like(b)
    dz = dz.to(z.dtype)
    if from_behind is not None:
        # The state behind the row is z of its last token.
        dz = torch.cat([dz[:, :-1], dz[:, -1:] + from_behind[:, None].to(z.dtype)], dim=1)
    size, starts = _size(num_tokens, chunk_size), document_begins(z, cu_seqlens)
    # A token's share of the next token's sum: 0 where a document begins.
    log_share = z[:, :-1] - z[:, 1:].masked_fill(z[:, 1:] == -torch.inf, 0.0)
    if starts is not None:
        log_share = log_share.masked_fill(starts[:, 1:, None], -torch.inf)
    shares = _chunked(F.pad(log_share.exp(), (0, 0, 0, 1)), size, 0.0)
    found = _chunked(dz, size, 0.0)
    running = torch.zeros_like(found[:, :, 0])
    for i in reversed(range(size)):
        running = found[:, :, i] + (shares[:, :, i] * running if i < size - 1 else 0.0)
        found[:, :, i] = running
    # The cotangent from the chunk behind reaches a token by the product of the shares up to its chunk's last token.
    reach = torch.cat([shares[:, :, :-1], torch.ones_like(shares[:, :, -1:])], dim=2).flip(2).cumprod(2).flip(2)
    carried = torch.zeros_like(found[:, 0, 0])
    for n in reversed(range(found.shape[1])):
        carried = shares[:, n, -1] * carried
        found[:, n] += reach[:, n] * carried[:, None]
        carried = found[:, n, 0]
    summed = found.flatten(1, 2)[:, :num_tokens]
    return (weight(b.to(z.dtype), z) * summed).to(b.dtype)


def recurrent_step(b: Tensor, state: Tensor) -> Tensor:
    """z (B, D) behind one more token b (B, D)."""
    return torch.logaddexp(state, b.to(state.dtype))


class ChunkedLogSum(torch.autograd.Function):
    """The operator of whole rows with its gradients; saves inputs and outputs."""

    @staticmethod
    def forward(ctx: Any, b: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int) -> Tensor:
        """See ``log_sum``."""
        z = out_fwd(b, state, cu_seqlens, chunk_size)
        ctx.chunk_size = chunk_size
        ctx.save_for_backward(b, z, state, cu_seqlens)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of b and of the state."""
        b, z, state, cu_seqlens = ctx.saved_tensors
        db = grad_bwd(b, z, dz, None, cu_seqlens, ctx.chunk_size)
        return db, None if state is None else state_bwd(z, dz, state, cu_seqlens), None, None
