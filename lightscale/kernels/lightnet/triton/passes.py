"""The passes of LightNet's operator on GPUs: states, weights, outputs, cotangents, gradients.

``__init__.py`` composes them.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from lightscale.kernels.common.angles import Angles, axes_of, turns_of
from lightscale.kernels.common.triton.documents import document_starts
from lightscale.kernels.common.triton.launch import LAUNCH, Splits, dense_last, on_device_of
from lightscale.kernels.lightnet.state import LightNetState, StateCotangent
from lightscale.kernels.lightnet.triton.cotangents import fold_cotangents, scan_cotangents
from lightscale.kernels.lightnet.triton.keys import key_gradients, value_gradients
from lightscale.kernels.lightnet.triton.queries import outputs, query_gradients
from lightscale.kernels.lightnet.triton.states import fold_states, scan_states, weigh
from lightscale.kernels.lightnet.triton.tiling import (
    LightNetTiling,
    fold_constants,
    product_constants,
    scan_constants,
    tiling_of,
    weigh_constants,
)


@dataclass(frozen=True, kw_only=True)
class LightNetRow:
    """Data that all passes of one call share: keys, values, angles, documents, and their tiles."""

    k: Tensor
    v: Tensor
    angles: tuple[Tensor, Tensor] | tuple[None, None]
    """Turns (H, K) and positions (B, T), or (B, T, axes), int64."""
    axes: int
    """Groups of heads with positions of their own."""
    starts: Tensor | None
    tiling: LightNetTiling

    @classmethod
    def of(cls, k: Tensor, v: Tensor, angles: Angles | None, cu_seqlens: Tensor | None) -> "LightNetRow":
        """The rows of k (B, T, H, K) and v (B, T, H, V)."""
        return cls(
            k=dense_last(k),
            v=dense_last(v),
            angles=(None, None) if angles is None else (turns_of(angles.theta), angles.positions.contiguous()),
            axes=axes_of(angles),
            starts=document_starts(cu_seqlens, num_rows=k.size(0), num_tokens=k.size(1)),
            tiling=tiling_of(k.dtype),
        )

    @property
    def widths(self) -> tuple[int, int]:
        """K and V."""
        return self.k.size(3), self.v.size(3)

    @property
    def state_rows(self) -> int:
        """R."""
        return self.k.size(3) * (1 if self.angles[0] is None else 2)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """T, H and N, the number of chunks; the last one may be shorter."""
        num_tokens, num_heads = self.k.shape[1:3]
        return num_tokens, num_heads, -(-num_tokens // self.tiling.chunk)

    def empty(self, *inner: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """(B, H, *inner), not initialised."""
        return torch.empty(self.k.size(0), self.k.size(2), *inner, dtype=dtype, device=self.k.device)

    def empty_cotangent(self, *inner: int) -> StateCotangent:
        """U (B, H, *inner, R, V) and R (B, H, *inner, K), not initialised."""
        K, V = self.widths
        return StateCotangent(self.empty(*inner, self.state_rows, V), self.empty(*inner, K))


def _splits(row: LightNetRow) -> Splits:
    constants = scan_constants(row.k.dtype, *row.widths)
    K, V = row.widths
    tiles = triton.cdiv(K, constants["BLOCK_K"]) * triton.cdiv(V, constants["BLOCK_V"])
    return Splits.of(row.k.size(0) * row.k.size(2) * tiles, row.sizes[2], row.k.device)


@dataclass(frozen=True, kw_only=True)
class ChunkStates:
    """The states that enter the chunks: S, and z as a sum of two parts, which is exact for large z."""

    S: Tensor
    """(B, H, N, R, V)."""
    tops: Tensor
    """(B, H, N + 1, K) fp32, of the state that leaves the row too."""
    logs: Tensor
    """(B, H, N + 1, K) fp32."""


def scan(
    row: LightNetRow, state_in: LightNetState | None, *, with_chunks: bool = True
) -> tuple[ChunkStates | None, LightNetState]:
    """The states that enter the chunks, and the one that leaves the row."""
    splits, (K, V), (_, _, num_chunks) = _splits(row), row.widths, row.sizes
    R = row.state_rows
    end = LightNetState(row.empty(K), row.empty(R, V))
    chunks = None
    if with_chunks:
        chunks = ChunkStates(
            S=row.empty(num_chunks, R, V, dtype=row.tiling.compute),
            tops=row.empty(num_chunks + 1, K),
            logs=row.empty(num_chunks + 1, K),
        )
    z_in, S_in = (None, None) if state_in is None else (x.contiguous() for x in state_in)
    if not end.S.numel():
        return chunks, LightNetState(*(x.zero_() for x in end))
    with on_device_of(row.k):
        if splits.num_splits == 1:
            _scan_states(row, splits, (z_in, None, S_in), (end.z, None, end.S), chunks)
        else:
            num_splits = splits.num_splits
            # All splits from empty states, side by side; a fold over the few splits; all splits again from their
            # entering states. z stays a pair (top, log), because its rounding would grow with the number of splits.
            local = (row.empty(num_splits, K), row.empty(num_splits, K), row.empty(num_splits, R, V))
            _scan_states(row, splits, (None, None, None), local, None)
            between = tuple(torch.empty_like(x) if with_chunks else None for x in local)
            fold_states[(_fold_programs(row),)](
                *local,
                z_in,
                S_in,
                row.starts,
                *between,
                *end,
                *row.sizes[:2],
                num_splits,
                splits.split_chunks * row.tiling.chunk,
                **fold_constants(K, R, V),
                **LAUNCH,
            )
            if with_chunks:
                _scan_states(row, splits, between, (None, None, None), chunks)
    return chunks, end


def _fold_programs(row: LightNetRow) -> int:
    K, V = row.widths
    constants = fold_constants(K, row.state_rows, V)
    tiles = triton.cdiv(K, constants["BLOCK_K"]) * triton.cdiv(V, constants["BLOCK_V"])
    return int(row.k.size(0) * row.k.size(2) * (row.state_rows // K) * tiles)


def _scan_states(
    row: LightNetRow,
    splits: Splits,
    entering: tuple[Tensor | None, ...],
    leaving: tuple[Tensor | None, ...],
    chunks: ChunkStates | None,
) -> None:
    """``entering`` and ``leaving``: references of z (B, H, S, K), z less these, and S (B, H, S, R, V)."""
    scan_states[(splits.num_programs * splits.num_splits,)](
        row.k,
        row.v,
        *row.angles,
        row.starts,
        *entering,
        *leaving,
        *((None, None, None) if chunks is None else (chunks.S, chunks.tops, chunks.logs)),
        *row.sizes,
        splits.num_splits,
        splits.split_chunks,
        *row.k.stride()[:3],
        *row.v.stride()[:3],
        **scan_constants(row.k.dtype, *row.widths),
        AXES=row.axes,
        **LAUNCH,
        num_stages=row.tiling.scan_stages,
    )


@dataclass(frozen=True, kw_only=True)
class Weights:
    """z of all tokens and at the edges of chunks."""

    edges: Tensor
    """(B, H, N, 3, K) fp32: each chunk's base, and z of the states that enter and leave it, less the base."""
    depths: Tensor
    """(B, T, H, K) fp32: z less the chunk's base."""


def weights_of(row: LightNetRow, chunks: ChunkStates) -> Weights:
    """z of all tokens, from the states that enter the chunks."""
    (num_tokens, num_heads, num_chunks), K = row.sizes, row.widths[0]
    found = Weights(
        edges=row.empty(num_chunks, 3, K),
        depths=torch.empty(row.k.shape, dtype=torch.float32, device=row.k.device),
    )
    constants = weigh_constants(row.k.dtype, K)
    num_token_tiles = triton.cdiv(num_tokens, row.tiling.tile_tokens)
    num_programs = row.k.size(0) * num_token_tiles * num_heads * triton.cdiv(K, constants["BLOCK_K"])
    if num_programs:
        with on_device_of(row.k):
            weigh[(num_programs,)](
                row.k,
                row.starts,
                chunks.tops,
                chunks.logs,
                found.edges,
                found.depths,
                num_tokens,
                num_heads,
                num_chunks,
                num_token_tiles,
                *row.k.stride()[:3],
                **constants,
                **LAUNCH,
                num_stages=1,
            )
    return found


def attend(row: LightNetRow, q: Tensor, chunks: ChunkStates, weights: Weights) -> Tensor:
    """The outputs (B, T, H, V)."""
    q, o = dense_last(q), torch.empty(row.v.shape, dtype=row.v.dtype, device=row.v.device)
    strides = (*q.stride()[:3], *row.k.stride()[:3], *row.v.stride()[:3])
    inputs = (q, row.k, row.v, *row.angles, chunks.S)
    _products(outputs, row, inputs, weights, o, strides, of_keys=False)
    return o


def _products(
    kernel: triton.JITFunction,
    row: LightNetRow,
    inputs: tuple[Tensor | None, ...],
    weights: Weights,
    out: Tensor,
    strides: tuple[int, ...],
    *,
    of_keys: bool,
) -> None:
    """Launch a kernel of products for every tile of tokens."""
    constants = product_constants(row.k.dtype, *row.widths, of_keys=of_keys)
    num_tokens, num_heads, num_chunks = row.sizes
    num_token_tiles = triton.cdiv(num_tokens, row.tiling.tile_tokens)
    tiles = triton.cdiv(out.size(3), constants["BLOCK_K" if of_keys else "BLOCK_V"])
    if out.numel():
        with on_device_of(out):
            kernel[(row.k.size(0) * num_token_tiles * num_heads * tiles,)](
                *inputs,
                row.starts,
                weights.edges,
                weights.depths,
                out,
                num_tokens,
                num_heads,
                num_chunks,
                num_token_tiles,
                *strides,
                **constants,
                AXES=row.axes,
                **LAUNCH,
                num_stages=row.tiling.product_stages,
            )


@dataclass(frozen=True, kw_only=True)
class Backward:
    """The backward passes of a row, in the order of their dependencies."""

    row: LightNetRow
    q: Tensor
    do: Tensor
    chunks: ChunkStates
    weights: Weights

    @classmethod
    def of(cls, row: LightNetRow, q: Tensor, do: Tensor, state_in: LightNetState | None) -> "Backward":
        """Recomputes the states and z."""
        chunks, _ = scan(row, state_in)
        assert chunks is not None
        return cls(row=row, q=dense_last(q), do=dense_last(do), chunks=chunks, weights=weights_of(row, chunks))

    def angle_parts(self) -> Tensor:
        """(B, H, token tiles, K), not initialised: each tile's part of dtheta.

        The parts are summed afterwards in a fixed order: atomic additions would not be reproducible.
        """
        num_tokens, K = self.row.sizes[0], self.row.widths[0]
        return self.row.empty(triton.cdiv(num_tokens, self.row.tiling.tile_tokens), K)

    def query_gradients(self, angle_parts: Tensor | None = None) -> Tensor:
        """dq (B, T, H, K); the queries' parts of dtheta are written to ``angle_parts``."""
        row = self.row
        dq = torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device)
        q = None if angle_parts is None else self.q
        strides = (*row.k.stride()[:3], *row.v.stride()[:3], *self.do.stride()[:3])
        strides = (*strides, *((0, 0, 0) if q is None else q.stride()[:3]))
        inputs = (row.k, row.v, self.do, *row.angles, q, angle_parts, self.chunks.S)
        _products(query_gradients, row, inputs, self.weights, dq, strides, of_keys=True)
        return dq

    def scan(
        self, dq: Tensor, cotangent: StateCotangent | None, *, with_chunks: bool = True
    ) -> tuple[StateCotangent | None, StateCotangent]:
        """The cotangents (U, R) of the states that leave the chunks, and of the state that enters the row."""
        row, splits, (K, V) = self.row, _splits(self.row), self.row.widths
        start = row.empty_cotangent()
        by_chunk = None
        if with_chunks:
            num_chunks = row.sizes[2]
            U = row.empty(num_chunks, row.state_rows, V, dtype=row.tiling.compute)
            by_chunk = StateCotangent(U, row.empty(num_chunks, K))
        end = (None, None) if cotangent is None else tuple(x.contiguous() for x in cotangent)
        if not start.U.numel():
            return by_chunk, StateCotangent(*(x.zero_() for x in start))
        with on_device_of(row.k):
            if splits.num_splits == 1:
                self._scan_cotangents(dq, splits, end, start, by_chunk)
            else:
                # As in ``scan``, from right to left.
                local = row.empty_cotangent(splits.num_splits)
                self._scan_cotangents(dq, splits, (None, None), local, None)
                between = tuple(torch.empty_like(x) if with_chunks else None for x in local)
                fold_cotangents[(_fold_programs(row),)](
                    *local,
                    *end,
                    self.chunks.tops,
                    self.chunks.logs,
                    row.starts,
                    *between,
                    *start,
                    *row.sizes,
                    splits.num_splits,
                    splits.split_chunks,
                    **fold_constants(K, row.state_rows, V),
                    CHUNK=row.tiling.chunk,
                    **LAUNCH,
                )
                if with_chunks:
                    self._scan_cotangents(dq, splits, between, (None, None), by_chunk)
        return by_chunk, start

    def _scan_cotangents(
        self,
        dq: Tensor,
        splits: Splits,
        entering: tuple[Tensor | None, ...],
        leaving: tuple[Tensor | None, ...],
        by_chunk: StateCotangent | None,
    ) -> None:
        row = self.row
        scan_cotangents[(splits.num_programs * splits.num_splits,)](
            self.q,
            self.do,
            dq,
            *row.angles,
            row.starts,
            self.weights.edges,
            self.weights.depths,
            *entering,
            *leaving,
            *((None, None) if by_chunk is None else by_chunk),
            *row.sizes,
            splits.num_splits,
            splits.split_chunks,
            *self.q.stride()[:3],
            *self.do.stride()[:3],
            **scan_constants(row.k.dtype, *row.widths),
            AXES=row.axes,
            **LAUNCH,
            num_stages=row.tiling.scan_stages,
        )

    def key_gradients(self, dq: Tensor, by_chunk: StateCotangent, angle_parts: Tensor | None = None) -> Tensor:
        """dk (B, T, H, K); the keys' parts of dtheta are written to ``angle_parts``."""
        row = self.row
        dk = torch.empty(row.k.shape, dtype=row.k.dtype, device=row.k.device)
        strides = (*self.q.stride()[:3], *row.k.stride()[:3], *row.v.stride()[:3], *self.do.stride()[:3])
        inputs = (self.q, row.k, row.v, self.do, dq, *row.angles, angle_parts, *by_chunk)
        _products(key_gradients, row, inputs, self.weights, dk, strides, of_keys=True)
        return dk

    def value_gradients(self, by_chunk: StateCotangent) -> Tensor:
        """dv (B, T, H, V)."""
        row = self.row
        dv = torch.empty(row.v.shape, dtype=row.v.dtype, device=row.v.device)
        strides = (*self.q.stride()[:3], *row.k.stride()[:3], *self.do.stride()[:3])
        inputs = (self.q, row.k, self.do, *row.angles, by_chunk.U)
        _products(value_gradients, row, inputs, self.weights, dv, strides, of_keys=False)
        return dv
