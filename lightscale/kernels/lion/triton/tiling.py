"""Tiles of LION's Triton kernels: lightning attention's, because chunks and products are the same."""

from typing import Any

import torch

from lightscale.kernels.common.triton.launch import dot_precision, power_of_two
from lightscale.kernels.lightning.triton.tiling import LightningTiling
from lightscale.kernels.lightning.triton.tiling import tiling_of as lightning_tiling


def tiling_of(dtype: torch.dtype) -> LightningTiling:
    """The tiles for inputs of ``dtype``."""
    return lightning_tiling(dtype)


def scan_constants(dtype: torch.dtype, K: int, V: int) -> dict[str, Any]:
    """The constants of ``scan_states`` except its direction and decays."""
    tiling = tiling_of(dtype)
    return {
        "K": K,
        "V": V,
        "BLOCK_K": power_of_two(K, most=tiling.state_key),
        "BLOCK_V": power_of_two(V, most=tiling.state_value),
        "BLOCK_T": tiling.tile_tokens,
        "CHUNK": tiling.chunk,
        "PRECISION": dot_precision(dtype),
    }


def attend_constants(dtype: torch.dtype, X: int, Z: int, *, transposed: bool, learned: bool) -> dict[str, Any]:
    """The constants of ``attend`` except its decays; X is contracted, Z the width of the outputs.

    ``learned``: with the decays' gradient.
    """
    tiling = tiling_of(dtype)
    if dtype == torch.float32:
        width = power_of_two(Z, most=tiling.width // 2 if learned else tiling.width)
    else:
        # With the decays' gradient, also for narrower heads: Triton 3.6 compiled warp-group products 32 columns wide to
        # wrong gradients and illegal accesses on an H200 (benchmarks/gpu). Spilled registers are the price.
        width = tiling.width if learned else power_of_two(Z, most=tiling.width)
    return {
        "X": X,
        "Z": Z,
        "BLOCK_X": power_of_two(X, most=tiling.contracted),
        "BLOCK_Z": width,
        "BLOCK_T": tiling.tile_tokens,
        "CHUNK": tiling.chunk,
        "TRANSPOSED": transposed,
        "PRECISION": dot_precision(dtype),
    }
