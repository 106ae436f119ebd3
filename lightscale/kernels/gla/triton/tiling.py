"""Tiles of the Triton kernels of gated linear attention, by docs/reference/operators/gla.md, "Tiling"."""

from dataclasses import dataclass
from typing import Any

import torch

from lightscale.kernels.common.triton.launch import dot_precision, power_of_two

FOLD_ELEMENTS = 1024
"""Elements of a state in a program of ``fold_splits``."""


@dataclass(frozen=True, kw_only=True)
class GLATiling:
    """Tokens and widths of the tiles for a dtype."""

    chunk: int
    """Tokens between two stored states, a power of two: every decay inside comes from its halves."""
    prepared: int
    """Most key channels that ``prepare`` holds at once."""
    state_key: int
    """Most rows of a tile of the state in ``scan_states``."""
    state_value: int
    """Most columns of this tile."""
    contracted: int
    """Most key channels that ``attend`` multiplies at once."""
    width: int
    """Most columns of the outputs of ``attend``."""
    gradient: int
    """Most key channels of a program of ``gradients``."""
    gradient_value: int
    """Most value channels that this program contracts at once."""
    scan_stages: int
    """Chunks in flight."""
    attend_stages: int
    """Tiles of key channels in flight in ``attend``."""
    gradient_stages: int
    """Tiles of value channels in flight in ``gradients``."""
    stored: torch.dtype
    """The dtype in which dots read the states of chunks. Not fp16, whose range a sum of many tokens may leave."""


_HALF = GLATiling(
    chunk=64,
    prepared=32,
    state_key=64,
    state_value=64,
    contracted=128,
    width=64,
    gradient=64,
    gradient_value=64,
    scan_stages=2,
    attend_stages=1,
    gradient_stages=1,
    stored=torch.bfloat16,
)
_FULL = GLATiling(
    chunk=32,
    prepared=32,
    state_key=32,
    state_value=64,
    contracted=64,
    width=64,
    gradient=32,
    gradient_value=32,
    scan_stages=1,
    attend_stages=1,
    gradient_stages=1,
    stored=torch.float32,
)


def tiling_of(dtype: torch.dtype) -> GLATiling:
    """The tiles for inputs of ``dtype``."""
    return _FULL if dtype == torch.float32 else _HALF


def prepare_constants(dtype: torch.dtype, K: int) -> dict[str, Any]:
    """The constants of ``prepare``."""
    tiling = tiling_of(dtype)
    return {"K": K, "BLOCK_K": power_of_two(K, most=tiling.prepared), **_levels(tiling), **_dots(dtype)}


def scan_constants(dtype: torch.dtype, K: int, V: int) -> dict[str, Any]:
    """The constants of ``scan_states`` except its direction."""
    tiling = tiling_of(dtype)
    return {**_widths(K, V, tiling.state_key, tiling.state_value), **_dots(dtype)}


def attend_constants(dtype: torch.dtype, K: int, V: int) -> dict[str, Any]:
    """The constants of ``attend`` except its direction."""
    tiling = tiling_of(dtype)
    return {**_widths(K, V, tiling.contracted, tiling.width), **_dots(dtype)}


def gradient_constants(dtype: torch.dtype, K: int, V: int) -> dict[str, Any]:
    """The constants of ``gradients``."""
    tiling = tiling_of(dtype)
    if dtype == torch.float32:
        # If all values fit into one tile, Triton 3.9 needs more registers than exist: narrower tiles of keys.
        keys = tiling.gradient if tiling.gradient_value < V else tiling.gradient // 2
        return {**_widths(K, V, keys, tiling.gradient_value), **_levels(tiling), **_dots(dtype)}
    # Also for narrower heads: Triton 3.6 compiled warp-group products 16 and 32 columns wide to wrong gradients and
    # illegal accesses on an H200 (benchmarks/gpu). Spilled registers are the price.
    widths = _widths(K, V, tiling.gradient, tiling.gradient_value) | {"BLOCK_K": tiling.gradient}
    return {**widths, **_levels(tiling), **_dots(dtype)}


def _widths(K: int, V: int, most_k: int, most_v: int) -> dict[str, int]:
    return {"K": K, "V": V, "BLOCK_K": power_of_two(K, most=most_k), "BLOCK_V": power_of_two(V, most=most_v)}


def _levels(tiling: GLATiling) -> dict[str, int]:
    return {"LEVELS": tiling.chunk.bit_length() - 1}


def _dots(dtype: torch.dtype) -> dict[str, Any]:
    return {"CHUNK": tiling_of(dtype).chunk, "PRECISION": dot_precision(dtype)}
