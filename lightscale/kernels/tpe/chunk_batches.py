"""The chunks of the scan's rows, in batches: the slots of tokens in them, and powers of the decays.

Names of shapes: B rows, T tokens, D channels, E modes. A row is cut into N chunks of C slots. Every document begins a
new chunk, so that no chunk holds two documents; the slots behind its last token stay empty.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightscale.kernels.common.documents import numbers_or_none

# Tokens of all rows that are computed at once: a slice of channels stays in the cache. The second number is the least
# number of chunks of a row, below which the cost of the one empty chunk would count.
_BATCH_TOKENS = 4096
_LEAST_CHUNKS = 8


def powers(log_decay: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """λ^steps, shape (*steps.shape, E), made in fp64 and rounded once; right for λ = 0, where 0 · (-inf) is NaN."""
    steps = steps.unsqueeze(-1)
    return torch.where(steps > 0, steps * log_decay.detach().double(), 0.0).exp().to(dtype)


@dataclass(frozen=True, kw_only=True)
class ChunkSlots:
    """Layout of B rows of T tokens in the (B, N, C) slots of chunks."""

    num_tokens: int
    chunk_size: int
    lengths: Tensor  # (B, N): tokens of each chunk; rows of fewer chunks end with empty ones
    slot_of_token: Tensor | None  # (B, T): the slot of each token; None if the slot is t
    begins: Tensor | None  # (B, N): a document begins here, and zeros enter; None where no document begins

    @property
    def last(self) -> tuple[Tensor, Tensor]:
        """The number (B,) of each row's last chunk with tokens, and its number of tokens (B,); T must not be 0."""
        last = (self.lengths > 0).sum(1) - 1
        return last, self.lengths.gather(1, last.unsqueeze(1)).squeeze(1)

    def load(self, x: Tensor, dtype: torch.dtype, *, shift: int) -> Tensor:
        """A copy of x (B, T, width) by channel and slot, (width, B, N+1, C), with 0 in empty slots.

        ``shift`` 0 leaves the last of the N+1 chunks empty, 1 the first.
        """
        num_rows, num_chunks = self.lengths.shape
        width = x.shape[2]
        by_slot = x.new_zeros(num_rows, (num_chunks + 1) * self.chunk_size, width, dtype=dtype)
        if self.slot_of_token is None:
            by_slot[:, shift * self.chunk_size :][:, : self.num_tokens] = x
        else:
            by_slot.flatten(0, 1).index_copy_(0, self._flat_slots(shift), x.to(dtype).flatten(0, 1))
        # Contiguous on both sides: only then torch transposes tile by tile.
        by_channel = by_slot.new_empty(width, by_slot[..., 0].numel())
        by_channel.copy_(by_slot.view(-1, width).t())
        return by_channel.view(width, num_rows, num_chunks + 1, self.chunk_size)

    def store(self, out: Tensor, x: Tensor, *, shift: int) -> None:
        """Write x (width, B, N+1, C) to the tokens of out (B, T, width); ``shift`` as in ``load``."""
        width, num_rows = x.shape[:2]
        by_slot = x.new_empty(x[0].numel(), width).copy_(x.view(width, -1).t())
        if self.slot_of_token is None:
            out.copy_(by_slot.view(num_rows, -1, width)[:, shift * self.chunk_size :][:, : self.num_tokens])
        else:
            out.copy_(by_slot.index_select(0, self._flat_slots(shift)).view(out.shape))

    def _flat_slots(self, shift: int) -> Tensor:
        """The slot (B·T,) of each token among those of all rows, with N+1 chunks each."""
        assert self.slot_of_token is not None
        num_rows, num_chunks = self.lengths.shape
        rows = torch.arange(num_rows, device=self.slot_of_token.device).unsqueeze(1) * (num_chunks + 1)
        return ((rows + shift) * self.chunk_size + self.slot_of_token).flatten()


class TPEChunkBatch(NamedTuple):
    """Neighbouring chunks of every row that are computed at once."""

    tokens: slice
    slots: ChunkSlots
    kept: Tensor | None  # (B, T of the batch): tokens of the document that leaves the batch; None: all tokens
    passes: Tensor | None  # (B,): whether the document that enters the batch leaves it; None: in every row


def chunk_batches(x: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> list[TPEChunkBatch]:
    """Cut the rows of x (B, T, D) from left to right, so that a slice of channels stays in the cache."""
    num_rows, num_tokens, _ = x.shape
    documents = numbers_or_none(cu_seqlens, x)
    # The limit is for all rows together: more rows, fewer tokens per row.
    size = chunk_size * max(_LEAST_CHUNKS, _BATCH_TOKENS // (chunk_size * max(1, num_rows)))
    cuts = [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]
    return [_batch(x[:, cut], cut, documents, chunk_size) for cut in cuts]


def _batch(x: Tensor, tokens: slice, documents: Tensor | None, chunk_size: int) -> TPEChunkBatch:
    """The batch of the rows of x (B, T, D), T > 0, which are the ``tokens`` of ``documents``."""
    num_rows, num_tokens, _ = x.shape
    if documents is not None:
        here, first = documents[:, tokens], max(tokens.start - 1, 0)
        starts = here.diff(dim=1, prepend=documents[:, first, None]) > 0
        if starts.any():
            kept, passes = here == here[:, -1:], ~starts.any(1)
            return TPEChunkBatch(tokens, _slots_of_documents(starts, chunk_size), kept, passes)
    num_chunks = -(-num_tokens // chunk_size)
    lengths = torch.full((num_rows, num_chunks), chunk_size, device=x.device)
    lengths[:, -1] = num_tokens - (num_chunks - 1) * chunk_size
    slots = ChunkSlots(num_tokens=num_tokens, chunk_size=chunk_size, lengths=lengths, slot_of_token=None, begins=None)
    return TPEChunkBatch(tokens, slots, None, None)


def _slots_of_documents(starts: Tensor, chunk_size: int) -> ChunkSlots:
    """The slots of rows in which documents begin at the tokens ``starts`` (B, T)."""
    num_rows, num_tokens = starts.shape
    token = torch.arange(num_tokens, device=starts.device).expand(num_rows, -1)
    slot = (token - torch.where(starts, token, 0).cummax(1).values) % chunk_size
    chunk = (slot == 0).cumsum(1) - 1
    counts = chunk.new_zeros(num_rows, int(chunk[:, -1].max()) + 1)
    return ChunkSlots(
        num_tokens=num_tokens,
        chunk_size=chunk_size,
        lengths=counts.scatter_add(1, chunk, torch.ones_like(chunk)),
        slot_of_token=chunk * chunk_size + slot,
        begins=counts.scatter_add(1, chunk, starts.long()) > 0,
    )
