"""The grid of chunks over the rows of the scan: where tokens stand in it, and powers of the decays.

Names of shapes: B rows, T tokens, D channels, E modes. A row is cut into N chunks of C places. Every document
begins with a new chunk, so that no chunk holds two; the places behind its last token stay empty.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightscale.kernels.common.documents import fragment_numbers

# Tokens of all rows that are computed at once, so that a block of channels stays in the cache, and the least
# number of chunks of a row, below which the one empty chunk beside them would count.
_SPAN_TOKENS = 4096
_LEAST_CHUNKS = 8


def powers(log_decay: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """λ^steps, shape (*steps.shape, E), made in fp64 and rounded once; right for λ = 0, where 0 · (-inf) is NaN."""
    steps = steps.unsqueeze(-1)
    return torch.where(steps > 0, steps * log_decay.detach().double(), 0.0).exp().to(dtype)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How B rows of T tokens lie in (B, N, C) places."""

    num_tokens: int
    chunk_size: int
    lengths: Tensor  # (B, N): tokens of each chunk; rows of fewer chunks end with empty ones
    places: Tensor | None  # (B, T): the place of each token; None when that is t
    begins: Tensor | None  # (B, N): a document begins here, and zeros enter; None when there is none

    @property
    def last(self) -> tuple[Tensor, Tensor]:
        """The number of each row's last chunk that holds tokens (B,), and how many it holds (B,); T must not be 0."""
        last = (self.lengths > 0).sum(1) - 1
        return last, self.lengths.gather(1, last.unsqueeze(1)).squeeze(1)

    def load(self, x: Tensor, dtype: torch.dtype, *, shift: int) -> Tensor:
        """A copy of x (B, T, width) by channel and place, (width, B, N+1, C), with 0 in empty places.

        ``shift`` 0 leaves the last of the N+1 chunks empty, 1 the first.
        """
        num_rows, num_chunks = self.lengths.shape
        width = x.shape[2]
        by_place = x.new_zeros(num_rows, (num_chunks + 1) * self.chunk_size, width, dtype=dtype)
        if self.places is None:
            by_place[:, shift * self.chunk_size :][:, : self.num_tokens] = x
        else:
            by_place.flatten(0, 1).index_copy_(0, self._flat_places(shift), x.to(dtype).flatten(0, 1))
        # Contiguous on both sides, because only then torch transposes by blocks.
        by_channel = by_place.new_empty(width, by_place[..., 0].numel())
        by_channel.copy_(by_place.view(-1, width).t())
        return by_channel.view(width, num_rows, num_chunks + 1, self.chunk_size)

    def store(self, out: Tensor, x: Tensor, *, shift: int) -> None:
        """Write x (width, B, N+1, C) to the tokens of out (B, T, width); ``shift`` as that of ``load``."""
        width, num_rows = x.shape[:2]
        by_place = x.new_empty(x[0].numel(), width).copy_(x.view(width, -1).t())
        if self.places is None:
            out.copy_(by_place.view(num_rows, -1, width)[:, shift * self.chunk_size :][:, : self.num_tokens])
        else:
            out.copy_(by_place.index_select(0, self._flat_places(shift)).view(out.shape))

    def _flat_places(self, shift: int) -> Tensor:
        """The place (B·T,) of each token among those of all rows, with N+1 chunks each."""
        assert self.places is not None
        num_rows, num_chunks = self.lengths.shape
        rows = torch.arange(num_rows, device=self.places.device).unsqueeze(1) * (num_chunks + 1)
        return ((rows + shift) * self.chunk_size + self.places).flatten()


class Span(NamedTuple):
    """Neighbouring tokens of every row that are computed at once."""

    tokens: slice
    grid: Grid
    kept: Tensor | None  # (B, T of the span): tokens of the document that leaves the span; None when all are
    passes: Tensor | None  # (B,): the document that enters the span leaves it; None when that is so in every row


def spans(x: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> list[Span]:
    """Cut the rows of x (B, T, D) from left to right, so that a block of channels stays in the cache."""
    num_rows, num_tokens, _ = x.shape
    fragments = None
    if cu_seqlens is not None:
        fragments = fragment_numbers(cu_seqlens, num_rows=num_rows, num_tokens=num_tokens)
    size = chunk_size * max(_LEAST_CHUNKS, _SPAN_TOKENS // (chunk_size * max(1, num_rows)))
    cuts = [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]
    return [_span(x[:, cut], cut, fragments, chunk_size) for cut in cuts]


def _span(x: Tensor, tokens: slice, fragments: Tensor | None, chunk_size: int) -> Span:
    """The span of the rows of x (B, T, D), T > 0, which are the ``tokens`` of ``fragments``."""
    num_rows, num_tokens, _ = x.shape
    if fragments is not None:
        here, first = fragments[:, tokens], max(tokens.start - 1, 0)
        starts = here.diff(dim=1, prepend=fragments[:, first, None]) > 0
        if starts.any():
            kept, passes = here == here[:, -1:], ~starts.any(1)
            return Span(tokens, _grid_of_documents(starts, chunk_size), kept, passes)
    num_chunks = -(-num_tokens // chunk_size)
    lengths = torch.full((num_rows, num_chunks), chunk_size, device=x.device)
    lengths[:, -1] = num_tokens - (num_chunks - 1) * chunk_size
    grid = Grid(num_tokens=num_tokens, chunk_size=chunk_size, lengths=lengths, places=None, begins=None)
    return Span(tokens, grid, None, None)


def _grid_of_documents(starts: Tensor, chunk_size: int) -> Grid:
    """The grid of rows in which documents begin where ``starts`` (B, T) says."""
    num_rows, num_tokens = starts.shape
    token = torch.arange(num_tokens, device=starts.device).expand(num_rows, -1)
    place = (token - torch.where(starts, token, 0).cummax(1).values) % chunk_size
    chunk = (place == 0).cumsum(1) - 1
    counts = chunk.new_zeros(num_rows, int(chunk[:, -1].max()) + 1)
    return Grid(
        num_tokens=num_tokens,
        chunk_size=chunk_size,
        lengths=counts.scatter_add(1, chunk, torch.ones_like(chunk)),
        places=chunk * chunk_size + place,
        begins=counts.scatter_add(1, chunk, starts.long()) > 0,
    )
