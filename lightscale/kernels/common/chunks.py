"""Chunks of the tokens of rows, and batches of neighbouring chunks, each computed at once.

Names of shapes: B rows, T tokens, H heads, G chunks of a batch, L tokens of each.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightscale.kernels.common.captures import is_capturing


class ChunkMasks(NamedTuple):
    """Masks of the tokens of one document in a batch, for batches in which a document begins."""

    incoming: Tensor  # (B, G, 1, L, 1): the token continues the document of the state that enters its chunk
    outgoing: Tensor  # (B, G, 1, L, 1): the token belongs to the document of the state that leaves its chunk
    through: Tensor  # (B, G, 1, 1, 1): one document goes through the whole chunk
    pairs: Tensor  # (B, G, 1, L, L): both tokens belong to one document


def pass_on(running: Tensor, share: Tensor, decay: Tensor, through: Tensor | None) -> Tensor:
    """The state behind a chunk that ``running`` enters: decay ⊙ running + share, with the chunk's own ``share``.

    running and share have the shape of a state (B, H, …); decay and through broadcast to it. The call overwrites
    ``share`` with ``running``. Where ``through`` is False, a document begins and no state passes.
    """
    if through is None:
        passed_on = torch.addcmul(share, running, decay)
    else:
        passed_on = share + (running * decay).masked_fill_(~through, 0.0)
    # In place: the chunk's share is read before the state that enters the chunk replaces it.
    share.copy_(running)
    return passed_on


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Neighbouring chunks of equal length of every row: their place, and copies of their tokens in and out."""

    start: int
    num_chunks: int
    chunk_tokens: int

    def tokens(self, x: Tensor) -> Tensor:
        """A view (B, G, L, …) of these tokens of x (B, T, …)."""
        tokens = x.narrow(1, self.start, self.num_chunks * self.chunk_tokens)
        return tokens.unflatten(1, (self.num_chunks, self.chunk_tokens))

    def copied(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy (B, G, H, L, width), never a view, of these tokens of x (B, T, H, width)."""
        chunks = self.tokens(x).transpose(2, 3)
        return torch.empty(chunks.shape, dtype=dtype, device=x.device).copy_(chunks)

    def store(self, out: Tensor, x: Tensor) -> None:
        """Write x (B, G, H, L, …) to these tokens of out (B, T, H, …)."""
        self.tokens(out).transpose(2, 3).copy_(x)

    def masks_by(self, documents: Tensor | None) -> ChunkMasks | None:
        """The masks from the number (B, T) of each token's document; None where no document begins in the batch."""
        if documents is None:
            return None
        here = self.tokens(documents)
        before = documents[:, self.start - 1] if self.start else torch.zeros_like(documents[:, 0])
        # A graph is for all documents: the masks of a batch without a beginning change nothing.
        if not is_capturing(documents.device) and torch.equal(here[:, -1, -1], before):
            return None
        last = here[:, :, -1:]
        entering = torch.cat([before[:, None, None], last[:, :-1]], dim=1)  # (B, G, 1)
        return ChunkMasks(
            incoming=(here == entering)[:, :, None, :, None],
            outgoing=(here == last)[:, :, None, :, None],
            through=(entering == last)[:, :, None, :, None],
            pairs=(here[:, :, :, None] == here[:, :, None, :])[:, :, None],
        )


def cut_rows(num_tokens: int, chunk_size: int, batch_chunks: int) -> list[Chunks]:
    """Batches of ``batch_chunks`` whole chunks, from left to right, and the rest of T / C as one shorter chunk."""
    whole, rest = divmod(num_tokens, chunk_size)
    cuts = [
        Chunks(start=first * chunk_size, num_chunks=min(batch_chunks, whole - first), chunk_tokens=chunk_size)
        for first in range(0, whole, batch_chunks)
    ]
    if rest:
        cuts.append(Chunks(start=whole * chunk_size, num_chunks=1, chunk_tokens=rest))
    return cuts
