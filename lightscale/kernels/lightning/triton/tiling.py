"""Tiles of the Triton kernels of lightning attention, by docs/reference/operators/lightning.md, "Tiling"."""

from dataclasses import dataclass
from typing import Any

import torch

from lightscale.kernels.common.triton.launch import dot_precision, power_of_two

FOLD_ELEMENTS = 1024
"""Elements of a state in a program of ``fold_splits``."""

DECAY_HEADS = 16
"""Heads in a program of ``sum_decays``, whose log decays lie side by side."""


@dataclass(frozen=True, kw_only=True)
class LightningTiling:
    """Tokens and widths of the tiles for a dtype."""

    chunk: int
    """Tokens between two stored states."""
    tile_tokens: int
    """Tokens of a tile."""
    contracted: int
    """Most columns that ``attend`` multiplies at once in x yᵀ and x S."""
    width: int
    """Most columns of the outputs of ``attend``."""
    angle_contracted: int
    """``contracted`` where angles spread x and y."""
    angle_width: int
    """``width`` there: each tile of outputs computes the phases of x and y again."""
    state_key: int
    """Most rows of a tile of the state in ``scan_states``."""
    state_value: int
    """Most columns of this tile."""
    attend_stages: int
    """Tiles of partners in flight."""
    scan_stages: int
    """Chunks in flight."""
    stored: torch.dtype
    """The dtype in which dots read the states of chunks. Not fp16, whose range a sum of many tokens may leave."""


_HALF = LightningTiling(
    chunk=128,
    tile_tokens=64,
    contracted=128,
    width=64,
    angle_contracted=32,
    angle_width=128,
    state_key=64,
    state_value=64,
    attend_stages=1,
    scan_stages=2,
    stored=torch.bfloat16,
)
_FULL = LightningTiling(
    chunk=64,
    tile_tokens=32,
    contracted=64,
    width=64,
    angle_contracted=32,
    angle_width=64,
    state_key=32,
    state_value=64,
    attend_stages=1,
    scan_stages=1,
    stored=torch.float32,
)


def tiling_of(dtype: torch.dtype) -> LightningTiling:
    """The tiles for inputs of ``dtype``."""
    return _FULL if dtype == torch.float32 else _HALF


def has_edge(width: int) -> bool:
    """Whether values of ``width`` columns fill tiles and leave one more column, which is computed beside them."""
    return width > 16 and (width - 1) & (width - 2) == 0


def scan_constants(dtype: torch.dtype, K: int, V: int) -> dict[str, Any]:
    """The constants of ``scan_states`` except its direction."""
    tiling = tiling_of(dtype)
    return {
        "K": K,
        "V": V,
        "EDGE": has_edge(V),
        "BLOCK_K": power_of_two(K, most=tiling.state_key),
        "BLOCK_V": power_of_two(V - has_edge(V), most=tiling.state_value),
        "BLOCK_T": tiling.tile_tokens,
        "CHUNK": tiling.chunk,
        "PRECISION": dot_precision(dtype),
    }


def attend_constants(
    dtype: torch.dtype, X: int, Z: int, *, angles: bool, reverse: bool, transposed: bool
) -> dict[str, Any]:
    """The constants of ``attend``; X is contracted, Z the width of the outputs.

    With ``angles`` x and y are spread, or when ``transposed`` z: a tile then has both halves of its channels.
    """
    tiling = tiling_of(dtype)
    contracted, width, z_halves = tiling.contracted, tiling.width, 1
    if angles and transposed:
        z_halves = 2
    elif angles:
        contracted, width = tiling.angle_contracted, tiling.angle_width
    # The edge of the values, which are contracted in the gradients of queries and keys.
    edge = has_edge(X if transposed else Z)
    return {
        "X": X,
        "Z": Z,
        "EDGE": edge,
        "BLOCK_X": power_of_two(X - (edge and transposed), most=contracted),
        "BLOCK_Z": power_of_two(z_halves * (Z - (edge and not transposed)), most=width),
        "BLOCK_T": tiling.tile_tokens,
        "CHUNK": tiling.chunk,
        "REVERSE": reverse,
        "TRANSPOSED": transposed,
        "PRECISION": dot_precision(dtype),
    }
