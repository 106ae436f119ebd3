"""The kernels of LightNet's operator in the configurations that training launches, for compilation without a GPU."""

from collections.abc import Iterator
from typing import Any

import torch

from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.common.triton.launch import NUM_WARPS
from lightscale.kernels.lightnet.triton.cotangents import fold_cotangents, scan_cotangents
from lightscale.kernels.lightnet.triton.kernels import recurrent
from lightscale.kernels.lightnet.triton.keys import key_gradients, value_gradients
from lightscale.kernels.lightnet.triton.queries import outputs, query_gradients
from lightscale.kernels.lightnet.triton.segments import fold_segments
from lightscale.kernels.lightnet.triton.states import fold_states, scan_states, weigh
from lightscale.kernels.lightnet.triton.tiling import (
    fold_constants,
    product_constants,
    recurrent_constants,
    scan_constants,
    tiling_of,
    weigh_constants,
)

WIDTHS = ((64, 64), (128, 128))

_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

# Each kernel's inputs and outputs in the dtype of q, and the letters of the strided ones.
_PRODUCTS = {
    "o": (outputs, ("q", "k", "v", "out"), "qkv"),
    "dq": (query_gradients, ("k", "v", "do", "dq"), "kvdq"),
    "dk": (key_gradients, ("q", "k", "v", "do", "dq", "dk"), "qkvd"),
    "dv": (value_gradients, ("q", "k", "do", "dv"), "qkd"),
}


def _pointers(kind: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{kind}")


def _integers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


def _strides(letters: str) -> dict[str, str]:
    return {f"stride_{letter}{dim}": "i32:16" for letter in letters for dim in "bth"}


def _angles(given: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """Arguments and constants of the angles."""
    if given:
        return _pointers("i64", "turns", "positions"), {"AXES": 1}
    return {}, {"turns": None, "positions": None, "AXES": 1}


def _name(what: str, K: int, V: int, dtype: torch.dtype, angles: bool) -> str:
    return " ".join(["lightnet", what, f"{K}x{V}", _NAMES[dtype], *["angles"] * angles])


def _scan(dtype: torch.dtype, K: int, V: int, *, reverse: bool, angles: bool, usual: bool) -> KernelCase:
    """One kernel with documents, an entering state, and the states of chunks."""
    arguments, constants = _angles(angles)
    stored = _NAMES[tiling_of(dtype).compute]
    if reverse:
        kernel, what, letters = scan_cotangents, "dstates", "qd"
        pointers = _pointers(_NAMES[dtype], "q", "do", "dq") | _pointers(stored, "chunk_U")
        pointers |= _pointers("fp32", "edges", "depths", "enter_U", "enter_R", "leave_U", "leave_R", "chunk_R")
    else:
        kernel, what, letters = scan_states, "states", "kv"
        pointers = _pointers(_NAMES[dtype], "k", "v") | _pointers(stored, "states")
        pointers |= _pointers("fp32", "enter_tops", "enter_states", "leave_tops", "leave_states", "tops", "logs")
        constants = {**constants, "enter_logs": None, "leave_logs": None}
    integers = _integers("T", "H", "num_chunks", "num_splits", "split_chunks")
    return KernelCase(
        name=_name(what, K, V, dtype, angles),
        kernel=kernel,
        arguments={**pointers, **arguments, "starts": "*i32", **integers, **_strides(letters)},
        constants={**constants, **scan_constants(dtype, K, V)},
        num_warps=NUM_WARPS,
        num_stages=tiling_of(dtype).scan_stages,
        may_spill=dtype == torch.float32,
        usual=usual,
    )


def _product(
    role: str, dtype: torch.dtype, K: int, V: int, *, angles: bool, usual: bool, learned: bool = False
) -> KernelCase:
    """One kernel with documents; ``learned``: with the gradient of the angles."""
    kernel, names, letters = _PRODUCTS[role]
    arguments, constants = _angles(angles)
    if role in ("dq", "dk"):
        own = {"q": f"*{_NAMES[dtype]}"} if role == "dq" else {}
        if learned:
            arguments |= own | _pointers("fp32", "angle_parts")
        else:
            constants |= dict.fromkeys([*own, "angle_parts"])
    arguments |= _pointers(_NAMES[dtype], *names) | _pointers("fp32", "edges", "depths") | {"starts": "*i32"}
    stored = _NAMES[tiling_of(dtype).compute]
    if role in ("o", "dq"):
        arguments |= _pointers(stored, "states")
    else:
        arguments |= _pointers(stored, "chunk_U")
    if role == "dk":
        arguments |= _pointers("fp32", "chunk_R")
    integers = _integers("T", "H", "num_chunks", "num_token_tiles")
    return KernelCase(
        name=_name(role, K, V, dtype, angles) + " learned" * learned,
        kernel=kernel,
        arguments={**arguments, **integers, **_strides(letters)},
        constants={**constants, **product_constants(dtype, K, V, of_keys=role in ("dq", "dk"))},
        num_warps=NUM_WARPS,
        num_stages=tiling_of(dtype).product_stages,
        may_spill=dtype == torch.float32,
        usual=usual,
    )


def _weigh(dtype: torch.dtype, K: int, *, usual: bool) -> KernelCase:
    pointers = {"k": f"*{_NAMES[dtype]}", "starts": "*i32", **_pointers("fp32", "tops", "logs", "edges", "depths")}
    return KernelCase(
        name=f"lightnet z {K} {_NAMES[dtype]}",
        kernel=weigh,
        arguments={**pointers, **_integers("T", "H", "num_chunks", "num_token_tiles"), **_strides("k")},
        constants=weigh_constants(dtype, K),
        num_warps=NUM_WARPS,
        num_stages=1,
        may_spill=dtype == torch.float32,
        usual=usual,
    )


def _folds() -> Iterator[KernelCase]:
    splits = ("local_tops", "local_logs", "local_states", "enter_tops", "enter_logs", "enter_states")
    options: dict[str, Any] = {"num_warps": NUM_WARPS, "tensor_cores": False, "usual": False}
    yield KernelCase(
        name="lightnet fold",
        kernel=fold_states,
        arguments={
            **_pointers("fp32", *splits, "z_in", "S_in", "z_out", "S_out"),
            "starts": "*i32",
            **_integers("T", "H", "num_splits", "split_tokens"),
        },
        constants=fold_constants(128, 256, 128),
        **options,
    )
    splits = ("local_U", "local_R", "tops", "logs", "enter_U", "enter_R")
    yield KernelCase(
        name="lightnet fold of cotangents",
        kernel=fold_cotangents,
        arguments={
            **_pointers("fp32", *splits, "U_end", "R_end", "U_in", "R_in"),
            "starts": "*i32",
            **_integers("T", "H", "num_chunks", "num_splits", "split_chunks"),
        },
        constants={**fold_constants(128, 256, 128), "CHUNK": 128},
        **options,
    )
    yield KernelCase(
        name="lightnet fold of segments",
        kernel=fold_segments,
        arguments={
            **_pointers("fp32", "z", "S", "through", "z_in", "S_in", "z_out", "S_out", "shares"),
            **_integers("H", "num_row_heads", "num_segments", "end", "stride_through"),
            **dict.fromkeys(("stride_z", "stride_S"), "i32:16"),
        },
        constants=fold_constants(128, 256, 128),
        **options,
    )


def _recurrent(dtype: torch.dtype, K: int, V: int) -> KernelCase:
    pointers = _pointers(_NAMES[dtype], "q", "k", "v", "out")
    pointers |= _pointers("fp32", "cos", "sin", "z_before", "before", "z_after", "after")
    return KernelCase(
        name=_name("step", K, V, dtype, True),
        kernel=recurrent,
        arguments=pointers,
        constants=recurrent_constants(K, V),
        num_warps=NUM_WARPS,
        tensor_cores=False,
        usual=False,
    )


def _cases() -> Iterator[KernelCase]:
    """Each width in bf16 with documents, with and without angles, then other dtypes at the usual width."""
    bf16 = torch.bfloat16
    for K, V in WIDTHS:
        wide = K == 128
        yield _weigh(bf16, K, usual=wide)
        for angles in (True, False):
            for reverse in (False, True):
                yield _scan(bf16, K, V, reverse=reverse, angles=angles, usual=wide and angles)
            for role in _PRODUCTS:
                yield _product(role, bf16, K, V, angles=angles, usual=wide and angles)
        for role in ("dq", "dk"):
            yield _product(role, bf16, K, V, angles=True, learned=True, usual=wide)
    for dtype in (torch.float16, torch.float32):
        yield _weigh(dtype, 128, usual=False)
        for reverse in (False, True):
            yield _scan(dtype, 128, 128, reverse=reverse, angles=True, usual=False)
        for role in _PRODUCTS:
            yield _product(role, dtype, 128, 128, angles=True, usual=False)
    yield from _folds()
    yield _recurrent(bf16, 128, 128)


COMPILE_CASES = list(_cases())
