"""Heads of a projection in Triton: one launch forward for all parts with an activation, one backward for all parts."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from lightscale.kernels.common.angles import Phases
from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.common.triton.launch import NUM_WARPS, dense_last, on_device_of
from lightscale.kernels.heads.layout import Heads, HeadsPart, parts_of
from lightscale.kernels.heads.triton.kernels import backward_kernel, forward_kernel

# Elements of a tile: 16 of each operand per thread.
_TILE = 2048
_WIDEST = 128
_MOST_PARTS = 4


def _tile(parts: Sequence[HeadsPart]) -> dict[str, int]:
    block = min(_WIDEST, triton.next_power_of_2(max(part.width for part in parts)))
    return {"ROWS": _TILE // block, "BLOCK": block}


def _constants(parts: Sequence[HeadsPart], turned: int) -> dict[str, Any]:
    """Of a launch; absent parts have no heads."""
    absent = HeadsPart(0, 0, 0, 1, "none")
    constants: dict[str, Any] = {"TURNED": turned, **_tile(parts)}
    for number, part in enumerate([*parts, *[absent] * (_MOST_PARTS - len(parts))]):
        constants |= {f"{name.upper()}_{number}": value for name, value in part._asdict().items()}
    return constants


def _num_tiles(parts: Sequence[HeadsPart], block: int) -> int:
    """Of the columns of all parts; a tile is in one head."""
    return sum(part.heads * triton.cdiv(part.width, block) for part in parts)


def _phase_words(cos: Tensor | None, sin: Tensor | None) -> tuple[Any, ...]:
    """The phases, and their strides over tokens and rows: those of b and n change places."""
    if cos is None or sin is None:
        return None, None, 0, 0, 0, 0
    cos, sin = dense_last(cos), dense_last(sin)
    return cos, sin, cos.stride(1), cos.stride(0), sin.stride(1), sin.stride(0)


def _packed(parts: Sequence[HeadsPart]) -> tuple[list[int], str]:
    """As operators of torch take them."""
    return [number for part in parts for number in part[:4]], " ".join(part.activation for part in parts)


def _unpacked(numbers: Sequence[int], activations: str) -> list[HeadsPart]:
    columns = (numbers[place::4] for place in range(4))
    return [HeadsPart(*part) for part in zip(*columns, activations.split(), strict=True)]


@torch.library.custom_op("lightscale::heads_fwd", mutates_args=())
def _fwd(x: Tensor, cos: Tensor | None, sin: Tensor | None, layout: list[int], activations: str) -> list[Tensor]:
    """The parts of ``layout``, each of which has an activation."""
    parts = _unpacked(layout, activations)
    made = _made(x, parts)
    if x.numel():
        constants = _constants(parts, 0 if cos is None else cos.shape[-1])
        num_rows = x.shape[0] * x.shape[1]
        grid = triton.cdiv(num_rows, constants["ROWS"]), _num_tiles(parts, constants["BLOCK"])
        with on_device_of(x):
            forward_kernel[grid](
                x,
                *_phase_words(cos, sin),
                *made,
                *[None] * (_MOST_PARTS - len(made)),
                num_rows,
                x.shape[1],
                *x.stride()[:2],
                **constants,
                num_warps=NUM_WARPS,
            )
    return made


@_fwd.register_fake
def _(x: Tensor, cos: Tensor | None, sin: Tensor | None, layout: list[int], activations: str) -> list[Tensor]:
    return _made(x, _unpacked(layout, activations))


def _made(x: Tensor, parts: Sequence[HeadsPart]) -> list[Tensor]:
    """Memory for ``parts``."""
    return [x.new_empty(*x.shape[:2], part.heads, part.width) for part in parts]


@torch.library.custom_op("lightscale::heads_bwd", mutates_args=())
def _bwd(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    gradients: list[Tensor],
    layout: list[int],
    activations: str,
) -> Tensor:
    """The gradient of x from those of the parts; an empty one is 0."""
    parts = _unpacked(layout, activations)
    dx = x.new_empty(x.shape)
    if x.numel():
        constants = _constants(parts, 0 if cos is None else cos.shape[-1])
        num_rows = x.shape[0] * x.shape[1]
        grid = triton.cdiv(num_rows, constants["ROWS"]), _num_tiles(parts, constants["BLOCK"])
        given = [dense_last(one) if one.numel() else None for one in gradients]
        given += [None] * (_MOST_PARTS - len(given))
        strides = [stride for one in given for stride in ((0, 0, 0) if one is None else one.stride()[:3])]
        with on_device_of(x):
            backward_kernel[grid](
                x,
                *_phase_words(cos, sin),
                *given,
                dx,
                num_rows,
                x.shape[1],
                x.shape[2],
                *x.stride()[:2],
                *strides,
                **constants,
                num_warps=NUM_WARPS,
            )
    return dx


@_bwd.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def heads_fwd(x: Tensor, parts: Sequence[HeadsPart], phases: Phases | None) -> list[Tensor]:
    """``eager.heads_fwd``, in one pass."""
    active = [part for part in parts if part.activation != "none"]
    if not active:
        return []
    made: list[Tensor] = _fwd(x, *(phases or (None, None)), *_packed(active))
    return made


def heads_bwd(
    x: Tensor, parts: Sequence[HeadsPart], phases: Phases | None, gradients: Sequence[Tensor | None]
) -> Tensor:
    """``eager.heads_bwd``, in one pass."""
    given = [x.new_empty(0) if one is None else one for one in gradients]
    dx: Tensor = _bwd(x, *(phases or (None, None)), given, *_packed(parts))
    return dx


def _cases(name: str, groups: Sequence[Heads], dtype: str, *, turned: int = 0) -> list[KernelCase]:
    parts = parts_of(groups)
    of_phases = ("cos_i", "cos_j", "sin_i", "sin_j")
    types = dict.fromkeys(("x", "dx", "cos", "sin"), f"*{dtype}") | {"num_rows": "i32", "J": "i32"}
    types |= dict.fromkeys(("W", "x_i", "x_j", *of_phases), "i32:16")
    absent: dict[str, Any] = {} if turned else {"cos": None, "sin": None, **dict.fromkeys(of_phases, 0)}
    cases = []
    for what, kernel in (("forward", forward_kernel), ("backward", backward_kernel)):
        read = [part for part in parts if part.activation != "none" or kernel is backward_kernel]
        fixed: dict[str, Any] = absent | _constants(read, turned)
        for number in range(_MOST_PARTS):
            names = [f"part_{number}", *(f"part_{number}_{dim}" for dim in "ijh")]
            if number < len(read):
                types |= dict.fromkeys(names[1:], "i32:16") | {names[0]: f"*{dtype}"}
            else:
                fixed |= {names[0]: None} | (dict.fromkeys(names[1:], 0) if kernel is backward_kernel else {})
        cases.append(KernelCase.of(f"heads {what} {name} {dtype}", kernel, types, fixed, tensor_cores=False))
    return cases


_GATED = (Heads(1, 128, ("none",)), Heads(12, 128, ("silu",)), Heads(12, 128, ("silu", "none")))
_ROTATED = (Heads(12, 128, ("rotate",)), Heads(12, 128, ("rotate", "none")))

COMPILE_CASES = [
    *_cases("gated", _GATED, "bf16"),
    *_cases("gated", _GATED, "fp32"),
    *_cases("rotated", _ROTATED, "bf16", turned=128),
    *_cases("partly rotated", (Heads(4, 80, ("rotate", "none")),), "fp16", turned=32),
]
