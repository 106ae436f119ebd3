"""Tiles of the Triton kernels of the delta rule, by docs/reference/operators/delta-rule.md, "On GPUs"."""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from lightscale.kernels.common.triton.launch import dot_precision, power_of_two


@dataclass(frozen=True, kw_only=True)
class DeltaTiling:
    """Tokens and widths of the tiles for a dtype."""

    chunk: int
    """Tokens between two states of the scans, a power of two."""
    prepared: int
    """Most key channels that ``prepare_heads`` multiplies at once."""
    channel_prepared: int
    """Most key channels that ``prepare_channels`` holds at once."""
    state_elements: int
    """Most elements of a tile of the state, which has all key channels and some columns."""
    state_value: int
    """Most columns of this tile."""
    gradient: int
    """Most key channels of a program of the gradients."""
    gradient_value: int
    """Most value channels that this program contracts at once."""
    scan_stages: int
    """Chunks in flight."""
    stored: torch.dtype
    """The dtype in which dots read the states of chunks. Not fp16, whose range a sum of many tokens may leave."""


_HALF = DeltaTiling(
    chunk=32,
    prepared=64,
    channel_prepared=32,
    state_elements=4096,
    state_value=32,
    gradient=64,
    gradient_value=64,
    scan_stages=2,
    stored=torch.bfloat16,
)
_FULL = DeltaTiling(
    chunk=32,
    prepared=32,
    channel_prepared=32,
    state_elements=4096,
    state_value=32,
    gradient=32,
    gradient_value=32,
    scan_stages=1,
    stored=torch.float32,
)


def tiling_of(dtype: torch.dtype) -> DeltaTiling:
    """The tiles for inputs of ``dtype``."""
    return _FULL if dtype == torch.float32 else _HALF


def prepare_constants(dtype: torch.dtype, K: int, *, by_channel: bool) -> dict[str, Any]:
    """The constants of ``prepare_heads`` or ``prepare_channels`` except the groups of heads."""
    tiling = tiling_of(dtype)
    most = tiling.channel_prepared if by_channel else tiling.prepared
    return {"K": K, "BLOCK_K": power_of_two(K, most=most), **_levels(tiling), **_dots(dtype)}


def scan_constants(dtype: torch.dtype, K: int, V: int) -> dict[str, Any]:
    """The constants of ``scan_forward`` and ``scan_back`` except the groups of heads."""
    tiling = tiling_of(dtype)
    # A token reads all rows of the state before it writes: every program holds all rows.
    block_k = power_of_two(K, most=1 << 20)
    most = max(16, min(tiling.state_value, tiling.state_elements // block_k))
    stored = getattr(tl, str(tiling.stored).removeprefix("torch."))
    return {**_widths(K, V, block_k, most), **_dots(dtype), "STORED": stored}


def gradient_constants(dtype: torch.dtype, K: int, V: int, *, by_channel: bool) -> dict[str, Any]:
    """The constants of ``gradients_heads`` or ``gradients_channels`` except the groups of heads."""
    tiling = tiling_of(dtype)
    # The compiler unrolls more tiles of values, which need the registers that fewer key channels leave.
    few = 1 if 2 * tiling.gradient_value >= V else 4 if by_channel else 2
    widths = _widths(K, V, max(16, tiling.gradient // few), tiling.gradient_value)
    return {**widths, **(_levels(tiling) if by_channel else {}), **_dots(dtype)}


def _widths(K: int, V: int, most_k: int, most_v: int) -> dict[str, int]:
    return {"K": K, "V": V, "BLOCK_K": power_of_two(K, most=most_k), "BLOCK_V": power_of_two(V, most=most_v)}


def _levels(tiling: DeltaTiling) -> dict[str, int]:
    return {"LEVELS": tiling.chunk.bit_length() - 1}


def _dots(dtype: torch.dtype) -> dict[str, Any]:
    return {"CHUNK": tiling_of(dtype).chunk, "PRECISION": dot_precision(dtype)}
