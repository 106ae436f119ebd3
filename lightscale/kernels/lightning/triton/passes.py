"""The passes of lightning attention on GPUs: the scan over the states of chunks, and the products of a chunk's tokens.

Each runs forward for outputs and in reverse for gradients; ``__init__.py`` composes them.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lightscale.kernels.common.angles import Angles, axes_of, turns_of
from lightscale.kernels.common.triton.documents import document_starts
from lightscale.kernels.common.triton.launch import LAUNCH, Splits, dense_last, on_device_of
from lightscale.kernels.lightning.triton.decays import gather_decays, sum_decays
from lightscale.kernels.lightning.triton.kernels import attend
from lightscale.kernels.lightning.triton.states import fold_splits, scan_states
from lightscale.kernels.lightning.triton.tiling import (
    DECAY_HEADS,
    FOLD_ELEMENTS,
    LightningTiling,
    attend_constants,
    scan_constants,
    tiling_of,
)


@dataclass(frozen=True, kw_only=True)
class ChunkedRows:
    """Data that all launches of one call share, here and in ``../../lion``."""

    num_rows: int
    num_tokens: int
    num_heads: int
    sums: Tensor | None
    """(B, H, 2, T) fp32: log decays of heads and tokens, summed up from the start of each chunk."""
    starts: Tensor | None
    device: torch.device
    tiling: LightningTiling

    @property
    def num_chunks(self) -> int:
        """Chunks of a row, the last one possibly shorter."""
        return -(-self.num_tokens // self.tiling.chunk)

    def empty(self, *inner: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """(B, H, *inner), not initialised."""
        return torch.empty(self.num_rows, self.num_heads, *inner, dtype=dtype, device=self.device)


@dataclass(frozen=True, kw_only=True)
class LightningRows(ChunkedRows):
    """Rows of lightning attention."""

    rate: Tensor | None
    """(H,) fp32: log decays of heads, which are not in ``sums``."""
    turns: Tensor | None
    positions: Tensor | None
    axes: int
    """Groups of heads with positions of their own."""

    @classmethod
    def of(
        cls, x: Tensor, log_decay: Tensor | None, cu_seqlens: Tensor | None, angles: Angles | None
    ) -> "LightningRows":
        """The rows of x (B, T, H, width)."""
        num_rows, num_tokens, num_heads = x.shape[:3]
        rate = sums = None
        if log_decay is not None and log_decay.dim() == 1:
            rate = log_decay.detach().float().contiguous()
        elif log_decay is not None:
            sums = summed(log_decay.detach().float(), tiling_of(x.dtype).chunk)
        return cls(
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_heads=num_heads,
            rate=rate,
            sums=sums,
            turns=None if angles is None else turns_of(angles.theta),
            positions=None if angles is None else angles.positions.contiguous(),
            axes=axes_of(angles),
            starts=document_starts(cu_seqlens, num_rows=num_rows, num_tokens=num_tokens),
            device=x.device,
            tiling=tiling_of(x.dtype),
        )

    @property
    def halves(self) -> int:
        """Halves of the features of queries and keys: 2 with angles, else 1."""
        return 1 if self.turns is None else 2

    @property
    def num_token_tiles(self) -> int:
        """Number of ``attend``'s tiles of tokens in a row."""
        return -(-self.num_tokens // self.tiling.tile_tokens)


def summed(log_decay: Tensor, chunk: int) -> Tensor:
    """The sums of log decays (B, T, H) of any strides."""
    num_rows, num_tokens, num_heads = log_decay.shape
    sums = torch.empty(num_rows, num_heads, 2, num_tokens, dtype=torch.float32, device=log_decay.device)
    if sums.numel():
        num_chunks = triton.cdiv(num_tokens, chunk)
        with on_device_of(sums):
            sum_decays[(num_rows * num_chunks * triton.cdiv(num_heads, DECAY_HEADS),)](
                log_decay,
                sums,
                num_tokens,
                num_heads,
                num_chunks,
                *log_decay.stride(),
                HEADS=DECAY_HEADS,
                CHUNK=chunk,
                **LAUNCH,
            )
    return sums


class LightningScanned(NamedTuple):
    """Results of a scan of the states."""

    chunks: Tensor | None
    """(B, H, N, F, V): the state that enters each chunk; in reverse, the cotangent of the leaving state."""
    final: Tensor
    """(B, H, F, V) fp32: the state that leaves the rows; in reverse, the cotangent of the entering state."""
    decay_parts: Tensor | None
    """(B, H, S, F tiles, V tiles) fp32, N instead of S for decays per token: the decays' gradient through splits."""


def scan(
    rows: LightningRows,
    x: Tensor,
    y: Tensor,
    entering: Tensor | None,
    *,
    reverse: bool,
    with_chunks: bool = True,
    other: Tensor | None = None,
) -> LightningScanned:
    """The states of k (B, T, H, K) and v (B, T, H, V), from the entering state; in reverse the cotangents, from q, do.

    ``other`` holds the chunk states of the forward scan, if a reverse scan computes dlog_decay.
    """
    x, y = dense_last(x), dense_last(y)
    constants = scan_constants(x.dtype, x.size(3), y.size(3))
    widths = rows.halves * x.size(3), y.size(3)
    tiles = (
        rows.halves * triton.cdiv(x.size(3), constants["BLOCK_K"]),
        triton.cdiv(y.size(3) - constants["EDGE"], constants["BLOCK_V"]),
    )
    num_programs = rows.num_rows * rows.num_heads * tiles[0] * tiles[1]
    splits = Splits.of(num_programs, rows.num_chunks, rows.device)
    of_tokens = rows.sums is not None
    parts = None if other is None else rows.empty(rows.num_chunks if of_tokens else splits.num_splits, *tiles)

    # In the dtype that dots read: fp32 would cost twice the bytes, and dots would round it.
    chunks = rows.empty(rows.num_chunks, *widths, dtype=rows.tiling.stored) if with_chunks else None
    kept = (chunks, other, parts)

    def launch(entering: Tensor | None, leaving: Tensor | None, split_through: Tensor | None, keep: bool) -> None:
        scan_states[(splits.num_programs * splits.num_splits,)](
            x,
            y,
            rows.turns,
            rows.positions,
            rows.rate,
            rows.sums,
            rows.starts,
            entering,
            leaving,
            split_through,
            *(kept if keep else (None, None, None)),
            rows.num_tokens,
            rows.num_heads,
            rows.num_chunks,
            splits.num_splits,
            splits.split_chunks,
            *x.stride()[:3],
            *y.stride()[:3],
            **constants,
            REVERSE=reverse,
            AXES=rows.axes,
            **LAUNCH,
            num_stages=rows.tiling.scan_stages,
        )

    final = rows.empty(*widths)
    fold = partial(fold_between, rows, rows.rate, split_chunks=splits.split_chunks, reverse=reverse)
    with on_device_of(x):
        splits.scan(launch, fold, entering, final, decays=() if of_tokens else None, keep=with_chunks)
    return LightningScanned(chunks, final, parts)


def fold_between(
    rows: ChunkedRows,
    rate: Tensor | None,
    local: Tensor,
    split_through: Tensor | None,
    initial: Tensor | None,
    between: Tensor | None,
    final: Tensor,
    *,
    split_chunks: int,
    reverse: bool,
) -> None:
    """The fold of ``Splits.scan``: the states that enter the splits to ``between``, the one that leaves to ``final``.

    rate: log decays of heads (H,), where ``through`` does not hold them.
    """
    num_elements = final.size(2) * final.size(3)
    fold_splits[(rows.num_rows * rows.num_heads * triton.cdiv(num_elements, FOLD_ELEMENTS),)](
        local,
        initial,
        rate,
        split_through,
        rows.starts,
        between,
        final,
        rows.num_tokens,
        rows.num_heads,
        local.size(2),
        split_chunks * rows.tiling.chunk,
        num_elements,
        ELEMENTS=FOLD_ELEMENTS,
        REVERSE=reverse,
        **LAUNCH,
    )


class Products(NamedTuple):
    """Results of the products of the tokens."""

    out: Tensor
    """The shape and dtype of z."""
    decay_parts: Tensor | None
    """(B, token tiles, H, tiles) fp32, with (…, C) for decays of tokens: their gradient by each tile."""
    dtheta: Tensor | None
    """(H, K) fp64."""


def products(
    rows: LightningRows,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    states: Tensor | None,
    *,
    reverse: bool,
    transposed: bool,
    own: Tensor | None = None,
    with_decay: bool = False,
    with_theta: bool = False,
) -> Products:
    """(x yᵀ ⊙ M) z + weight x S, (B, T, H, Z); as the gradient of ``own`` also its parts of dlog_decay and dtheta."""
    assert states is not None
    x, y, z = dense_last(x), dense_last(y), dense_last(z)
    own = dense_last(own) if own is not None and (with_decay or with_theta) else None
    constants = attend_constants(
        x.dtype, x.size(3), z.size(3), angles=rows.turns is not None, reverse=reverse, transposed=transposed
    )
    tiled = z.size(3) * rows.halves if transposed else z.size(3) - constants["EDGE"]
    tiles = triton.cdiv(tiled, constants["BLOCK_Z"])
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    shape = (rows.num_rows, rows.num_token_tiles, rows.num_heads, tiles)
    # One part per program, summed afterwards in a fixed order: atomic additions would not be reproducible.
    decay_parts = None
    if with_decay:
        of_each = () if rows.sums is None else (rows.tiling.chunk,)
        decay_parts = torch.empty(*shape, *of_each, dtype=torch.float32, device=z.device)
    angle_parts = None
    if with_theta:
        angle_parts = torch.empty(*shape[:3], 2, z.size(3), dtype=torch.float32, device=z.device)
    if out.numel():
        with on_device_of(x):
            attend[(rows.num_rows * rows.num_token_tiles * rows.num_heads * tiles,)](
                x,
                y,
                z,
                rows.turns,
                rows.positions,
                states,
                rows.rate,
                rows.sums,
                rows.starts,
                out,
                own,
                decay_parts,
                angle_parts,
                rows.num_tokens,
                rows.num_heads,
                rows.num_chunks,
                rows.num_token_tiles,
                *x.stride()[:3],
                *y.stride()[:3],
                *z.stride()[:3],
                *((0, 0, 0) if own is None else own.stride()[:3]),
                **constants,
                AXES=rows.axes,
                **LAUNCH,
                num_stages=rows.tiling.attend_stages,
            )
    dtheta = None if angle_parts is None else angle_parts.sum((0, 1, 3), dtype=torch.float64)
    return Products(out, decay_parts, dtheta)


def decay_gradient(rows: LightningRows, by_queries: Tensor, by_keys: Tensor, by_states: Tensor) -> Tensor:
    """dlog_decay (H,) or (B, T, H), fp32, from the parts of ``products`` for dq and dk, and of ``scan``."""
    if rows.sums is None:
        return by_queries.sum((0, 1, 3)) + by_keys.sum((0, 1, 3)) + by_states.sum((0, 2, 3, 4))
    shape = (rows.num_rows, rows.num_tokens, rows.num_heads)
    dlog_decay = torch.empty(shape, dtype=torch.float32, device=rows.device)
    if dlog_decay.numel():
        with on_device_of(dlog_decay):
            gather_decays[(rows.num_rows * rows.num_heads * rows.num_chunks,)](
                by_queries,
                by_keys,
                by_states,
                dlog_decay,
                rows.num_tokens,
                rows.num_heads,
                rows.num_chunks,
                rows.num_token_tiles,
                QUERY_TILES=by_queries.size(3),
                KEY_TILES=by_keys.size(3),
                STATE_TILES=by_states.size(3) * by_states.size(4),
                BLOCK_T=rows.tiling.tile_tokens,
                CHUNK=rows.tiling.chunk,
                **LAUNCH,
            )
    return dlog_decay
