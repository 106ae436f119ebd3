"""LightNet's operator by chunks: inside a chunk, the weight e^{k_s - z_t} of a pair is a product of two factors.

e^{k_s - z_t} = e^{k_s - r} e^{r - z_t} for any reference point r of the chunk and channel. So after one pass of weights
all work is matrix products without decay. Only e^{r - z_t} can exceed 1, by the rise of z inside the chunk. Chunks in
which z rises too far are halved, down to single tokens at most. Names of shapes: B rows, T tokens, H heads, K key
width, L tokens of a chunk, G neighbouring chunks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightscale.kernels.common.chunks import ChunkMasks, Chunks, cut_rows

# Largest rise of z inside a chunk: e^60 times a query stays far from fp32's largest number, e^88.
MAX_RISE = 60.0
_LEAST_WEIGHT = math.exp(-MAX_RISE)

# Replaces -inf where a difference of two infinities would be NaN; below every meaningful key.
_LOWEST = -1e30

# Elements of one operand of a batch: 0.5 MiB in fp32, so that its operands stay in the second-level cache.
_BATCH_ELEMENTS = 2**17


@dataclass(frozen=True, kw_only=True)
class LightNetChunkBatch:
    """Neighbouring chunks of equal length of every row, with the weights of their keys and queries.

    Resets select instead of multiplying by zero: an overflow in one document gives no NaN in the next.
    """

    cut: Chunks
    masks: ChunkMasks | None
    """Masks of documents; ``pairs`` holds only pairs whose second token is not the later one."""
    writes: Tensor  # (B, G, H, L, K): e^{k_s - r}, at most 1
    reads: Tensor  # (B, G, H, L, K): e^{r - z_t}, at most e^MAX_RISE; 0 before the first write
    enter: Tensor  # (B, G, H, K): e^{z - r} of the state that enters the chunk, at most 1
    leave: Tensor  # (B, G, H, K): e^{r - z} of the state that leaves it
    z_start: Tensor  # (B, H, K), fp64: z before the first chunk
    z_end: Tensor  # (B, H, K), fp64: z after the last chunk

    def causal_(self, scores: Tensor) -> Tensor:
        """Zero scores (B, G, H, L, L) in place, for pairs of later tokens or of other documents."""
        return scores.tril_() if self.masks is None else scores.masked_fill_(~self.masks.pairs, 0.0)

    def incoming(self, x: Tensor) -> Tensor:
        """x (B, G, H, L, width), 0 at tokens that do not read the state that enters their chunk."""
        return x if self.masks is None else x.masked_fill(~self.masks.incoming, 0.0)

    def outgoing(self, x: Tensor) -> Tensor:
        """x (B, G, H, L, width), 0 at tokens that are not part of the state that leaves their chunk."""
        return x if self.masks is None else x.masked_fill(~self.masks.outgoing, 0.0)

    def add_incoming_(self, out: Tensor, x: Tensor, state: Tensor) -> None:
        """out (B, G, H, L, V) += x (B, G, H, L, R) @ state at the tokens that read their chunk's entering state."""
        _add_product_(out, x, state, None if self.masks is None else self.masks.incoming)

    def add_outgoing_(self, out: Tensor, x: Tensor, state: Tensor) -> None:
        """out (B, G, H, L, V) += x (B, G, H, L, R) @ state at the tokens in their chunk's leaving state."""
        _add_product_(out, x, state, None if self.masks is None else self.masks.outgoing)

    def suffix_sums(self, x: Tensor) -> Tensor:
        """Sums of x (B, G, H, L, width) from each token to the end of its document in the chunk."""
        if self.masks is None:
            return x.flip(-2).cumsum(-2).flip(-2)
        sums = x.clone()
        for t in range(self.cut.chunk_tokens - 2, -1, -1):
            ends = ~self.masks.pairs[..., t + 1, t, None]
            sums.select(-2, t).add_(sums.select(-2, t + 1).masked_fill(ends, 0.0))
        return sums

    def entered(self, S: Tensor) -> Tensor:
        """The state S (B, H, R, V) that enters the first chunk, in units of its reference point: (B, 1, H, R, V)."""
        return (S * _like(self.enter[:, 0], S)).unsqueeze(1)

    def scan(self, shares: Tensor, running: Tensor, *, reverse: bool = False) -> tuple[Tensor, Tensor]:
        """Pass a state, or the cotangent of one, through the chunks.

        ``shares`` (B, G, H, *) holds each chunk's share, in units of its reference point. Returns, in the same units
        and shape, the state that enters each chunk, or in reverse the cotangent of the state that leaves it, and the
        state behind the last chunk.
        """
        # From the units of a chunk to those of the next one.
        if reverse:
            first, factors = self.leave[:, -1], self.enter.clone()
            factors[:, 1:] *= self.leave[:, :-1]
        else:
            first, factors = self.enter[:, 0], self.leave.clone()
            factors[:, :-1] *= self.enter[:, 1:]
        received = torch.empty_like(shares)
        # Views of all chunks at once: a view costs as much as a sum of small states.
        chunks = [*zip(shares.unbind(1), _like(factors, shares).unbind(1), received.unbind(1), strict=True)]
        through = [None] * len(chunks) if self.masks is None else [*self.masks.through.unbind(1)]
        if reverse:
            chunks.reverse()
            through.reverse()
        torch.mul(running, _like(first, running), out=chunks[0][2])
        behind = [*(entering for _, _, entering in chunks[1:]), torch.empty_like(running)]
        for (share, factor, entering), passes, out in zip(chunks, through, behind, strict=True):
            if passes is not None:
                entering = entering.masked_fill(~passes.view(-1, *[1] * (entering.dim() - 1)), 0.0)
            torch.add(entering, share, out=out).mul_(factor)
        return received, behind[-1]


def _add_product_(out: Tensor, x: Tensor, state: Tensor, kept: Tensor | None) -> None:
    if kept is None:
        out.flatten(0, 2).baddbmm_(x.flatten(0, 2), state.flatten(0, 2))
    else:
        out.add_((x @ state).masked_fill_(~kept, 0.0))


def _like(weights: Tensor, states: Tensor) -> Tensor:
    """Weights (…, K) of channels, for states (…, K) or (…, R, V)."""
    if states.dim() == weights.dim():
        return weights
    if weights.shape[-1] != states.shape[-2]:
        weights = torch.cat([weights, weights], dim=-1)
    return weights.unsqueeze(-1)


def chunk_batches(
    k: Tensor, z: Tensor, documents: Tensor | None, *, width: int, chunk_size: int, dtype: torch.dtype
) -> Iterator[LightNetChunkBatch]:
    """Cut rows of keys k (B, T, H, K) into chunk batches, from left to right, with z (B, H, K) in fp64.

    z composes chunk by chunk, so that its error does not grow with the number of tokens.

    Args:
        k: log-keys.
        z: z of the state that enters the rows.
        documents: (B, T), the number of each token's document in its row; None when no document begins inside.
        width: width of the widest operand, which sets the number of chunks per batch.
        chunk_size: tokens of a chunk.
        dtype: dtype of the arithmetic.
    """
    num_rows, num_tokens, num_heads = k.shape[:3]
    most_chunks = max(1, _BATCH_ELEMENTS // (num_rows * num_heads * chunk_size * width))
    cuts = cut_rows(num_tokens, chunk_size, most_chunks)
    # A stack, because the parts of a batch in which z rises too far replace it.
    cuts.reverse()
    z = z.double()
    while cuts:
        cut = cuts.pop()
        batch = weigh(cut, k, z, documents, dtype)
        if batch is None:
            cuts += reversed(_parts(cut))
        else:
            z = batch.z_end
            yield batch


def _parts(cut: Chunks) -> list[Chunks]:
    """The chunks one by one; of a single chunk, its two halves."""
    start, length = cut.start, cut.chunk_tokens
    if cut.num_chunks > 1:
        starts = range(start, start + cut.num_chunks * length, length)
        return [Chunks(start=begin, num_chunks=1, chunk_tokens=length) for begin in starts]
    half = length // 2
    return [
        Chunks(start=start, num_chunks=1, chunk_tokens=half),
        Chunks(start=start + half, num_chunks=1, chunk_tokens=length - half),
    ]


def weigh(cut: Chunks, k: Tensor, z: Tensor, documents: Tensor | None, dtype: torch.dtype) -> LightNetChunkBatch | None:
    """The batch of a cut that z enters, or None when z rises too far inside one of its chunks.

    Arguments are those of ``chunk_batches``, with z in fp64.
    """
    z_start = z
    masks = cut.masks_by(documents)
    if masks is not None:
        masks = masks._replace(pairs=masks.pairs.tril())
    writes = cut.copied(k, dtype)
    largest = writes.amax(-2).clamp_(min=_LOWEST)  # (B, G, H, K); all keys may be -inf
    writes.sub_(largest.unsqueeze(-2)).exp_()
    # 1 / reads: sums of positive terms; no weight needs a logarithm per token.
    sums = writes.cumsum(-2) if masks is None else masks.pairs.to(dtype) @ writes

    local = largest.double() + sums[..., -1, :].double().log()
    if masks is None:
        behind = torch.logcumsumexp(torch.cat([z.unsqueeze(1), local], dim=1), dim=1)
        z_enter, z = behind[:, :-1], behind[:, -1].clone()
    else:
        z_enter = torch.empty_like(local)
        for chunk in range(cut.num_chunks):
            # A state that no token of the chunk reads must not raise the reference point.
            z_enter[:, chunk] = z.masked_fill(~masks.incoming[:, chunk, :, 0], -torch.inf)
            z = z.masked_fill(~masks.through[:, chunk, :, 0], -torch.inf)
            z = torch.logaddexp(z, local[:, chunk])

    # At least the largest key and the entering z: then writes and enter are at most 1, and only reads can be large.
    reference = torch.maximum(largest, z_enter.to(dtype))
    enter = (z_enter - reference.double()).exp_().to(dtype)
    rescale = (largest - reference).exp_().unsqueeze(-2)
    writes.mul_(rescale)
    entered = enter.unsqueeze(-2) if masks is None else enter.unsqueeze(-2) * masks.incoming
    torch.addcmul(entered, sums, rescale, out=sums)
    # Of a NaN in one document too, which must not hide the sums of the others.
    is_small = not bool(sums.amin() >= _LEAST_WEIGHT)
    if is_small and _is_lost(sums, cut.tokens(k).transpose(2, 3), masks, z_enter):
        return None
    reads = sums.reciprocal_()
    if is_small:
        reads.masked_fill_(reads == torch.inf, 0.0)
    return LightNetChunkBatch(
        cut=cut,
        masks=masks,
        writes=writes,
        reads=reads,
        enter=enter,
        leave=reads[..., -1, :].clone(),
        z_start=z_start,
        z_end=z,
    )


def _is_lost(sums: Tensor, k: Tensor, masks: ChunkMasks | None, z_enter: Tensor) -> bool:
    """Whether some sums of weights (B, G, H, L, K) are too small beside the reference point, yet not empty.

    For a single token the reference is its key or the entering z: its sum loses no digits.
    """
    if k.shape[-2] == 1:
        return False
    finite = (k > -torch.inf).to(sums.dtype)
    num_written = finite.cumsum(-2) if masks is None else masks.pairs.to(sums.dtype) @ finite
    entered = (z_enter > -torch.inf).unsqueeze(-2)
    num_written += entered if masks is None else entered & masks.incoming
    return bool(((sums < _LEAST_WEIGHT) & (num_written > 0)).any())
