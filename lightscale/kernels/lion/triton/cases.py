"""The kernels of LION in the configurations that training launches, for compilation without a GPU."""

from collections.abc import Iterator
from typing import Any

import torch

from lightscale.kernels.common.triton.cases import NAMES, case_name, integers, pointers, strides
from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.common.triton.launch import NUM_WARPS
from lightscale.kernels.lion.triton.kernels import attend
from lightscale.kernels.lion.triton.states import scan_states
from lightscale.kernels.lion.triton.tiling import attend_constants, scan_constants, tiling_of

ROLES = ("o", "dq", "dk", "dv")


def _variants(*, plain: bool, normalize: bool, learned: bool) -> list[str]:
    return ["plain"] * plain + ["unscaled"] * (not normalize) + ["learned"] * learned


def _scan(
    dtype: torch.dtype,
    width: int,
    *,
    reverse: bool,
    backward: bool = False,
    plain: bool = False,
    normalize: bool = True,
    learned: bool = False,
    **options: Any,
) -> KernelCase:
    """``backward``: for cotangents; ``plain``: without decay and documents; ``learned``: with the decays' gradient."""
    stored = NAMES[tiling_of(dtype).stored]
    columns = "fp32" if normalize else None
    arguments, absent = pointers(
        {
            **dict.fromkeys(("x", "y"), NAMES[dtype]),
            "last": columns if backward else None,
            "sums": None if plain else "fp32",
            "starts": None if plain else "i32",
            **dict.fromkeys(("entering", "leaving"), "fp32"),
            "split_through": None if plain else "fp32",
            "chunk_states": stored,
            "chunk_columns": columns,
            "other_states": stored if learned else None,
            "other_columns": columns if learned else None,
            "decay_parts": "fp32" if learned else None,
        }
    )
    counts = integers("T", "H", "num_chunks", "num_splits", "split_chunks")
    variants = _variants(plain=plain, normalize=normalize, learned=learned)
    what = ("d" if backward else "") + ("suffix" if reverse != backward else "prefix")
    return KernelCase(
        name=case_name("lion", what, width, width, dtype, *variants),
        kernel=scan_states,
        arguments={**arguments, **counts, "stride_sums": "i32:16", **strides("x", "y")},
        constants={
            **absent,
            **scan_constants(dtype, width, width),
            "REVERSE": reverse,
            "EXCLUSIVE": reverse == backward,
            "NORMALIZE": normalize,
        },
        num_warps=NUM_WARPS,
        num_stages=tiling_of(dtype).scan_stages,
        **options,
    )


def _attend(
    dtype: torch.dtype,
    width: int,
    role: str,
    *,
    plain: bool = False,
    normalize: bool = True,
    learned: bool = False,
    **options: Any,
) -> KernelCase:
    transposed = role in ("dq", "dk")
    columns = "fp32" if normalize and role != "dv" else None
    arguments, absent = pointers(
        {
            **dict.fromkeys(("x", "y", "z", "out"), NAMES[dtype]),
            "x_last": columns if role == "dq" else None,
            "y_last": columns if role == "dk" else None,
            **dict.fromkeys(("prefix", "suffix"), NAMES[tiling_of(dtype).stored]),
            **dict.fromkeys(("prefix_column", "suffix_column"), columns),
            "sums": None if plain else "fp32",
            "starts": None if plain else "i32",
            "normalizer": columns if role == "o" else None,
            "own": NAMES[dtype] if learned else None,
            **dict.fromkeys(("crossing_parts", "right_parts"), "fp32" if learned else None),
        }
    )
    counts = integers("T", "H", "num_chunks", "num_token_tiles")
    return KernelCase(
        name=case_name(
            "lion", role, width, width, dtype, *_variants(plain=plain, normalize=normalize, learned=learned)
        ),
        kernel=attend,
        arguments={
            **arguments,
            **counts,
            "eps": "fp32",
            "stride_sums": "i32:16",
            **strides("x", "y", "z", "o"),
        },
        constants={
            **absent,
            **attend_constants(dtype, width, width, transposed=transposed, learned=learned),
            "EXCLUSIVE": role in ("o", "dq"),
        },
        num_warps=NUM_WARPS,
        num_stages=tiling_of(dtype).attend_stages,
        **options,
    )


def _cases() -> Iterator[KernelCase]:
    """Each width in bf16 with decays and documents, then variants of the usual width, all for gates "leave".

    The kernels for sums of log decays and the fold of splits are lightning attention's.
    """
    bf16 = torch.bfloat16
    for width in (128, 64):
        usual = width == 128
        for reverse in (False, True):
            yield _scan(bf16, width, reverse=reverse, usual=False)
            yield _scan(bf16, width, reverse=reverse, backward=True, learned=True, usual=usual and reverse)
        for role in ROLES:
            learned = role in ("dq", "dk")
            kept = usual and role in ("o", "dq")
            yield _attend(bf16, width, role, learned=learned, usual=kept, may_spill=learned)
    for role in ("dq", "dk"):
        yield _attend(bf16, 128, role, usual=False)
    for variant in ({"plain": True}, {"normalize": False}):
        yield _scan(bf16, 128, reverse=False, usual=False, **variant)
        for role in ROLES:
            yield _attend(bf16, 128, role, usual=False, **variant)
    for dtype in (torch.float16, torch.float32):
        # fp16 computes its gradients in fp32, which spills.
        may_spill = dtype == torch.float32
        yield _scan(dtype, 128, reverse=False, usual=False, may_spill=may_spill)
        for role in ROLES if may_spill else ("o",):
            learned = role in ("dq", "dk")
            yield _attend(dtype, 128, role, learned=learned, usual=False, may_spill=may_spill)


COMPILE_CASES = list(_cases())
