"""Tiles of the Triton kernels of LightNet's operator, by docs/reference/operators/lightnet.md, "Tiling"."""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from lightscale.kernels.common.triton.launch import dot_precision, power_of_two

FOLD_KEYS, FOLD_VALUES = 16, 64
"""Tile of a state in programs that fold splits."""

RECURRENT_COLUMNS = 32
"""Most columns of a state in a program of ``recurrent``."""

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, kw_only=True)
class LightNetTiling:
    """Tokens and widths of the tiles for a dtype."""

    chunk: int
    """Tokens between two stored states."""
    tile_tokens: int
    """Tokens of a tile."""
    partners: int
    """Tokens of a tile of partners of the program's tile."""
    scan_tile_tokens: int
    """Tokens of a tile in scans."""
    weighed: int
    """Most columns of a program of ``weigh``."""
    contracted: int
    """Most columns that are multiplied at once in products over K or V."""
    value_width: int
    """Most columns of o and dv."""
    key_width: int
    """Most columns of dq and dk, which keep a sum for each half."""
    state_key: int
    """Most rows of a tile of the state in scans."""
    state_value: int
    """Most columns of this tile."""
    product_stages: int
    """Tiles of partners in flight."""
    scan_stages: int
    """Chunks in flight."""
    compute: torch.dtype
    """The dtype of dots, and of stored states. Not fp16, in whose range the factors of a weight do not fit."""


_HALF = LightNetTiling(
    chunk=128,
    tile_tokens=64,
    partners=32,
    scan_tile_tokens=16,
    weighed=16,
    contracted=32,
    value_width=128,
    key_width=32,
    state_key=64,
    state_value=64,
    product_stages=1,
    scan_stages=1,
    compute=torch.bfloat16,
)
_FULL = LightNetTiling(
    chunk=64,
    tile_tokens=32,
    partners=32,
    scan_tile_tokens=32,
    weighed=32,
    contracted=32,
    value_width=64,
    key_width=32,
    state_key=32,
    state_value=64,
    product_stages=1,
    scan_stages=1,
    compute=torch.float32,
)


def tiling_of(dtype: torch.dtype) -> LightNetTiling:
    """The tiles for inputs of ``dtype``."""
    return _FULL if dtype == torch.float32 else _HALF


def _common(tiling: LightNetTiling, K: int) -> dict[str, Any]:
    return {
        "K": K,
        "CHUNK": tiling.chunk,
        "COMPUTE": _TYPES[tiling.compute],
        "PRECISION": dot_precision(tiling.compute),
    }


def weigh_constants(dtype: torch.dtype, K: int) -> dict[str, Any]:
    """The constants of ``weigh``."""
    tiling = tiling_of(dtype)
    return {**_common(tiling, K), "BLOCK_T": tiling.tile_tokens, "BLOCK_K": power_of_two(K, most=tiling.weighed)}


def scan_constants(dtype: torch.dtype, K: int, V: int) -> dict[str, Any]:
    """The constants of ``scan_states`` and ``scan_cotangents``."""
    tiling = tiling_of(dtype)
    return {
        **_common(tiling, K),
        "V": V,
        "BLOCK_T": tiling.scan_tile_tokens,
        "BLOCK_K": power_of_two(K, most=tiling.state_key),
        "BLOCK_V": power_of_two(V, most=tiling.state_value),
    }


def product_constants(dtype: torch.dtype, K: int, V: int, *, of_keys: bool) -> dict[str, Any]:
    """The constants of the kernels of products; ``of_keys``: outputs of width K, else V."""
    tiling = tiling_of(dtype)
    most_k, most_v = (tiling.key_width, tiling.contracted) if of_keys else (tiling.contracted, tiling.value_width)
    return {
        **_common(tiling, K),
        "V": V,
        "BLOCK_T": tiling.tile_tokens,
        "PARTNERS": tiling.partners,
        "BLOCK_K": power_of_two(K, most=most_k),
        "BLOCK_V": power_of_two(V, most=most_v),
    }


def fold_constants(K: int, R: int, V: int) -> dict[str, Any]:
    """The constants of the kernels that fold splits, except ``CHUNK``."""
    return {
        "K": K,
        "R": R,
        "V": V,
        "BLOCK_K": power_of_two(K, most=FOLD_KEYS),
        "BLOCK_V": power_of_two(V, most=FOLD_VALUES),
    }


def recurrent_constants(K: int, V: int) -> dict[str, Any]:
    """The constants of ``recurrent``: a program holds all rows of its columns of the state."""
    return {
        "K": K,
        "V": V,
        "BLOCK_K": power_of_two(K, most=1 << 20),
        "BLOCK_V": power_of_two(V, most=RECURRENT_COLUMNS),
    }
