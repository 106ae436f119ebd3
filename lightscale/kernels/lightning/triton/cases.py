"""The kernels of lightning attention in the configurations that training launches, for compilation without a GPU."""

from collections.abc import Iterator
from typing import Any

import torch

from lightscale.kernels.common.triton.cases import NAMES, case_name, integers, pointers, strides
from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.common.triton.launch import NUM_WARPS
from lightscale.kernels.common.triton.recurrent import recurrent_case
from lightscale.kernels.lightning.triton.decays import gather_decays, sum_decays
from lightscale.kernels.lightning.triton.kernels import attend
from lightscale.kernels.lightning.triton.states import fold_splits, scan_states
from lightscale.kernels.lightning.triton.tiling import (
    DECAY_HEADS,
    FOLD_ELEMENTS,
    attend_constants,
    scan_constants,
    tiling_of,
)

WIDTHS = ((64, 64), (128, 128), (256, 128))
ROLES = ("o", "dq", "dk", "dv")


def _scan(
    dtype: torch.dtype,
    K: int,
    V: int,
    *,
    reverse: bool,
    plain: bool = False,
    learned: bool = False,
    angles: bool = False,
    tokens: bool = False,
    **options: Any,
) -> KernelCase:
    """``plain``: no decay, no documents; ``learned``: gradients of decay and angles; ``tokens``: a decay per token."""
    stored = NAMES[tiling_of(dtype).stored]
    arguments, absent = pointers(
        {
            **dict.fromkeys(("x", "y"), NAMES[dtype]),
            **dict.fromkeys(("turns", "positions"), "i64" if angles else None),
            **dict.fromkeys(("entering", "leaving"), "fp32"),
            "split_through": "fp32" if tokens else None,
            "log_decay": None if plain or tokens else "fp32",
            "sums": "fp32" if tokens else None,
            "starts": None if plain else "i32",
            "chunk_states": stored,
            "other_states": stored if learned else None,
            "decay_parts": "fp32" if learned else None,
        }
    )
    counts = integers("T", "H", "num_chunks", "num_splits", "split_chunks")
    variants = ["plain"] * plain + ["tokens"] * tokens + ["learned"] * learned + ["angles"] * angles
    return KernelCase(
        name=case_name("lightning", "dstates" if reverse else "states", K, V, dtype, *variants),
        kernel=scan_states,
        arguments={**arguments, **counts, **strides("x", "y")},
        constants={**absent, **scan_constants(dtype, K, V), "REVERSE": reverse, "AXES": 1},
        num_warps=NUM_WARPS,
        num_stages=tiling_of(dtype).scan_stages,
        **options,
    )


def _attend(
    dtype: torch.dtype,
    K: int,
    V: int,
    role: str,
    *,
    plain: bool = False,
    learned: bool = False,
    angles: bool = False,
    tokens: bool = False,
    **options: Any,
) -> KernelCase:
    transposed = role in ("dq", "dk")
    arguments, absent = pointers(
        {
            **dict.fromkeys(("x", "y", "z", "out"), NAMES[dtype]),
            **dict.fromkeys(("turns", "positions"), "i64" if angles else None),
            "states": NAMES[tiling_of(dtype).stored],
            "log_decay": None if plain or tokens else "fp32",
            "sums": "fp32" if tokens else None,
            "starts": None if plain else "i32",
            "own": NAMES[dtype] if learned or (angles and transposed) else None,
            "decay_parts": "fp32" if learned else None,
            "angle_parts": "fp32" if angles and transposed else None,
        }
    )
    counts = integers("T", "H", "num_chunks", "num_token_tiles")
    X, Z = (V, K) if transposed else (K, V)
    constants = attend_constants(dtype, X, Z, angles=angles, reverse=role in ("dk", "dv"), transposed=transposed)
    variants = ["plain"] * plain + ["tokens"] * tokens + ["learned"] * learned + ["angles"] * angles
    return KernelCase(
        name=case_name("lightning", role, K, V, dtype, *variants),
        kernel=attend,
        arguments={**arguments, **counts, **strides("x", "y", "z", "o")},
        constants={**absent, **constants, "AXES": 1},
        num_warps=NUM_WARPS,
        num_stages=tiling_of(dtype).attend_stages,
        **options,
    )


def _fold() -> KernelCase:
    arguments, absent = pointers(
        {
            **dict.fromkeys(("local", "initial", "log_decay", "entering", "final"), "fp32"),
            "split_through": None,
            "starts": "i32",
        }
    )
    return KernelCase(
        name="lightning fold",
        kernel=fold_splits,
        arguments={**arguments, **integers("T", "H", "num_splits", "split_tokens"), "num_elements": "i32:16"},
        constants={**absent, "ELEMENTS": FOLD_ELEMENTS, "REVERSE": False},
        num_warps=NUM_WARPS,
        tensor_cores=False,
    )


def _decays() -> Iterator[KernelCase]:
    """The kernels for sums of log decays per token, and for the gather of their gradient."""
    tiling = tiling_of(torch.bfloat16)
    options: dict[str, Any] = {"num_warps": NUM_WARPS, "tensor_cores": False, "usual": False}
    yield KernelCase(
        name="lightning sums of decays",
        kernel=sum_decays,
        arguments={
            **pointers({"log_decay": "fp32", "sums": "fp32"})[0],
            **integers("T", "H", "num_chunks"),
            **dict.fromkeys(("stride_b", "stride_t"), "i32:16"),
        },
        constants={"stride_h": 1, "HEADS": DECAY_HEADS, "CHUNK": tiling.chunk},
        **options,
    )
    yield KernelCase(
        name="lightning gather of decays",
        kernel=gather_decays,
        arguments={
            **pointers(dict.fromkeys(("by_queries", "by_keys", "by_states", "dlog_decay"), "fp32"))[0],
            **integers("T", "H", "num_chunks", "num_token_tiles"),
        },
        constants={
            **dict.fromkeys(("QUERY_TILES", "KEY_TILES"), 2),
            "STATE_TILES": 4,
            "BLOCK_T": tiling.tile_tokens,
            "CHUNK": tiling.chunk,
        },
        **options,
    )


def _cases() -> Iterator[KernelCase]:
    """Each width in bf16 with decay and documents, then variants of the usual width. dq and dv are o and dk again.

    Angles double K: 128x128 with them has states of 256x128.
    """
    bf16 = torch.bfloat16
    for K, V in WIDTHS:
        for reverse in (False, True):
            yield _scan(bf16, K, V, reverse=reverse, usual=K == V == 128)
        for role in ROLES:
            yield _attend(bf16, K, V, role, usual=(role in ("o", "dk") and K != 64) or (role == "dv" and K == 256))
    yield _scan(bf16, 128, 128, reverse=True, learned=True, usual=False)
    for role in ("dq", "dk"):
        yield _attend(bf16, 128, 128, role, learned=True, usual=False)
    for dtype in (torch.float16, torch.float32):
        yield _scan(dtype, 128, 128, reverse=False, usual=False)
        for role in ("o", "dk"):
            yield _attend(dtype, 128, 128, role, usual=False)
    yield _scan(bf16, 128, 128, reverse=False, plain=True, usual=False)
    for role in ("o", "dk"):
        yield _attend(bf16, 128, 128, role, plain=True, usual=False)
    for plain in (False, True):
        for reverse in (False, True):
            yield _scan(bf16, 128, 128, reverse=reverse, plain=plain, angles=True, usual=not plain and not reverse)
        for role in ROLES:
            yield _attend(bf16, 128, 128, role, plain=plain, angles=True, usual=not plain and role in ("o", "dk"))
    for dtype, K in ((bf16, 64), (torch.float16, 128), (torch.float32, 128)):
        # fp32 is for checks; on Triton 3.6 its states spill two registers.
        allowed = {"usual": False, "may_spill": dtype == torch.float32}
        yield _scan(dtype, K, K, reverse=False, angles=True, **allowed)
        for role in ("o", "dk"):
            yield _attend(dtype, K, K, role, angles=True, **allowed)
    for K, V in WIDTHS:
        for reverse in (False, True):
            yield _scan(bf16, K, V, reverse=reverse, tokens=True, learned=reverse, usual=K == V == 128 and reverse)
        for role in ROLES:
            learned = role in ("dq", "dk")
            yield _attend(bf16, K, V, role, tokens=True, learned=learned, usual=K == V == 128 and learned)
    for role in ("dq", "dk"):
        yield _attend(bf16, 128, 128, role, tokens=True, usual=False)
    for dtype in (torch.float16, torch.float32):
        allowed = {"usual": False, "may_spill": dtype == torch.float32}
        yield _scan(dtype, 128, 128, reverse=True, tokens=True, learned=True, **allowed)
        for role in ("o", "dq", "dk"):
            yield _attend(dtype, 128, 128, role, tokens=True, learned=role != "o", **allowed)
    # With learned angles and decays, as in no large model yet; some cases spill.
    for reverse in (False, True):
        yield _scan(bf16, 128, 128, reverse=reverse, tokens=True, learned=reverse, angles=True, usual=False)
    for role in ROLES:
        learned = role in ("dq", "dk")
        yield _attend(bf16, 128, 128, role, tokens=True, learned=learned, angles=True, usual=False, may_spill=learned)
    # The column of a normaliser behind the values.
    for reverse in (False, True):
        yield _scan(bf16, 128, 129, reverse=reverse, tokens=True, learned=reverse, usual=False)
    for role in ROLES:
        yield _attend(bf16, 128, 129, role, tokens=True, learned=role in ("dq", "dk"), usual=False)
    yield from _decays()
    yield _fold()
    yield recurrent_case("lightning", bf16, 256, 128, by_channel=False)


COMPILE_CASES = list(_cases())
