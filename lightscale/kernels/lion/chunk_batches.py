"""LION's rows in batches of chunks: sums of log decays, and the tokens' reads and writes of both states.

Names of shapes: B rows, T tokens, H heads, K key width, W width of the values and the normaliser's column. A row is cut
into chunks of C tokens, the last one shorter; L is the number of tokens of the current chunk. G neighbours, a chunk
batch, are computed at once. One tensor (B, G, H, 2, K, W) holds both states of a chunk, prefix and suffix, as its two
sides: one product serves both directions. For a decay per head the B, G and T of decays are 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightscale.kernels.common.chunks import ChunkMasks, Chunks, cut_rows, pass_on
from lightscale.kernels.common.documents import numbers_or_none
from lightscale.kernels.common.states import state_dtype
from lightscale.kernels.lion.state import Gate

# Elements of one operand of a chunk batch: 0.5 MiB in fp32, as in lightning attention.
_BATCH_ELEMENTS = 2**17

# Replaces -inf, whose exponential is 0 too: differences of infinities would be NaN.
_LOWEST = -1000.0

# Where no chunk of a batch decays below its exponential, the decay of a pair is a product of two finite factors.
_STEEP = -80.0


class LogDecaySums(NamedTuple):
    """Sums of log decays (B, T, H) from the start of a row or chunk, in fp64, because large sums are subtracted."""

    forward: Tensor
    """Sums for the decay from earlier tokens: exclusive for gates "leave", inclusive for "enter"."""
    backward: Tensor
    """Sums for the decay from later tokens: inclusive for gates "leave", exclusive for "enter"."""
    total: Tensor
    """(B, 1, H)."""


def sums_of(log_decay: Tensor, gate: Gate) -> LogDecaySums:
    """The sums of log decays (B, T, H) over all of T."""
    logs = log_decay.detach().double().clamp(min=_LOWEST)
    upto = logs.cumsum(1)
    # Shifted, not upto - logs, which would round.
    before = torch.cat([torch.zeros_like(upto[:, :1]), upto], 1)[:, :-1]
    total = upto[:, -1:] if logs.size(1) else logs.new_zeros(logs.size(0), 1, logs.size(2))
    return LogDecaySums(before, upto, total) if gate == "leave" else LogDecaySums(upto, before, total)


def write_weights(sums: LogDecaySums) -> Tensor:
    """(B, T, H, 2): the decay from each token to the right and left end of T. No exponent is above 0."""
    return torch.stack([sums.total - sums.forward, sums.backward], -1).clamp(max=0.0).exp()


def read_weights(sums: LogDecaySums) -> Tensor:
    """(B, T, H, 2): the decay from the left and right end of T to each token."""
    return torch.stack([sums.forward, sums.total - sums.backward], -1).clamp(max=0.0).exp()


@dataclass(frozen=True, kw_only=True)
class LionChunkDecays:
    """Decays of the chunks of a batch."""

    reads: Tensor  # (B, G, H, L, 2)
    writes: Tensor  # (B, G, H, L, 2)
    pairs: Tensor  # (B, G, H, L, L): between the tokens of a chunk, 1 on the diagonal
    through: Tensor  # (B, G, H, 1, 1)


def chunk_decays(log_decay: Tensor, gate: Gate, dtype: torch.dtype) -> LionChunkDecays:
    """The decays of chunks with log decays (B, G, L, H)."""
    num_rows, num_chunks = log_decay.shape[:2]
    sums = sums_of(log_decay.flatten(0, 1), gate)

    def of_chunks(x: Tensor) -> Tensor:
        return x.unflatten(0, (num_rows, num_chunks)).transpose(2, 3).to(dtype)

    return LionChunkDecays(
        reads=of_chunks(read_weights(sums)),
        writes=of_chunks(write_weights(sums)),
        pairs=_pair_decays(sums, dtype).unflatten(0, (num_rows, num_chunks)),
        through=of_chunks(sums.total.exp()[..., None]),
    )


def _pair_decays(sums: LogDecaySums, dtype: torch.dtype) -> Tensor:
    """The decays (B, H, L, L) between the tokens of chunks, from sums (B, L, H)."""
    forward, backward, total = (x.transpose(1, 2).contiguous() for x in sums)
    # A NaN in one document must not hide the steep chunks of another.
    if not total.numel() or not total.amin() >= _STEEP:
        # One of the two differences is at most 0: the one of the pair's direction.
        between = forward[..., :, None] - forward[..., None, :]
        return torch.minimum(between, backward[..., None, :] - backward[..., :, None]).to(dtype).exp_()
    # Each factor is the decay to a point in the middle of the chunk, or from it, so no difference of pairs is needed.
    middle = total / 2

    def products(of_rows: Tensor, of_columns: Tensor) -> Tensor:
        return of_rows.exp().to(dtype)[..., :, None] * of_columns.exp().to(dtype)[..., None, :]

    pairs = products(forward - middle, middle - forward).tril_(-1)
    pairs += products(middle - backward, backward - middle).triu_(1)
    pairs.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return pairs


@dataclass(frozen=True, kw_only=True)
class LionBatch(Chunks):
    """Neighbouring chunks of equal length of every row, and the operations on them.

    Tensors of a batch are (B, G, H, L, width), contiguous. Documents select instead of multiplying by zero: a state
    that overflowed in one document gives no NaN in the next.
    """

    decays: LionChunkDecays
    masks: ChunkMasks | None

    def load(self, x: Tensor, dtype: torch.dtype, *, last: Tensor | float | None = None) -> Tensor:
        """A copy of this batch's tokens of x (B, T, H, width), and ``last``, if given, as one more column.

        ``last`` is (B, G, H, L), or one number for all tokens.
        """
        if last is None:
            return self.copied(x, dtype)
        chunks = self.tokens(x).transpose(2, 3)
        out = torch.empty(*chunks.shape[:-1], x.shape[3] + 1, dtype=dtype, device=x.device)
        out[..., :-1].copy_(chunks)
        out[..., -1] = last
        return out

    def decay_(self, scores: Tensor) -> Tensor:
        """Decay scores (B, G, H, L, L) in place; 0 for pairs of other documents."""
        scores.mul_(self.decays.pairs)
        return scores if self.masks is None else scores.masked_fill_(~self.masks.pairs, 0.0)

    def shares(self, x: Tensor, y: Tensor, weights: Tensor, *, writes: bool) -> Tensor:
        """Σ weights x yᵀ of each chunk and both sides, (B, G, H, 2, K, W); ``writes`` as in ``_kept``."""
        for side, kept in enumerate(self._kept(writes=writes)):
            if kept is not None:
                weights = weights.expand(*x.shape[:-1], 2).clone() if side == 0 else weights
                weights[..., side].masked_fill_(~kept[..., 0], 0.0)
        spread = (weights[..., None] * x[..., None, :]).flatten(-2)
        return (spread.mT @ y).unflatten(-2, (2, x.shape[-1]))

    def through_states(self, x: Tensor, states: Tensor, weights: Tensor, *, writes: bool) -> Tensor:
        """Σ over both sides of weights (x S) (B, G, H, L, W), for x (…, L, K) and states (…, 2, K, W)."""
        if self.masks is None:
            return (weights[..., None] * x[..., None, :]).flatten(-2) @ states.flatten(-3, -2)
        return self._weighted(x.unsqueeze(-3) @ states, weights, writes=writes).sum(-3)

    def through_transposed(self, y: Tensor, states: Tensor, weights: Tensor, *, writes: bool) -> Tensor:
        """weights (y Sᵀ) of each side, (B, G, H, 2, L, K), for y (…, L, W) and states (…, 2, K, W)."""
        found = (y @ states.flatten(-3, -2).mT).unflatten(-1, (2, states.shape[-2])).transpose(-3, -2)
        return self._weighted(found, weights, writes=writes)

    def _weighted(self, x: Tensor, weights: Tensor, *, writes: bool) -> Tensor:
        """x (…, 2, L, width), each side weighted, and zero for tokens outside the state's document."""
        x = x * weights.mT[..., None]
        for side, kept in enumerate(self._kept(writes=writes)):
            if kept is not None:
                x[..., side, :, :].masked_fill_(~kept, 0.0)
        return x

    def _kept(self, *, writes: bool) -> tuple[Tensor | None, Tensor | None]:
        """(B, G, 1, L, 1) of both sides: tokens that write to the states that leave a chunk, or read those that enter.

        On the right a chunk borders on the document of its last token, on the left on the document that enters.
        """
        if self.masks is None:
            return None, None
        left, right = self.masks.incoming, self.masks.outgoing
        return (right, left) if writes else (left, right)

    def scan_(self, shares: Tensor, running: Tensor, *, side: int, reverse: bool) -> Tensor:
        """Pass one side's state (B, H, K, W) through the chunks, and return the state that leaves the last.

        The call overwrites each chunk's share, ``shares[…, side, :, :]``, with the state that enters the chunk.
        """
        for chunk in reversed(range(self.num_chunks)) if reverse else range(self.num_chunks):
            decay = self.decays.through[:, min(chunk, self.decays.through.size(1) - 1)]
            through = None if self.masks is None else self.masks.through[:, chunk]
            running = pass_on(running, shares[:, chunk, :, side], decay, through)
        return running

    def passing(self, states: Tensor, dstates: Tensor) -> Tensor:
        """(B, G, H, 1): ⟨S, dS⟩ through the whole chunk, on both sides; S enters it, dS is the leaving cotangent."""
        products = (states * dstates).sum((-3, -2, -1)).unsqueeze(-1) * self.decays.through[..., 0]
        return products if self.masks is None else products.masked_fill(~self.masks.through[..., 0], 0.0)


def chunk_batches(
    v: Tensor, width: int, log_decay: Tensor, gate: Gate, cu_seqlens: Tensor | None, chunk_size: int
) -> Iterator[LionBatch]:
    """Cut the rows of v (B, T, H, V) into batches of whole chunks, decayed by log_decay (H,) or (B, T, H).

    The rest of T / C is one shorter chunk.
    """
    num_rows, num_tokens, num_heads, value_width = v.shape
    dtype = state_dtype(v.dtype)
    batch_chunks = max(1, _BATCH_ELEMENTS // (num_rows * num_heads * chunk_size * max(width, value_width)))
    documents = numbers_or_none(cu_seqlens, v)
    of_heads: dict[int, LionChunkDecays] = {}
    for cut in cut_rows(num_tokens, chunk_size, batch_chunks):
        if log_decay.dim() == 1:
            length = cut.chunk_tokens
            if length not in of_heads:
                of_heads[length] = chunk_decays(log_decay.expand(1, 1, length, -1), gate, dtype)
            decays = of_heads[length]
        else:
            decays = chunk_decays(cut.tokens(log_decay), gate, dtype)
        yield LionBatch(**vars(cut), decays=decays, masks=cut.masks_by(documents))
