"""The passes of the delta rule on GPUs: work without values, states with outputs, and gradients; host side.

``__init__.py`` composes them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lightscale.kernels.common.triton.documents import document_starts
from lightscale.kernels.common.triton.launch import LAUNCH, Splits, dense_last, on_device_of
from lightscale.kernels.delta_rule.triton.gradients import gradients_channels, gradients_heads
from lightscale.kernels.delta_rule.triton.pairs import prepare_channels, prepare_heads
from lightscale.kernels.delta_rule.triton.states import scan_back, scan_forward
from lightscale.kernels.delta_rule.triton.tiling import (
    DeltaTiling,
    gradient_constants,
    prepare_constants,
    scan_constants,
    tiling_of,
)
from lightscale.kernels.gla.triton.passes import paths_on


@dataclass(frozen=True, kw_only=True)
class DeltaRows:
    """Data that all launches of one call share."""

    num_rows: int
    num_tokens: int
    num_heads: int
    """N, of the values."""
    groups: int
    """Heads of values for each of queries and keys."""
    key_width: int
    log_decay: Tensor | None
    """fp32: (B, N, T), contiguous, of each head; (B, T, N, K) of each channel; None for none."""
    beta: Tensor
    """(B, N, T) fp32, contiguous."""
    starts: Tensor | None
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, k: Tensor, log_decay: Tensor | None, beta: Tensor, cu_seqlens: Tensor | None) -> "DeltaRows":
        """The rows of k (B, T, H, K), log_decay (B, T, N), (B, T, N, K) or None, and beta (B, T, N)."""
        num_rows, num_tokens, num_heads = beta.shape
        if log_decay is not None:
            wide = log_decay.detach().float()
            log_decay = dense_last(wide) if wide.dim() == 4 else wide.transpose(1, 2).contiguous()
        return cls(
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_heads=num_heads,
            groups=num_heads // k.size(2),
            key_width=k.size(3),
            log_decay=log_decay,
            beta=beta.detach().float().transpose(1, 2).contiguous(),
            starts=document_starts(cu_seqlens, num_rows=num_rows, num_tokens=num_tokens),
            device=k.device,
            dtype=k.dtype,
        )

    @property
    def by_channel(self) -> bool:
        """Whether each channel has a decay of its own."""
        return self.log_decay is not None and self.log_decay.dim() == 4

    @property
    def tiling(self) -> DeltaTiling:
        """The tiling for the inputs' dtype."""
        return tiling_of(self.dtype)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.tiling.chunk

    @property
    def num_chunks(self) -> int:
        """Chunks of a row, the last one possibly shorter."""
        return -(-self.num_tokens // self.chunk)

    def empty(self, *inner: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """(B, N, *inner), not initialised."""
        return torch.empty(self.num_rows, self.num_heads, *inner, dtype=dtype, device=self.device)

    def tokens(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """(B, T, N, width), not initialised, in the inputs' dtype by default."""
        shape = (self.num_rows, self.num_tokens, self.num_heads, width)
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def pairs(self) -> Tensor:
        """(B, N, X, C, C), not initialised, in the inputs' dtype."""
        return self.empty(self.num_chunks, self.chunk, self.chunk, dtype=self.dtype)

    def splits(self, width: int) -> Splits:
        """Splits of the scans of states with ``width`` columns."""
        block = scan_constants(self.dtype, self.key_width, width)["BLOCK_V"]
        tiles = triton.cdiv(width, block)
        return Splits.of(self.num_rows * self.num_heads * tiles, self.num_chunks, self.device)


class PreparedChunks(NamedTuple):
    """The chunks' results that need no values, and the queries and keys that scans read; see ``states.py``."""

    q_in: Tensor | None
    k_in: Tensor
    k_out: Tensor
    upto: Tensor | None
    after: Tensor | None
    through: Tensor
    corrections: Tensor
    scores: Tensor | None
    groups: int
    """Heads of values for each head of ``q_in``, ``k_in`` and ``k_out``."""


def prepared(rows: DeltaRows, q: Tensor | None, k: Tensor) -> PreparedChunks:
    """The operands of scans, from q and k (B, T, H, K); without queries, none of the outputs' operands."""
    q, k = None if q is None else dense_last(q), dense_last(k)
    scores, corrections = None if q is None else rows.pairs(), rows.pairs()
    grid = (rows.num_rows * rows.num_chunks * rows.num_heads,)
    constants = prepare_constants(rows.dtype, rows.key_width, by_channel=rows.by_channel) | {"GROUPS": rows.groups}
    sizes = (rows.num_tokens, rows.num_heads, rows.num_chunks)
    strides = (*_strides(q), *_strides(k))
    if not rows.by_channel:
        upto, after = rows.empty(rows.num_tokens), rows.empty(rows.num_tokens)
        through = rows.empty(rows.num_chunks)
        if through.numel():
            with on_device_of(k):
                prepare_heads[grid](
                    *(q, k, rows.log_decay, rows.beta, rows.starts),
                    *(upto, after, through, scores, corrections),
                    *sizes,
                    *strides,
                    **constants,
                    **LAUNCH,
                    num_stages=1,
                )
        return PreparedChunks(q, k, k, upto, after, through, corrections, scores, rows.groups)
    q_in = None if q is None else rows.tokens(rows.key_width)
    k_in, k_out = rows.tokens(rows.key_width), rows.tokens(rows.key_width)
    through = rows.empty(rows.num_chunks, rows.key_width)
    if through.numel():
        with on_device_of(k):
            prepare_channels[grid](
                *(q, k, rows.log_decay, rows.beta, paths_on(rows.device, rows.chunk, rows.tiling.stored), rows.starts),
                *(q_in, k_in, k_out, through, scores, corrections),
                *sizes,
                *strides,
                *_strides(rows.log_decay),
                **constants,
                **LAUNCH,
                num_stages=1,
            )
    return PreparedChunks(q_in, k_in, k_out, None, None, through, corrections, scores, 1)


class Scanned(NamedTuple):
    """Results of the scan of the states; None unless requested."""

    o: Tensor | None
    final: Tensor
    """(B, N, K, V) fp32: the state that leaves the rows."""
    chunks: Tensor | None
    """(B, N, X, K, V): the state that enters each chunk."""
    z: Tensor | None
    """(B, T, N, V): the writes without their factor β."""
    transitions: Tensor | None
    """(B, N, S, K, K) fp32: the transition of a state by each split; None with one split."""


def scan(
    rows: DeltaRows,
    of: PreparedChunks,
    v: Tensor,
    entering: Tensor | None,
    *,
    outputs: bool = False,
    chunks: bool = False,
) -> Scanned:
    """The states for v (B, T, N, V), from ``entering`` (B, N, K, V) or zero, which enters the rows.

    ``outputs``: also o (B, T, N, V); ``chunks``: also the operands of the gradients.
    """
    v = dense_last(v)
    width = v.size(3)
    splits = rows.splits(width)
    o = rows.tokens(width) if outputs else None
    z = rows.tokens(width) if chunks else None
    # In the dtype that dots read: fp32 would cost twice the bytes, and dots would round it.
    states = rows.empty(rows.num_chunks, rows.key_width, width, dtype=rows.tiling.stored) if chunks else None
    keep = outputs or chunks
    transitions = _transitions(rows, of, splits) if splits.num_splits > 1 else None

    def launch(entering: Tensor | None, leaving: Tensor | None, _: Tensor | None, keep: bool) -> None:
        found = (states, z, o) if keep else (None, None, None)
        _scan_forward(rows, of, v, splits, entering, leaving, *found)

    def fold(local: Tensor, _: Tensor | None, initial: Tensor | None, between: Tensor | None, final: Tensor) -> None:
        assert transitions is not None
        final.copy_(_fold(transitions, local, initial, between))

    final = rows.empty(rows.key_width, width)
    with on_device_of(v):
        splits.scan(launch, fold, entering, final, decays=None, keep=keep)
    return Scanned(o, final, states, z, transitions)


def through_rows(rows: DeltaRows, of: PreparedChunks) -> Tensor:
    """The transition M (B, N, K, K) of a state by the rows."""
    splits = rows.splits(rows.key_width)
    found = _transitions(rows, of, splits)
    if splits.num_splits == 1:
        return found[:, :, 0]
    unit = torch.eye(rows.key_width, device=rows.device).expand(found[:, :, 0].shape)
    return _fold(found, torch.zeros_like(found), unit, None)


def scan_reverse(
    rows: DeltaRows,
    of: PreparedChunks,
    do: Tensor,
    entering: Tensor | None,
    *,
    z: Tensor | None = None,
    transitions: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """The cotangents of states, from the cotangent of the state that leaves the rows; ``z``: also dv and dbeta.

    Args:
        rows: data of the call.
        of: results of ``prepared``, with scores.
        do: cotangents of the outputs (B, T, N, V).
        entering: the cotangent (B, N, K, V) of the state that leaves the rows, or None for zero.
        z: z of ``scan``.
        transitions: transitions of ``scan``, if computed.

    Returns:
        The cotangent (B, N, X, K, V) of the state that leaves each chunk; dv (B, T, N, V) and dbeta (B, T, N), or None
        without ``z``. And the cotangent (B, N, K, V) of the state that enters the rows.
    """
    do = dense_last(do)
    width = do.size(3)
    splits = rows.splits(width)
    if splits.num_splits > 1 and transitions is None:
        transitions = _transitions(rows, of, splits)
    constants = scan_constants(rows.dtype, rows.key_width, width)
    tiles = triton.cdiv(width, constants["BLOCK_V"])
    states = dv = dbeta = None
    if z is not None:
        states = rows.empty(rows.num_chunks, rows.key_width, width, dtype=rows.tiling.stored)
        dv = rows.tokens(width)
        shape = (tiles, rows.num_rows, rows.num_heads, rows.num_tokens)
        dbeta = torch.empty(shape, dtype=torch.float32, device=rows.device)

    def launch(entering: Tensor | None, leaving: Tensor | None, _: Tensor | None, keep: bool) -> None:
        assert of.q_in is not None
        found: tuple[Tensor | None, ...] = (states, dv, dbeta) if keep else (None, None, None)
        scan_back[(splits.num_programs * splits.num_splits,)](
            *(of.q_in, of.k_in, of.k_out, do, rows.beta, of.upto, of.after, of.through, of.corrections, of.scores),
            *(rows.starts, z if keep else None, entering, leaving, *found),
            *(rows.num_tokens, rows.num_heads, rows.num_chunks, splits.num_splits, splits.split_chunks),
            rows.beta.numel(),
            *_strides(of.q_in),
            *_strides(of.k_in),
            *_strides(do),
            GROUPS=of.groups,
            **constants,
            **LAUNCH,
            num_stages=rows.tiling.scan_stages,
        )

    def fold(local: Tensor, _: Tensor | None, initial: Tensor | None, between: Tensor | None, final: Tensor) -> None:
        assert transitions is not None
        final.copy_(_fold(transitions, local, initial, between, reverse=True))

    final = rows.empty(rows.key_width, width)
    with on_device_of(do):
        splits.scan(launch, fold, entering, final, decays=None, keep=z is not None)
    return states, dv, None if dbeta is None else dbeta.sum(0).transpose(1, 2), final


def key_gradients(
    rows: DeltaRows,
    inputs: tuple[Tensor, Tensor, Tensor],
    of: PreparedChunks,
    found: tuple[Tensor, Tensor],
    states: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dq, dk (B, T, N, K), one head per head of values, and dlog_decay (fp32) or None.

    Args:
        rows: data of the call.
        inputs: q, k and do.
        of: results of ``prepared``.
        found: dv and z.
        states: the chunks' states and their cotangents.
    """
    q, k, do = (dense_last(x) for x in inputs)
    width = rows.key_width
    dq, dk = rows.tokens(width), rows.tokens(width)
    constants = gradient_constants(rows.dtype, width, do.size(3), by_channel=rows.by_channel)
    constants["GROUPS"] = rows.groups
    tiles = triton.cdiv(width, constants["BLOCK_K"])
    grid = (rows.num_rows * rows.num_chunks * rows.num_heads * tiles,)
    sizes = (rows.num_tokens, rows.num_heads, rows.num_chunks)
    options: dict[str, Any] = {**constants, **LAUNCH, "num_stages": 1}
    if rows.by_channel:
        dlog_decay = rows.tokens(width, torch.float32)
        if dq.numel():
            with on_device_of(q):
                gradients_channels[grid](
                    *(q, k, rows.log_decay, rows.beta, paths_on(rows.device, rows.chunk, rows.tiling.stored)),
                    *(of.through, rows.starts, do, *found, *states, dq, dk, dlog_decay),
                    *sizes,
                    *(*_strides(q), *_strides(k), *_strides(rows.log_decay), *_strides(do)),
                    **options,
                )
        return dq, dk, dlog_decay
    parts = None
    if rows.log_decay is not None:
        shape = (tiles, rows.num_rows, rows.num_heads, rows.num_tokens)
        parts = torch.empty(shape, dtype=torch.float32, device=rows.device)
    if dq.numel():
        with on_device_of(q):
            gradients_heads[grid](
                *(q, k, rows.log_decay, rows.beta, of.upto, of.after, of.through, rows.starts),
                *(do, *found, *states, dq, dk, parts),
                *sizes,
                rows.beta.numel(),
                *(*_strides(q), *_strides(k), *_strides(do)),
                **options,
            )
    return dq, dk, None if parts is None else parts.sum(0).transpose(1, 2)


def _scan_forward(
    rows: DeltaRows,
    of: PreparedChunks,
    v: Tensor | None,
    splits: Splits,
    entering: Tensor | None,
    leaving: Tensor | None,
    states: Tensor | None = None,
    z: Tensor | None = None,
    o: Tensor | None = None,
) -> None:
    width = rows.key_width if v is None else v.size(3)
    scan_forward[(splits.num_programs * splits.num_splits,)](
        *(None if o is None else of.q_in, of.k_in, of.k_out, v, rows.beta, of.upto, of.after, of.through),
        *(of.corrections, None if o is None else of.scores, rows.starts, entering, leaving, states, z, o),
        *(rows.num_tokens, rows.num_heads, rows.num_chunks, splits.num_splits, splits.split_chunks),
        *_strides(None if o is None else of.q_in),
        *_strides(of.k_in),
        *_strides(v),
        GROUPS=of.groups,
        **scan_constants(rows.dtype, rows.key_width, width),
        **LAUNCH,
        num_stages=rows.tiling.scan_stages,
    )


def _transitions(rows: DeltaRows, of: PreparedChunks, splits: Splits) -> Tensor:
    """The transitions M (B, N, S, K, K), fp32, of a state by the splits."""
    width = rows.key_width
    own = rows.splits(width)
    same = Splits(num_programs=own.num_programs, num_splits=splits.num_splits, split_chunks=splits.split_chunks)
    found = rows.empty(splits.num_splits, width, width)
    if found.numel():
        with on_device_of(found):
            _scan_forward(rows, of, None, same, None, found)
    return found


def _fold(
    transitions: Tensor, local: Tensor, initial: Tensor | None, between: Tensor | None, *, reverse: bool = False
) -> Tensor:
    """The state that leaves the last split; ``between`` receives the states that enter splits. PyTorch: S is small."""
    num_splits = local.size(2)
    state = torch.zeros_like(local[:, :, 0]) if initial is None else initial
    for split in reversed(range(num_splits)) if reverse else range(num_splits):
        if between is not None:
            between[:, :, split] = state
        matrix = transitions[:, :, split].mT if reverse else transitions[:, :, split]
        # Selected, not multiplied by 0: an overflow in one document must give no NaN in the next.
        is_cut = (matrix == 0).flatten(-2).all(-1)[..., None, None]
        state = local[:, :, split] + (matrix @ state).masked_fill(is_cut, 0.0)
    return state


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]
