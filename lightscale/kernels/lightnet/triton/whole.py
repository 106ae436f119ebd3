"""LightNet over whole documents on GPUs: the passes of ``../noncausal_chunked.py``, for fp16, bf16 and fp32.

    z = log Σ_i e^{k_i}     p_i = e^{k_i - z}     S = Σ_i φ(p_i) v_iᵀ     o_t = Sᵀ φ(q_t)

Documents are cut into splits; no split has tokens of two documents. One program reads the tokens of a split once and
keeps a running log-sum and the average by it (``accumulate``). Another adds the splits of a document, always in their
order (``fold_splits``). The rest is products of a tile of tokens with its document's state: ``read``, and with the
transposed state ``read_back``. ``accumulate`` without weights also computes dS from φ(q) and do: backward needs no
further kernels. All weights are at most 1; angles are applied where tokens are read.
"""

# Triton evaluates the hints of its kernels: their arguments cannot have any but tl.constexpr.
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightscale.kernels.common.angles import Angles, axes_of, turns_of
from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.common.triton.kernels import exists, positions_at, wave
from lightscale.kernels.common.triton.launch import (
    LAUNCH,
    NUM_WARPS,
    dense_last,
    dot_precision,
    on_device_of,
    power_of_two,
)
from lightscale.kernels.lightnet.noncausal_chunked import Bounds
from lightscale.kernels.lightnet.state import LightNetState
from lightscale.kernels.lightnet.triton.kernels import EMPTY, finite, share_of
from lightscale.kernels.lightnet.triton.tiling import _TYPES, tiling_of

SPLIT_TOKENS = 1024
"""Tokens of a program that computes states: a long row has many programs, and the splits' states stay small."""
_TILE_TOKENS, _TILE_WIDTH = 64, 64
_FP32_TILE = 32


@triton.jit
def accumulate(
    x,  # (tokens, H, K): keys as weights, or factors
    y,  # (tokens, H, V)
    turns,  # (H, K) int64, or None
    positions,  # (tokens,) int64, or None
    splits,  # (P, 3) int64: first token, number, document
    logs,  # (P, H, K) fp32, or None: no weights
    sums,  # (P, H, R, V) fp32
    H,
    stride_xt,
    stride_xh,
    stride_yt,
    stride_yh,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    AXES: tl.constexpr,
):
    """log Σ e^x and the average of φ by e^x, or Σ φ(x) yᵀ, of a split's tokens: a tile of its state."""
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    R: tl.constexpr = K if turns is None else 2 * K
    program = tl.program_id(0).to(tl.int64)
    tile_v = program % V_TILES
    tile_k = program // V_TILES % K_TILES
    head = program // (V_TILES * K_TILES) % H
    split = program // (V_TILES * K_TILES * H)
    begin, count = tl.load(splits + split * 3), tl.load(splits + split * 3 + 1)
    rows = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    cols = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    has_k, has_v = exists(rows, K, BLOCK_K), exists(cols, V, BLOCK_V)
    acc = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    other = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    top = tl.full([BLOCK_K], EMPTY, tl.float32)
    total = tl.zeros([BLOCK_K], dtype=tl.float32)
    for at in range(0, count, BLOCK_T):
        i = at + tl.arange(0, BLOCK_T)
        inside = i < count
        token = begin + i
        columns = x + head * stride_xh + token[None, :] * stride_xt + rows[:, None]
        in_columns = has_k[:, None] & inside[None, :]
        if logs is None:
            weights = tl.load(columns, mask=in_columns, other=0.0).to(tl.float32)
        else:
            keys = tl.load(columns, mask=in_columns, other=EMPTY).to(tl.float32)
            higher = tl.maximum(top, tl.max(keys, 1))
            left = share_of(top, finite(higher))
            weights = share_of(keys, finite(higher)[:, None])
            top = higher
            total = total * left + tl.sum(weights, 1)
            acc *= left[:, None]
            other *= left[:, None]
        value = tl.load(
            y + head * stride_yh + token[:, None] * stride_yt + cols[None, :],
            mask=inside[:, None] & has_v[None, :],
            other=0.0,
        ).to(COMPUTE)
        if turns is None:
            acc = tl.dot(weights.to(COMPUTE), value, acc, input_precision=PRECISION)
        else:
            own = positions_at(positions, token, inside, head, H, AXES)[None, :]
            own_turns = tl.load(turns + head * K + rows, mask=has_k, other=0)[:, None]
            cosine = wave(own, own_turns, 0)
            acc = tl.dot((weights * cosine).to(COMPUTE), value, acc, input_precision=PRECISION)
            sine = wave(own, own_turns, 1)
            other = tl.dot((weights * sine).to(COMPUTE), value, other, input_precision=PRECISION)
    if logs is not None:
        average = tl.where(total > 0.0, 1.0 / tl.maximum(total, 1e-30), 0.0)
        acc *= average[:, None]
        other *= average[:, None]
        if tile_v == 0:
            log = tl.where(total > 0.0, top + tl.log(tl.maximum(total, 1e-30)), EMPTY)
            tl.store(logs + (split * H + head) * K + rows, log, mask=has_k)
    to = sums + (split * H + head) * R * V + rows[:, None] * V + cols[None, :]
    in_tile = has_k[:, None] & has_v[None, :]
    tl.store(to, acc, mask=in_tile)
    if turns is not None:
        tl.store(to + K * V, other, mask=in_tile)


@triton.jit
def fold_splits(
    logs,  # (P, H, K) fp32, or None: unweighted sums
    sums,  # (P, H, R, V) fp32
    firsts,  # (N + 1,) int64: the first split of each document
    z,  # (N, H, K) fp32, or None
    S,  # (N, H, R, V) fp32
    H,
    K: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A tile of the state of a document, from the states of its splits."""
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0).to(tl.int64)
    tile_v = program % V_TILES
    tile_k = program // V_TILES % K_TILES
    half = program // (V_TILES * K_TILES) % (R // K)
    head = program // (V_TILES * K_TILES * (R // K)) % H
    document = program // (V_TILES * K_TILES * (R // K) * H)
    rows = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    cols = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    has_k, has_v = exists(rows, K, BLOCK_K), exists(cols, V, BLOCK_V)
    in_tile = has_k[:, None] & has_v[None, :]
    at = (half * K + rows)[:, None] * V + cols[None, :]
    acc = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    top = tl.full([BLOCK_K], EMPTY, tl.float32)
    total = tl.zeros([BLOCK_K], dtype=tl.float32)
    for split in range(tl.load(firsts + document), tl.load(firsts + document + 1)):
        part = tl.load(sums + (split * H + head) * R * V + at, mask=in_tile, other=0.0)
        if logs is None:
            acc += part
        else:
            log = tl.load(logs + (split * H + head) * K + rows, mask=has_k, other=EMPTY)
            higher = tl.maximum(top, log)
            left, share = share_of(top, finite(higher)), share_of(log, finite(higher))
            top = higher
            total = total * left + share
            acc = acc * left[:, None] + part * share[:, None]
    if logs is not None:
        acc *= tl.where(total > 0.0, 1.0 / tl.maximum(total, 1e-30), 0.0)[:, None]
        if (tile_v == 0) & (half == 0):
            log = tl.where(total > 0.0, top + tl.log(tl.maximum(total, 1e-30)), EMPTY)
            tl.store(z + (document * H + head) * K + rows, log, mask=has_k)
    tl.store(S + (document * H + head) * R * V + at, acc, mask=in_tile)


@triton.jit
def read(
    x,  # (tokens, H, K): queries, or keys as weights
    turns,
    positions,
    tiles,  # (tiles, 3) int64: first token, number, document
    z,  # (N, H, K) fp32, or None: no weights
    S,  # (N, H, R, V) fp32
    out,  # (tokens, H, V), contiguous
    H,
    stride_xt,
    stride_xh,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    AXES: tl.constexpr,
):
    """φ(x) S, or φ(e^(x - z)) S, for a tile of a document's tokens and some columns of V."""
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    R: tl.constexpr = K if turns is None else 2 * K
    program = tl.program_id(0).to(tl.int64)
    tile_v = program % V_TILES
    head = program // V_TILES % H
    tile = program // (V_TILES * H)
    begin, count = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1)
    state = tl.load(tiles + tile * 3 + 2) * H + head
    i = tl.arange(0, BLOCK_T)
    inside, token = i < count, begin + i
    cols = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    has_v = exists(cols, V, BLOCK_V)
    acc = tl.zeros([BLOCK_T, BLOCK_V], dtype=tl.float32)
    for tile_k in range(K_TILES):
        rows = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
        has_k = exists(rows, K, BLOCK_K)
        at = x + head * stride_xh + token[:, None] * stride_xt + rows[None, :]
        in_rows = inside[:, None] & has_k[None, :]
        if z is None:
            features = tl.load(at, mask=in_rows, other=0.0).to(tl.float32)
        else:
            keys = tl.load(at, mask=in_rows, other=EMPTY).to(tl.float32)
            features = share_of(keys, finite(tl.load(z + state * K + rows, mask=has_k, other=EMPTY))[None, :])
        of_state = S + state * R * V + rows[:, None] * V + cols[None, :]
        in_tile = has_k[:, None] & has_v[None, :]
        first = tl.load(of_state, mask=in_tile, other=0.0).to(COMPUTE)
        if turns is None:
            acc = tl.dot(features.to(COMPUTE), first, acc, input_precision=PRECISION)
        else:
            own = positions_at(positions, token, inside, head, H, AXES)[:, None]
            own_turns = tl.load(turns + head * K + rows, mask=has_k, other=0)[None, :]
            acc = tl.dot((features * wave(own, own_turns, 0)).to(COMPUTE), first, acc, input_precision=PRECISION)
            second = tl.load(of_state + K * V, mask=in_tile, other=0.0).to(COMPUTE)
            acc = tl.dot((features * wave(own, own_turns, 1)).to(COMPUTE), second, acc, input_precision=PRECISION)
    to = out + (token * H + head)[:, None] * V + cols[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside[:, None] & has_v[None, :])


@triton.jit
def read_back(
    y,  # (tokens, H, V)
    k,  # (tokens, H, K), or None: no weights
    turns,
    positions,
    tiles,
    z,  # (N, H, K) fp32, or None
    shared,  # (N, H, K) fp32, or None: the loss of all weights of a document when one key rises
    S,  # (N, H, R, V) fp32
    out,  # (tokens, H, K), contiguous
    H,
    stride_yt,
    stride_yh,
    stride_kt,
    stride_kh,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    AXES: tl.constexpr,
):
    """φᵀ(S y), or e^(k - z) (φᵀ(S y) - shared), for a tile of a document's tokens and some columns of K."""
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    R: tl.constexpr = K if turns is None else 2 * K
    program = tl.program_id(0).to(tl.int64)
    tile_k = program % K_TILES
    head = program // K_TILES % H
    tile = program // (K_TILES * H)
    begin, count = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1)
    state = tl.load(tiles + tile * 3 + 2) * H + head
    i = tl.arange(0, BLOCK_T)
    inside, token = i < count, begin + i
    rows = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    has_k = exists(rows, K, BLOCK_K)
    acc = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)
    other = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)
    for tile_v in range(V_TILES):
        cols = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
        has_v = exists(cols, V, BLOCK_V)
        at = y + head * stride_yh + token[:, None] * stride_yt + cols[None, :]
        value = tl.load(at, mask=inside[:, None] & has_v[None, :], other=0.0).to(COMPUTE)
        of_state = S + state * R * V + rows[None, :] * V + cols[:, None]
        in_tile = has_v[:, None] & has_k[None, :]
        acc = tl.dot(value, tl.load(of_state, mask=in_tile, other=0.0).to(COMPUTE), acc, input_precision=PRECISION)
        if turns is not None:
            second = tl.load(of_state + K * V, mask=in_tile, other=0.0).to(COMPUTE)
            other = tl.dot(value, second, other, input_precision=PRECISION)
    if turns is not None:
        own = positions_at(positions, token, inside, head, H, AXES)[:, None]
        own_turns = tl.load(turns + head * K + rows, mask=has_k, other=0)[None, :]
        acc = acc * wave(own, own_turns, 0) + other * wave(own, own_turns, 1)
    in_rows = inside[:, None] & has_k[None, :]
    if k is not None:
        keys = tl.load(k + head * stride_kh + token[:, None] * stride_kt + rows[None, :], mask=in_rows, other=EMPTY).to(
            tl.float32
        )
        log = finite(tl.load(z + state * K + rows, mask=has_k, other=EMPTY))
        lost = tl.load(shared + state * K + rows, mask=has_k, other=0.0)
        weights = share_of(keys, log[None, :])
        # A key of -inf has no gradient, for any other values.
        acc = tl.where(weights > 0.0, weights * (acc - lost[None, :]), 0.0)
    to = out + (token * H + head)[:, None] * K + rows[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=in_rows)


def _constants(dtype: torch.dtype, K: int, V: int, *, scans: bool = False) -> dict[str, Any]:
    most = _FP32_TILE if dtype == torch.float32 else _TILE_WIDTH
    compute = tiling_of(dtype).compute
    return {
        "K": K,
        "V": V,
        "BLOCK_K": power_of_two(K, most=most),
        "BLOCK_V": power_of_two(V, most=most),
        "BLOCK_T": _FP32_TILE if scans or dtype == torch.float32 else _TILE_TOKENS,
        "COMPUTE": _TYPES[compute],
        "PRECISION": dot_precision(compute),
    }


@lru_cache(maxsize=32)
def _table(bounds: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Splits of at most ``size`` tokens, (P, 3) first token, number, document; and (N + 1,) each document's first."""
    edges = np.array(bounds, dtype=np.int64)
    lengths = np.diff(edges)
    counts = -(-lengths // size)
    firsts = np.concatenate([[0], counts.cumsum()])
    documents = np.repeat(np.arange(len(lengths)), counts)
    inside = (np.arange(len(documents)) - firsts[documents]) * size
    table = np.stack([edges[documents] + inside, np.minimum(lengths[documents] - inside, size), documents], axis=1)
    found = (torch.from_numpy(np.ascontiguousarray(part)) for part in (table, firsts))
    splits, first = (x.to(device, non_blocking=True) for x in found)
    return splits, first


def _edges(bounds: Bounds, x: Tensor) -> tuple[int, ...]:
    """Bounds of the documents in the flattened tokens of x (B, T, …)."""
    return tuple(row * x.size(1) for row in range(x.size(0) + 1)) if bounds is None else bounds


def _flat(x: Tensor) -> Tensor:
    """(B, T, H, K) -> (tokens, H, K), the last dimension dense."""
    return dense_last(x.flatten(0, 1))


def _turns(angles: Angles | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if angles is None else (turns_of(angles.theta), angles.positions.flatten().contiguous())


def _state_of(x: Tensor, y: Tensor, angles: Angles | None, bounds: Bounds, *, weighed: bool) -> LightNetState:
    """z (N, H, K), an empty tensor without weights, and S (N, H, R, V), fp32."""
    K, V, H = x.size(3), y.size(3), x.size(2)
    halves, edges = 1 if angles is None else 2, _edges(bounds, x)
    splits, firsts = _table(edges, SPLIT_TOKENS, x.device)
    num_documents, num_splits = len(edges) - 1, len(splits)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    sums, S = empty(num_splits, H, halves * K, V), empty(num_documents, H, halves * K, V)
    logs, z = (empty(n, H, K) if weighed else None for n in (num_splits, num_documents))
    flat_x, flat_y = _flat(x), _flat(y)
    constants = _constants(x.dtype, K, V, scans=True)
    tiles = triton.cdiv(K, constants["BLOCK_K"]) * triton.cdiv(V, constants["BLOCK_V"]) * H
    with on_device_of(x):
        if num_splits * tiles:
            accumulate[(num_splits * tiles,)](
                flat_x, flat_y, *_turns(angles), splits, logs, sums, H,
                *flat_x.stride()[:2], *flat_y.stride()[:2], **constants, AXES=axes_of(angles), **LAUNCH,
            )  # fmt: skip
        if num_documents * tiles:
            fold_splits[(num_documents * tiles * halves,)](
                logs, sums, firsts, z, S, H, K=K, R=halves * K, V=V,
                BLOCK_K=constants["BLOCK_K"], BLOCK_V=constants["BLOCK_V"], **LAUNCH,
            )  # fmt: skip
    return LightNetState(empty(0) if z is None else z, S)


def document_states(k: Tensor, v: Tensor, angles: Angles | None, bounds: Bounds) -> LightNetState:
    """See ``noncausal_chunked.document_states``."""
    return _state_of(k, v, angles, bounds, weighed=True)


def document_cotangents(q: Tensor, do: Tensor, angles: Angles | None, bounds: Bounds) -> Tensor:
    """See ``noncausal_chunked.document_cotangents``."""
    return _state_of(q, do, angles, bounds, weighed=False).S


def _read(x: Tensor, z: Tensor | None, S: Tensor, angles: Angles | None, bounds: Bounds) -> Tensor:
    """φ(x) S, (B, T, H, V) in x's dtype."""
    constants = _constants(x.dtype, x.size(3), S.size(3))
    tiles, _ = _table(_edges(bounds, x), constants["BLOCK_T"], x.device)
    out, flat = x.new_empty(*x.shape[:3], S.size(3)), _flat(x)
    programs = len(tiles) * x.size(2) * triton.cdiv(S.size(3), constants["BLOCK_V"])
    if programs:
        with on_device_of(x):
            read[(programs,)](
                flat, *_turns(angles), tiles, z, S.contiguous(), out, x.size(2), *flat.stride()[:2],
                **constants, AXES=axes_of(angles), **LAUNCH,
            )  # fmt: skip
    return out


def _read_back(
    y: Tensor, k: Tensor | None, z: Tensor | None, shared: Tensor | None, S: Tensor, angles: Angles | None,
    bounds: Bounds, dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """φᵀ(S y), (B, T, H, K) in ``dtype`` or y's; weighted if k is given."""
    K = S.size(2) // (1 if angles is None else 2)
    constants = _constants(y.dtype, K, S.size(3))
    tiles, _ = _table(_edges(bounds, y), constants["BLOCK_T"], y.device)
    out = y.new_empty(*y.shape[:3], K, dtype=dtype or y.dtype)
    flat, keys = _flat(y), None if k is None else _flat(k)
    programs = len(tiles) * y.size(2) * triton.cdiv(K, constants["BLOCK_K"])
    if programs:
        with on_device_of(y):
            read_back[(programs,)](
                flat, keys, *_turns(angles), tiles, z, shared, S.contiguous(), out, y.size(2), *flat.stride()[:2],
                *((0, 0) if keys is None else keys.stride()[:2]), **constants, AXES=axes_of(angles), **LAUNCH,
            )  # fmt: skip
    return out


def out_fwd(q: Tensor, v: Tensor, angles: Angles | None, states: LightNetState, bounds: Bounds = None) -> Tensor:
    """See ``noncausal_chunked.out_fwd``; only the shape of v is read."""
    return _read(q, None, states.S, angles, bounds).view(v.shape)


def token_gradients(
    k: Tensor, v: Tensor, angles: Angles | None, do: Tensor, states: LightNetState, dS: Tensor, shared: Tensor,
    bounds: Bounds, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See ``noncausal_chunked.token_gradients``."""
    z = states.z.contiguous()
    dq = _read_back(do, None, None, None, states.S, angles, bounds, dtype)
    dk = _read_back(v, k, z, shared.contiguous(), dS, angles, bounds, dtype)
    return dq, dk, _read(k, z, dS, angles, bounds)


def _cases() -> Iterator[KernelCase]:
    """The kernels at the widths of the shipped models, in bf16 with and without angles, then in the other dtypes."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    for dtype, width, angles in (
        (torch.bfloat16, 128, True),
        (torch.bfloat16, 128, False),
        (torch.bfloat16, 64, True),
        (torch.float16, 128, True),
        (torch.float32, 128, True),
    ):
        first = dtype == torch.bfloat16 and width == 128 and angles
        for kernel, weighed in ((accumulate, True), (accumulate, False), (read, True), (read, False),
                                (read_back, True), (read_back, False)):  # fmt: skip
            yield _case(kernel, names[dtype], dtype, width, angles=angles, weighed=weighed, usual=first and weighed)
    yield KernelCase(
        name="lightnet_noncausal fold",
        kernel=fold_splits,
        arguments={**dict.fromkeys(("logs", "sums", "z", "S"), "*fp32"), "firsts": "*i64", "H": "i32"},
        constants={"K": 128, "R": 256, "V": 128, "BLOCK_K": 64, "BLOCK_V": 64},
        num_warps=NUM_WARPS,
        tensor_cores=False,
        usual=False,
    )


def _case(
    kernel: Any, name: str, dtype: torch.dtype, width: int, *, angles: bool, weighed: bool, usual: bool
) -> KernelCase:
    tokens, tables = f"*{name}", {"accumulate": "splits"}.get(kernel.fn.__name__, "tiles")
    arguments: dict[str, str] = {tables: "*i64", "H": "i32"}
    constants: dict[str, Any] = {}
    arguments |= dict.fromkeys({"accumulate": "xy", "read": "x", "read_back": "y"}[kernel.fn.__name__], tokens)
    weights: dict[str, str] = {"accumulate": {"logs": "*fp32"}, "read": {"z": "*fp32"}}.get(
        kernel.fn.__name__, {"k": tokens, "z": "*fp32", "shared": "*fp32"}
    )
    if kernel is accumulate:
        arguments["sums"] = "*fp32"
    else:
        arguments |= {"S": "*fp32", "out": tokens}
    for given, group in ((weighed, weights), (angles, {"turns": "*i64", "positions": "*i64"})):
        if given:
            arguments |= group
        else:
            constants |= dict.fromkeys(group)
    letters = {"accumulate": "xy", "read": "x", "read_back": "yk"}[kernel.fn.__name__]
    arguments |= {f"stride_{letter}{dim}": "i32:16" for letter in letters for dim in "th"}
    return KernelCase(
        name=" ".join(
            ["lightnet_noncausal", kernel.fn.__name__, f"{width}x{width}", name, *["weighed"] * weighed,
             *["angles"] * angles]
        ),
        kernel=kernel,
        arguments=arguments,
        constants={**constants, **_constants(dtype, width, width, scans=kernel is accumulate), "AXES": 1},
        num_warps=NUM_WARPS,
        num_stages=2,
        may_spill=dtype == torch.float32,
        usual=usual,
    )  # fmt: skip


COMPILE_CASES = list(_cases())
