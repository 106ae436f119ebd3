"""What LightNet's operator refuses, and by which messages."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.lightnet import Angles, LightNetState, lightnet_attention, lightnet_noncausal


def one(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def angles(theta: Tensor, positions: Tensor | None = None) -> Angles:
    return Angles(theta, torch.arange(10).repeat(2, 1) if positions is None else positions)


INPUTS = [
    ({"q": one(2, 10, 24)}, r"q must have 4 dimensions"),
    ({"k": one(2, 10, 3, 9)}, r"q and k must have the same shape .* \(2, 10, 3, 8\) and \(2, 10, 3, 9\)"),
    ({"v": one(2, 11, 3, 8)}, r"v must be \(B, T, H, V\) = \(2, 10, 3, V\), got \(2, 11, 3, 8\)"),
    ({"v": one(2, 10, 3, 8, dtype=torch.float64)}, r"one dtype, got torch.float32"),
    (dict.fromkeys("qkv", one(2, 10, 3, 8, dtype=torch.int64)), r"must be fp16, bf16, fp32 or fp64"),
    ({"k": one(2, 10, 3, 8).to("meta")}, r"k is on meta, but q is on cpu"),
    ({"angles": angles(one(3, 9))}, r"angles.theta must be \(H, K\) = \(3, 8\) in fp32 or fp64, got shape \(3, 9\)"),
    ({"angles": angles(one(3, 8).half())}, r"angles.theta must be .* got shape \(3, 8\), torch.float16"),
    ({"angles": angles(one(3, 8), one(2, 10))}, r"angles.positions must be \(B, T\) = \(2, 10\) in int64"),
    ({"cu_seqlens": torch.tensor([[0, 10, 20]])}, r"cu_seqlens must be a non-empty 1-D int32 or int64"),
    ({"cu_seqlens": torch.tensor([0, 10, 19])}, r"end with B·T = 2·10 = 20, got 0 and 19"),
    ({"cu_seqlens": torch.tensor([0, 7, 20])}, r"every row start, .* lacks 10"),
]


def state(z: Tensor, S: Tensor) -> dict[str, Any]:
    return {"initial_state": LightNetState(z, S)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *INPUTS,
        (state(one(2, 3, 9), one(2, 3, 8, 8)), r"z must be \(B, H, K\) = \(2, 3, 8\), got shape \(2, 3, 9\)"),
        (
            state(one(2, 3, 8), one(2, 3, 16, 8)),
            r"S must be \(B, H, K, V\) = \(2, 3, 8, 8\), got shape \(2, 3, 16, 8\)",
        ),
        (
            {"angles": angles(one(3, 8))} | state(one(2, 3, 8), one(2, 3, 8, 8)),
            r"S must be \(B, H, 2K, V\) = \(2, 3, 16, 8\), got shape \(2, 3, 8, 8\)",
        ),
        (state(one(2, 3, 8).bfloat16(), one(2, 3, 8, 8)), r"initial_state's z must be torch.float32"),
        (state(one(2, 3, 8), one(2, 3, 8, 8).to("meta")), r"initial_state's S is on meta, but q is on cpu"),
        ({"chunk_size": 0}, r"chunk_size must be at least 1"),
        ({"backend": "triton9"}, r"no backend 'triton9'; use auto, triton, chunked, reference"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {n: one(2, 10, 3, 8) for n in ("q", "k", "v")}
    with pytest.raises(UserError, match=message):
        lightnet_attention(**(arguments | change))


@pytest.mark.parametrize(("change", "message"), INPUTS)
def test_bad_input_of_the_form_without_causality_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {n: one(2, 10, 3, 8) for n in ("q", "k", "v")}
    with pytest.raises(UserError, match=message):
        lightnet_noncausal(**(arguments | change))
