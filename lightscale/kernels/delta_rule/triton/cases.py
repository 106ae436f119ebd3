"""The kernels of the delta rule in the configurations that training launches, for compilation without a GPU."""

from collections.abc import Iterator
from typing import Any

import torch

from lightscale.kernels.common.triton.cases import NAMES, case_name, integers, pointers, strides
from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.common.triton.launch import NUM_WARPS
from lightscale.kernels.common.triton.recurrent import step_constants
from lightscale.kernels.delta_rule.triton.gradients import gradients_channels, gradients_heads
from lightscale.kernels.delta_rule.triton.pairs import prepare_channels, prepare_heads
from lightscale.kernels.delta_rule.triton.states import scan_back, scan_forward
from lightscale.kernels.delta_rule.triton.step import step
from lightscale.kernels.delta_rule.triton.tiling import (
    gradient_constants,
    prepare_constants,
    scan_constants,
    tiling_of,
)

WIDTHS = ((64, 64), (128, 128), (256, 256))
# Heads of values per head of keys, as in the published models.
_GROUPS = {"GROUPS": 2}
_COUNTS = integers("T", "N", "num_chunks")


def _prepare(
    dtype: torch.dtype, K: int, decay: str, *, of: str = "qk", plain: bool = False, **options: Any
) -> KernelCase:
    """``decay``: per head, per channel, or none. ``of``: the prepared operands. ``plain``: without documents."""
    kind, by_channel, queries = NAMES[dtype], decay == "channels", of == "qk"
    outputs: dict[str, str | None]
    if by_channel:
        outputs = {
            "q_in": kind if queries else None,
            "k_in": kind,
            "k_out": kind,
            "paths": NAMES[tiling_of(dtype).stored],
        }
    else:
        outputs = {"upto": "fp32", "after": "fp32"}
    arguments, absent = pointers(
        {
            "q": kind if queries else None,
            "k": kind,
            "log_decay": None if decay == "none" else "fp32",
            **dict.fromkeys(("beta", "through"), "fp32"),
            "starts": None if plain else "i32",
            "scores": kind if queries else None,
            "corrections": kind,
            **outputs,
        }
    )
    return KernelCase(
        name=case_name("delta_rule", f"prepare {of}", K, K, dtype, decay, *["plain"] * plain),
        kernel=prepare_channels if by_channel else prepare_heads,
        arguments={**arguments, **_COUNTS, **strides("q", "k", *["g"] * by_channel)},
        constants={**absent, **prepare_constants(dtype, K, by_channel=by_channel), **_GROUPS},
        num_warps=NUM_WARPS,
        num_stages=1,
        **options,
    )


def _of_scans(dtype: torch.dtype, *, by_channel: bool) -> dict[str, str | None]:
    """Arguments of both scans, except the values."""
    of_heads = None if by_channel else "fp32"
    return {
        **dict.fromkeys(("q_in", "k_in", "k_out", "corrections", "scores"), NAMES[dtype]),
        "upto": of_heads,
        "after": of_heads,
        **dict.fromkeys(("beta", "through", "entering", "leaving"), "fp32"),
        "starts": "i32",
    }


def _scan(dtype: torch.dtype, K: int, V: int, what: str, *, by_channel: bool = False, **options: Any) -> KernelCase:
    """``what``: outputs; states, with the operands of gradients; or transitions."""
    kind = NAMES[dtype]
    given = _of_scans(dtype, by_channel=by_channel)
    if what != "o":
        given |= {"q_in": None, "scores": None}
    given |= {
        "v": None if what == "transitions" else kind,
        "chunk_states": NAMES[tiling_of(dtype).stored] if what == "states" else None,
        "z": kind if what == "states" else None,
        "o": kind if what == "o" else None,
    }
    arguments, absent = pointers(given)
    return KernelCase(
        name=case_name("delta_rule", what, K, V, dtype, *["channels"] * by_channel),
        kernel=scan_forward,
        arguments={**arguments, **_COUNTS, **integers("num_splits", "split_chunks"), **strides("q", "k", "v")},
        constants={**absent, **scan_constants(dtype, K, V), "GROUPS": 1 if by_channel else 2},
        num_warps=NUM_WARPS,
        num_stages=tiling_of(dtype).scan_stages,
        **options,
    )


def _scan_back(dtype: torch.dtype, K: int, V: int, *, by_channel: bool = False, **options: Any) -> KernelCase:
    kind = NAMES[dtype]
    arguments, absent = pointers(
        {
            **_of_scans(dtype, by_channel=by_channel),
            **dict.fromkeys(("do", "z", "dv"), kind),
            "chunk_states": NAMES[tiling_of(dtype).stored],
            "dbeta": "fp32",
        }
    )
    counts = integers("num_splits", "split_chunks", "num_tokens")
    return KernelCase(
        name=case_name("delta_rule", "dstates", K, V, dtype, *["channels"] * by_channel),
        kernel=scan_back,
        arguments={**arguments, **_COUNTS, **counts, **strides("q", "k", "o")},
        constants={**absent, **scan_constants(dtype, K, V), "GROUPS": 1 if by_channel else 2},
        num_warps=NUM_WARPS,
        num_stages=tiling_of(dtype).scan_stages,
        **options,
    )


def _gradients(dtype: torch.dtype, K: int, V: int, decay: str, *, plain: bool = False, **options: Any) -> KernelCase:
    kind, stored, by_channel = NAMES[dtype], NAMES[tiling_of(dtype).stored], decay == "channels"
    of_logs = None if decay == "none" else "fp32"
    given: dict[str, str | None] = {
        **dict.fromkeys(("q", "k", "do", "dv", "z", "dq", "dk"), kind),
        **dict.fromkeys(("states", "dstates"), stored),
        **dict.fromkeys(("beta", "through"), "fp32"),
        "log_decay": of_logs,
        "dlog_decay": of_logs,
        "starts": None if plain else "i32",
        **({"paths": stored} if by_channel else {"upto": "fp32", "after": "fp32"}),
    }
    arguments, absent = pointers(given)
    extra = strides("g") if by_channel else integers("num_tokens")
    return KernelCase(
        name=case_name("delta_rule", "dq dk", K, V, dtype, decay, *["plain"] * plain),
        kernel=gradients_channels if by_channel else gradients_heads,
        arguments={**arguments, **_COUNTS, **extra, **strides("q", "k", "o")},
        constants={**absent, **gradient_constants(dtype, K, V, by_channel=by_channel), **_GROUPS},
        num_warps=NUM_WARPS,
        num_stages=1,
        **options,
    )


def _step(dtype: torch.dtype, K: int, V: int) -> KernelCase:
    arguments, _ = pointers(
        {
            **dict.fromkeys(("q", "k", "v", "out"), NAMES[dtype]),
            **dict.fromkeys(("log_decay", "beta", "before", "after"), "fp32"),
        }
    )
    return KernelCase(
        name=case_name("delta_rule", "step", K, V, dtype),
        kernel=step,
        arguments={**arguments, "N": "i32", **dict.fromkeys(("stride_gh", "stride_gb"), "i32:16")},
        constants={**step_constants(K, V), **_GROUPS, "stride_gk": 1},
        num_warps=NUM_WARPS,
        tensor_cores=False,
    )


def _cases() -> Iterator[KernelCase]:
    """Each width in bf16 with documents, then variants of the usual width. fp32 may spill."""
    bf16 = torch.bfloat16
    for K, V in WIDTHS:
        usual = K == V == 128
        for decay in ("heads", "channels"):
            by_channel = decay == "channels"
            yield _prepare(bf16, K, decay, usual=usual)
            for what in ("o", "states", "transitions"):
                yield _scan(bf16, K, V, what, by_channel=by_channel, usual=usual and what == "o")
            yield _scan_back(bf16, K, V, by_channel=by_channel, usual=usual and not by_channel)
            yield _gradients(bf16, K, V, decay, usual=usual)
    for decay in ("heads", "channels", "none"):
        yield _prepare(bf16, 128, decay, of="k", usual=False)
        yield _prepare(bf16, 128, decay, plain=True, usual=False)
        yield _gradients(bf16, 128, 128, decay, plain=True, usual=False)
    for dtype in (torch.float16, torch.float32):
        options: dict[str, Any] = {"usual": False, "may_spill": dtype == torch.float32}
        for decay in ("heads", "channels"):
            yield _prepare(dtype, 128, decay, **options)
            yield _scan(dtype, 128, 128, "o", by_channel=decay == "channels", **options)
            yield _scan_back(dtype, 128, 128, by_channel=decay == "channels", **options)
            yield _gradients(dtype, 128, 128, decay, **options)
    yield _step(bf16, 128, 128)


COMPILE_CASES = list(_cases())
