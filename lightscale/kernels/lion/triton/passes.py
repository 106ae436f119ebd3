"""The passes of LION on GPUs: scans over the states of chunks from either end, and the products of a chunk's tokens.

The operator and its transpose, whose results are the gradients, are the same launches with swapped sums of log decays.
``__init__.py`` composes the passes.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lightscale.kernels.common.triton.documents import document_starts
from lightscale.kernels.common.triton.launch import LAUNCH, Splits, dense_last, on_device_of
from lightscale.kernels.lightning.triton.passes import ChunkedRows, fold_between, summed
from lightscale.kernels.lion.state import Gate
from lightscale.kernels.lion.triton.kernels import attend
from lightscale.kernels.lion.triton.states import scan_states
from lightscale.kernels.lion.triton.tiling import attend_constants, scan_constants, tiling_of


@dataclass(frozen=True, kw_only=True)
class LionRows(ChunkedRows):
    """Rows of LION; for decays of heads the sums have B = 1."""

    exclusive: bool
    """Whether sums before each token give the decay from the left, and sums through it the decay from the right."""
    normalize: bool

    @classmethod
    def of(
        cls, x: Tensor, log_decay: Tensor | None, cu_seqlens: Tensor | None, gate: Gate, *, normalize: bool
    ) -> "LionRows":
        """The rows of x (B, T, H, width)."""
        num_rows, num_tokens, num_heads = x.shape[:3]
        sums = None
        if log_decay is not None:
            by_token = log_decay.detach().float()
            by_token = by_token.expand(1, num_tokens, -1) if log_decay.dim() == 1 else by_token
            sums = summed(by_token, tiling_of(x.dtype).chunk)
        return cls(
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_heads=num_heads,
            sums=sums,
            starts=document_starts(cu_seqlens, num_rows=num_rows, num_tokens=num_tokens),
            exclusive=gate == "leave",
            normalize=normalize,
            device=x.device,
            tiling=tiling_of(x.dtype),
        )

    def transposed(self) -> "LionRows":
        """The rows of the transposed operator."""
        return replace(self, exclusive=not self.exclusive)

    @property
    def chunk_tiles(self) -> int:
        """Tiles of tokens of a chunk."""
        return self.tiling.chunk // self.tiling.tile_tokens

    @property
    def stride_sums(self) -> int:
        """Stride of the rows of ``sums``."""
        return 0 if self.sums is None or self.sums.size(0) == 1 else self.sums.stride(0)


class LionChunkStates(NamedTuple):
    """The states that enter the chunks on one side."""

    states: Tensor
    """(B, H, N, K, V), in the dtype in which dots read it."""
    columns: Tensor | None
    """(B, H, N, K) fp32: the normaliser's column."""


class LionScanned(NamedTuple):
    """Results of a scan of one side's states."""

    chunks: LionChunkStates | None
    final: Tensor
    """(B, H, K, W) fp32: the state that leaves the rows."""
    decay_parts: Tensor | None
    """(B, H, N) fp32: the decays' gradient through each chunk."""


def scan(
    rows: LionRows,
    x: Tensor,
    y: Tensor,
    last: Tensor | None,
    entering: Tensor | None,
    *,
    reverse: bool,
    with_chunks: bool = True,
    other: LionChunkStates | None = None,
) -> LionScanned:
    """The states of x and [y, last], from the state that enters the rows on the left, or in reverse on the right.

    For the decays' gradient, ``other`` holds the states whose cotangents are scanned.
    """
    x, y = dense_last(x), dense_last(y)
    widths = x.size(3), y.size(3) + rows.normalize
    constants = scan_constants(x.dtype, x.size(3), y.size(3))
    tiles = triton.cdiv(x.size(3), constants["BLOCK_K"]), triton.cdiv(y.size(3), constants["BLOCK_V"])
    splits = Splits.of(rows.num_rows * rows.num_heads * tiles[0] * tiles[1], rows.num_chunks, rows.device)
    parts = None if other is None else rows.empty(rows.num_chunks, *tiles)
    chunks = None
    if with_chunks:
        states = rows.empty(rows.num_chunks, x.size(3), y.size(3), dtype=rows.tiling.stored)
        chunks = LionChunkStates(states, rows.empty(rows.num_chunks, x.size(3)) if rows.normalize else None)

    kept = (*(chunks or (None, None)), *(other or (None, None)), parts)

    def launch(entering: Tensor | None, leaving: Tensor | None, split_through: Tensor | None, keep: bool) -> None:
        scan_states[(splits.num_programs * splits.num_splits,)](
            x,
            y,
            last,
            rows.sums,
            rows.starts,
            entering,
            leaving,
            split_through,
            *(kept if keep else [None] * len(kept)),
            rows.num_tokens,
            rows.num_heads,
            rows.num_chunks,
            splits.num_splits,
            splits.split_chunks,
            rows.stride_sums,
            *x.stride()[:3],
            *y.stride()[:3],
            **constants,
            REVERSE=reverse,
            # From the right the sums swap.
            EXCLUSIVE=rows.exclusive != reverse,
            NORMALIZE=rows.normalize,
            **LAUNCH,
            num_stages=rows.tiling.scan_stages,
        )

    final = rows.empty(*widths)
    fold = partial(fold_between, rows, None, split_chunks=splits.split_chunks, reverse=reverse)
    with on_device_of(x):
        splits.scan(launch, fold, entering, final, decays=None if rows.sums is None else (), keep=with_chunks)
    return LionScanned(chunks, final, None if parts is None else parts.sum((3, 4)))


class LionProducts(NamedTuple):
    """Results of the products of the tokens."""

    out: Tensor
    """The shape and dtype of z."""
    normalizer: Tensor | None
    """(B, T, H) fp32."""
    crossing: Tensor | None
    """(B, H, N, C) fp32: the decays' gradient by the pairs of one direction and the reads from it."""
    right: Tensor | None
    """(B, H, N, C) fp32: each token's part of this gradient by its reads from the right, across all tokens behind."""


def products(
    rows: LionRows,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    prefix: LionChunkStates | None,
    suffix: LionChunkStates | None,
    *,
    transposed: bool,
    x_last: Tensor | None = None,
    y_last: Tensor | None = None,
    eps: float | None = None,
    own: Tensor | None = None,
) -> LionProducts:
    """(x yᵀ ⊙ M) z + weights x S of both sides.

    x_last, y_last: (B, T, H), the normaliser's column of x or y, whose partners are ones. eps: divide by the sums of
    the scores plus eps. own: the tensor whose gradient is computed, if the decays' gradient is requested too.
    """
    assert prefix is not None and suffix is not None
    x, y, z = dense_last(x), dense_last(y), dense_last(z)
    own = None if own is None else dense_last(own)
    constants = attend_constants(x.dtype, x.size(3), z.size(3), transposed=transposed, learned=own is not None)
    tiles = triton.cdiv(z.size(3), constants["BLOCK_Z"])
    num_token_tiles = rows.num_chunks * rows.chunk_tiles
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    normalizer = None if eps is None else torch.empty(z.shape[:3], dtype=torch.float32, device=z.device)
    with_columns = eps is not None or x_last is not None or y_last is not None
    crossing = right = None
    if own is not None:
        # One part per program, summed afterwards in a fixed order: atomic additions would not be reproducible.
        shape = (rows.num_rows, num_token_tiles, rows.num_heads, tiles)
        crossing = torch.zeros(*shape, rows.tiling.chunk, device=z.device)
        right = torch.zeros(*shape, rows.tiling.tile_tokens, device=z.device)
    if out.numel():
        with on_device_of(x):
            attend[(rows.num_rows * num_token_tiles * rows.num_heads * tiles,)](
                x,
                y,
                z,
                x_last,
                y_last,
                prefix.states,
                suffix.states,
                prefix.columns if with_columns else None,
                suffix.columns if with_columns else None,
                rows.sums,
                rows.starts,
                out,
                normalizer,
                own,
                crossing,
                right,
                rows.num_tokens,
                rows.num_heads,
                rows.num_chunks,
                num_token_tiles,
                eps or 0.0,
                rows.stride_sums,
                *x.stride()[:3],
                *y.stride()[:3],
                *z.stride()[:3],
                *((0, 0, 0) if own is None else own.stride()[:3]),
                **constants,
                EXCLUSIVE=rows.exclusive,
                **LAUNCH,
                num_stages=rows.tiling.attend_stages,
            )
    if crossing is not None and right is not None:
        by_chunk = (rows.num_chunks, rows.chunk_tiles)
        crossing = crossing.unflatten(1, by_chunk).sum((2, 4)).transpose(1, 2)
        right = right.sum(3).unflatten(1, by_chunk).permute(0, 3, 1, 2, 4).flatten(3)
    return LionProducts(out, normalizer, crossing, right)


def decay_gradient(rows: LionRows, dq: LionProducts, dk: LionProducts, through: Tensor) -> Tensor:
    """dlog_decay (B, T, H), fp32, from the parts of dq and dk and the part (B, H, N) through the chunks."""
    assert dq.crossing is not None and dq.right is not None and dk.crossing is not None and dk.right is not None
    of_tokens = dq.crossing + dk.crossing + through[..., None]
    # Token s' reads from the right cross the gates behind s, and its own gate where sums are not exclusive.
    for parts, exclusive in ((dq.right, rows.exclusive), (dk.right, not rows.exclusive)):
        upto = parts.cumsum(-1)
        of_tokens = of_tokens + (torch.nn.functional.pad(upto, (1, -1)) if exclusive else upto)
    return of_tokens.permute(0, 2, 3, 1).flatten(1, 2)[:, : rows.num_tokens]
