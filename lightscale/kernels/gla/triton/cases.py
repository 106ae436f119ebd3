"""The kernels of gated linear attention in the configurations that training launches, for compilation without a GPU."""

from collections.abc import Iterator
from typing import Any

import torch

from lightscale.kernels.common.triton.cases import NAMES, case_name, integers, pointers, strides
from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.common.triton.documents import starts_case
from lightscale.kernels.common.triton.launch import NUM_WARPS
from lightscale.kernels.common.triton.recurrent import recurrent_case
from lightscale.kernels.common.triton.segments import segments_case
from lightscale.kernels.gla.triton.decays import prepare
from lightscale.kernels.gla.triton.gradients import gradients
from lightscale.kernels.gla.triton.kernels import attend, fold_splits, scan_states
from lightscale.kernels.gla.triton.tiling import (
    FOLD_ELEMENTS,
    attend_constants,
    gradient_constants,
    prepare_constants,
    scan_constants,
    tiling_of,
)

WIDTHS = ((64, 64), (128, 128))


def _prepare(dtype: torch.dtype, K: int, *, of: str = "qk", plain: bool = False, **options: Any) -> KernelCase:
    """``of``: the prepared operands, "q", "k" or "qk", the last with scores. ``plain``: without documents."""
    kind = NAMES[dtype]
    arguments, absent = pointers(
        {
            "q": kind if "q" in of else None,
            "k": kind if "k" in of else None,
            "log_decay": "fp32",
            "paths": NAMES[tiling_of(dtype).stored],
            "starts": None if plain else "i32",
            "q_in": kind if "q" in of else None,
            "k_out": kind if "k" in of else None,
            "through": "fp32",
            "scores": kind if of == "qk" else None,
        }
    )
    counts = integers("T", "H", "num_chunks")
    return KernelCase(
        name=case_name("gla", f"prepare {of}", K, K, dtype, *["plain"] * plain),
        kernel=prepare,
        arguments={**arguments, **counts, **strides("q", "k", "g")},
        constants={**absent, **prepare_constants(dtype, K)},
        num_warps=NUM_WARPS,
        num_stages=1,
        **options,
    )


def _scan(dtype: torch.dtype, K: int, V: int, *, reverse: bool, **options: Any) -> KernelCase:
    arguments, absent = pointers(
        {
            **dict.fromkeys(("x", "y"), NAMES[dtype]),
            **dict.fromkeys(("through", "entering", "leaving", "split_through"), "fp32"),
            "chunk_states": NAMES[tiling_of(dtype).stored],
        }
    )
    counts = integers("T", "H", "num_chunks", "num_splits", "split_chunks")
    return KernelCase(
        name=case_name("gla", "dstates" if reverse else "states", K, V, dtype),
        kernel=scan_states,
        arguments={**arguments, **counts, **strides("y")},
        constants={**absent, **scan_constants(dtype, K, V), "REVERSE": reverse},
        num_warps=NUM_WARPS,
        num_stages=tiling_of(dtype).scan_stages,
        **options,
    )


def _attend(dtype: torch.dtype, K: int, V: int, *, reverse: bool, **options: Any) -> KernelCase:
    arguments, absent = pointers(
        {
            **dict.fromkeys(("x", "scores", "z", "out"), NAMES[dtype]),
            "states": NAMES[tiling_of(dtype).stored],
            "starts": "i32",
        }
    )
    return KernelCase(
        name=case_name("gla", "dv" if reverse else "o", K, V, dtype),
        kernel=attend,
        arguments={**arguments, **integers("T", "H", "num_chunks"), **strides("z")},
        constants={**absent, **attend_constants(dtype, K, V), "REVERSE": reverse},
        num_warps=NUM_WARPS,
        num_stages=tiling_of(dtype).attend_stages,
        **options,
    )


def _gradients(dtype: torch.dtype, K: int, V: int, *, plain: bool = False, **options: Any) -> KernelCase:
    arguments, absent = pointers(
        {
            **dict.fromkeys(("q", "k", "v", "do", "dq", "dk"), NAMES[dtype]),
            **dict.fromkeys(("paths", "states", "dstates"), NAMES[tiling_of(dtype).stored]),
            **dict.fromkeys(("log_decay", "through", "dlog_decay"), "fp32"),
            "starts": None if plain else "i32",
        }
    )
    return KernelCase(
        name=case_name("gla", "dq dk", K, V, dtype, *["plain"] * plain),
        kernel=gradients,
        arguments={**arguments, **integers("T", "H", "num_chunks"), **strides("q", "k", "v", "g", "o")},
        constants={**absent, **gradient_constants(dtype, K, V)},
        num_warps=NUM_WARPS,
        num_stages=tiling_of(dtype).gradient_stages,
        **options,
    )


def _fold(K: int, V: int) -> KernelCase:
    arguments, _ = pointers(dict.fromkeys(("local", "through", "initial", "entering", "final"), "fp32"))
    return KernelCase(
        name="gla fold",
        kernel=fold_splits,
        arguments={**arguments, **integers("num_splits")},
        constants={"K": K, "V": V, "ELEMENTS": FOLD_ELEMENTS, "REVERSE": False},
        num_warps=NUM_WARPS,
        tensor_cores=False,
    )


def _cases() -> Iterator[KernelCase]:
    """Each width in bf16 with documents, then variants of the usual width. ``gradients`` and fp32 may spill."""
    bf16 = torch.bfloat16
    for K, V in WIDTHS:
        usual = K == V == 128
        yield _prepare(bf16, K, usual=usual)
        for reverse in (False, True):
            yield _scan(bf16, K, V, reverse=reverse, usual=usual and not reverse)
            yield _attend(bf16, K, V, reverse=reverse, usual=usual and not reverse)
        yield _gradients(bf16, K, V, usual=usual, may_spill=True)
    for of in "qk":
        yield _prepare(bf16, 128, of=of, usual=False)
    yield _prepare(bf16, 128, plain=True, usual=False)
    yield _gradients(bf16, 128, 128, plain=True, usual=False, may_spill=True)
    for dtype in (torch.float16, torch.float32):
        options: dict[str, Any] = {"usual": False, "may_spill": dtype == torch.float32}
        yield _prepare(dtype, 128, **options)
        yield _scan(dtype, 128, 128, reverse=False, **options)
        yield _attend(dtype, 128, 128, reverse=False, **options)
        yield _gradients(dtype, 128, 128, **options | {"may_spill": True})
    yield _fold(128, 128)
    yield segments_case("gla")
    yield starts_case("gla")
    yield recurrent_case("gla", bf16, 128, 128, by_channel=True)


COMPILE_CASES = list(_cases())
