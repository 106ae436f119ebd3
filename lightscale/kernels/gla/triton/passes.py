"""The passes of gated linear attention on GPUs: decays, states of chunks, outputs and gradients; host side.

``__init__.py`` composes them.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lightscale.kernels.common.triton.documents import document_starts
from lightscale.kernels.common.triton.launch import LAUNCH, Splits, dense_last, on_device_of
from lightscale.kernels.gla.triton.decays import prepare
from lightscale.kernels.gla.triton.gradients import gradients
from lightscale.kernels.gla.triton.kernels import attend, fold_splits, scan_states
from lightscale.kernels.gla.triton.tiling import (
    FOLD_ELEMENTS,
    GLATiling,
    attend_constants,
    gradient_constants,
    prepare_constants,
    scan_constants,
    tiling_of,
)


@dataclass(frozen=True, kw_only=True)
class GLARows:
    """Data that all launches of one call share."""

    num_rows: int
    num_tokens: int
    num_heads: int
    log_decay: Tensor
    """(B, T, H, K) fp32."""
    starts: Tensor | None
    device: torch.device
    dtype: torch.dtype
    tiling: GLATiling

    @classmethod
    def of(cls, x: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None) -> "GLARows":
        """The rows of x (B, T, H, width)."""
        num_rows, num_tokens, num_heads = x.shape[:3]
        return cls(
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_heads=num_heads,
            log_decay=dense_last(log_decay.detach().float()),
            starts=document_starts(cu_seqlens, num_rows=num_rows, num_tokens=num_tokens),
            device=x.device,
            dtype=x.dtype,
            tiling=tiling_of(x.dtype),
        )

    @property
    def num_chunks(self) -> int:
        """Chunks of a row, the last one possibly shorter."""
        return -(-self.num_tokens // self.tiling.chunk)

    @property
    def key_width(self) -> int:
        """K."""
        return self.log_decay.size(3)

    def empty(self, *inner: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """(B, H, *inner), not initialised."""
        return torch.empty(self.num_rows, self.num_heads, *inner, dtype=dtype, device=self.device)

    def tokens(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """(B, T, H, width), not initialised, in the inputs' dtype by default."""
        shape = (self.num_rows, self.num_tokens, self.num_heads, width)
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


@lru_cache
def paths_on(device: torch.device, chunk: int, dtype: torch.dtype) -> Tensor:
    """The 0/1 matrices (levels + 2, C, C) of the sums between token i and a border: 1 for each token s on the path.

    Number n, below log2 C: the border between the two neighbouring halves of 2^n tokens around i. The path is from the
    second half's start through i, or from behind i to the first half's end. The last two numbers: from behind i to the
    chunk's end, and from its start through i.
    """
    levels = torch.arange(chunk.bit_length() + 1, device=device)[:, None, None]
    i, s = torch.arange(chunk, device=device)[:, None], torch.arange(chunk, device=device)
    # At the last two levels the chunk is one half of its parent: the first, then the second.
    second = torch.where(levels > chunk.bit_length() - 1, 1, i >> levels & 1) == 1
    return ((i >> levels == s >> levels) & torch.where(second, s <= i, s > i)).to(dtype)


class Prepared(NamedTuple):
    """The chunks' results that need decays and no values; None unless requested."""

    q_in: Tensor | None
    """(B, T, H, K): queries decayed from the start of their chunk; 0 where they do not read the entering state."""
    k_out: Tensor | None
    """(B, T, H, K): keys decayed to the end of their chunk; 0 where they do not reach the leaving state."""
    through: Tensor
    """(B, H, N, K) fp32: the decay through each chunk; 0 where a document begins in it."""
    scores: Tensor | None
    """(B, H, N, C, C) of pairs of tokens, with their decay."""


def decayed(rows: GLARows, q: Tensor | None, k: Tensor | None) -> Prepared:
    """Apply the decays to q or k (B, T, H, K), or, if both are given, to both and to each pair of tokens."""
    q, k = (None if x is None else dense_last(x) for x in (q, k))
    width, chunk = rows.key_width, rows.tiling.chunk
    q_in, k_out = (None if x is None else rows.tokens(width) for x in (q, k))
    through = rows.empty(rows.num_chunks, width)
    scores = None if q is None or k is None else rows.empty(rows.num_chunks, chunk, chunk, dtype=rows.dtype)
    if through.numel():
        with on_device_of(through):
            prepare[(rows.num_rows * rows.num_chunks * rows.num_heads,)](
                q,
                k,
                rows.log_decay,
                paths_on(rows.device, rows.tiling.chunk, rows.tiling.stored),
                rows.starts,
                q_in,
                k_out,
                through,
                scores,
                rows.num_tokens,
                rows.num_heads,
                rows.num_chunks,
                *_strides(q),
                *_strides(k),
                *_strides(rows.log_decay),
                **prepare_constants(rows.dtype, width),
                **LAUNCH,
                num_stages=1,
            )
    return Prepared(q_in, k_out, through, scores)


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


class GLAScanned(NamedTuple):
    """Results of a scan of the states."""

    chunks: Tensor | None
    """(B, H, N, K, V): the state that enters each chunk; in reverse, the cotangent of the leaving state."""
    final: Tensor
    """(B, H, K, V) fp32: the state that leaves the rows; in reverse, the cotangent of the entering state."""


def scan(
    rows: GLARows,
    x: Tensor | None,
    y: Tensor,
    through: Tensor,
    entering: Tensor | None,
    *,
    reverse: bool,
    with_chunks: bool = True,
) -> GLAScanned:
    """The states of k_out and v (B, T, H, width), from the entering state; in reverse cotangents, from q_in and do."""
    assert x is not None
    y = dense_last(y)
    widths = x.size(3), y.size(3)
    constants = scan_constants(x.dtype, *widths)
    tiles = triton.cdiv(widths[0], constants["BLOCK_K"]) * triton.cdiv(widths[1], constants["BLOCK_V"])
    num_programs = rows.num_rows * rows.num_heads * tiles
    splits = Splits.of(num_programs, rows.num_chunks, rows.device)

    # In the dtype that dots read: fp32 would cost twice the bytes, and dots would round it.
    chunks = rows.empty(rows.num_chunks, *widths, dtype=rows.tiling.stored) if with_chunks else None

    def launch(entering: Tensor | None, leaving: Tensor | None, split_through: Tensor | None, keep: bool) -> None:
        scan_states[(splits.num_programs * splits.num_splits,)](
            x,
            y,
            through,
            entering,
            leaving,
            split_through,
            chunks if keep else None,
            rows.num_tokens,
            rows.num_heads,
            rows.num_chunks,
            splits.num_splits,
            splits.split_chunks,
            *y.stride()[:3],
            **constants,
            REVERSE=reverse,
            **LAUNCH,
            num_stages=rows.tiling.scan_stages,
        )

    final = rows.empty(*widths)
    with on_device_of(y):
        splits.scan(launch, partial(_fold, reverse=reverse), entering, final, decays=widths[:1], keep=with_chunks)
    return GLAScanned(chunks, final)


def _fold(
    local: Tensor,
    through: Tensor | None,
    initial: Tensor | None,
    between: Tensor | None,
    final: Tensor,
    *,
    reverse: bool,
) -> None:
    """Write the states that enter the splits to ``between``, and the state that leaves the last split to ``final``."""
    num_rows, num_heads, num_splits, K, V = local.shape
    fold_splits[(num_rows * num_heads * triton.cdiv(K * V, FOLD_ELEMENTS),)](
        local,
        through,
        initial,
        between,
        final,
        num_splits,
        K=K,
        V=V,
        ELEMENTS=FOLD_ELEMENTS,
        REVERSE=reverse,
        **LAUNCH,
    )


def outputs(
    rows: GLARows, x: Tensor | None, scores: Tensor | None, z: Tensor, states: Tensor | None, *, reverse: bool
) -> Tensor:
    """scores z + x S (B, T, H, V): o from q_in, v and the states; in reverse dv from k_out, do and the cotangents."""
    assert x is not None and scores is not None and states is not None
    z = dense_last(z)
    out = rows.tokens(z.size(3), z.dtype)
    constants = attend_constants(rows.dtype, x.size(3), z.size(3))
    if out.numel():
        tiles = triton.cdiv(z.size(3), constants["BLOCK_V"])
        with on_device_of(z):
            attend[(rows.num_rows * rows.num_chunks * rows.num_heads * tiles,)](
                x,
                scores,
                z,
                states,
                rows.starts,
                out,
                rows.num_tokens,
                rows.num_heads,
                rows.num_chunks,
                *z.stride()[:3],
                **constants,
                REVERSE=reverse,
                **LAUNCH,
                num_stages=rows.tiling.attend_stages,
            )
    return out


def key_gradients(
    rows: GLARows,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    states: Tensor | None,
    dstates: Tensor | None,
    through: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dlog_decay (fp32), from q, k, v, do, and the states of chunks with their cotangents."""
    q, k, v, do = (dense_last(x) for x in inputs)
    width = rows.key_width
    dq, dk, dlog_decay = rows.tokens(width), rows.tokens(width), rows.tokens(width, torch.float32)
    constants = gradient_constants(rows.dtype, width, v.size(3))
    if dq.numel():
        tiles = triton.cdiv(width, constants["BLOCK_K"])
        with on_device_of(q):
            gradients[(rows.num_rows * rows.num_chunks * rows.num_heads * tiles,)](
                q,
                k,
                v,
                rows.log_decay,
                paths_on(rows.device, rows.tiling.chunk, rows.tiling.stored),
                do,
                states,
                dstates,
                through,
                rows.starts,
                dq,
                dk,
                dlog_decay,
                rows.num_tokens,
                rows.num_heads,
                rows.num_chunks,
                *q.stride()[:3],
                *k.stride()[:3],
                *v.stride()[:3],
                *rows.log_decay.stride()[:3],
                *do.stride()[:3],
                **constants,
                **LAUNCH,
                num_stages=rows.tiling.gradient_stages,
            )
    return dq, dk, dlog_decay
