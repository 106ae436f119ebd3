"""What gated linear attention refuses, and in which words."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.gla import gla


def one(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": one(2, 10, 24)}, r"q must have 4 dimensions"),
        ({"k": one(2, 10, 3, 9)}, r"q and k must have the same shape .* \(2, 10, 3, 8\) and \(2, 10, 3, 9\)"),
        ({"v": one(2, 11, 3, 8)}, r"v must be \(B, T, H, V\) = \(2, 10, 3, V\), got \(2, 11, 3, 8\)"),
        ({"v": one(2, 10, 3, 8, dtype=torch.float64)}, r"one dtype, got torch.float32"),
        (dict.fromkeys("qkv", one(2, 10, 3, 8, dtype=torch.int64)), r"must be fp16, bf16, fp32 or fp64"),
        ({"log_decay": -one(3)}, r"log_decay must be \(B, T, H, K\) = \(2, 10, 3, 8\), like q, got shape \(3,\)"),
        ({"log_decay": -one(2, 10, 3, 8, dtype=torch.bfloat16)}, r"log_decay must be fp32 or fp64"),
        ({"log_decay": one(2, 10, 3, 8)}, r"log_decay must be at most 0 .* largest value of 1"),
        ({"log_decay": -one(2, 10, 3, 8).to("meta")}, r"log_decay is on meta, but q is on cpu"),
        ({"initial_state": one(2, 3, 8, 9)}, r"initial_state must be \(B, H, K, V\) = \(2, 3, 8, 8\)"),
        ({"initial_state": one(2, 3, 8, 8, dtype=torch.bfloat16)}, r"initial_state must be torch.float32"),
        ({"k": one(2, 10, 3, 8).to("meta")}, r"k is on meta, but q is on cpu"),
        ({"cu_seqlens": torch.tensor([[0, 10, 20]])}, r"cu_seqlens must be a non-empty 1-D int32 or int64"),
        ({"cu_seqlens": torch.tensor([0, 10, 19])}, r"end with B·T = 2·10 = 20, got 0 and 19"),
        ({"cu_seqlens": torch.tensor([0, 7, 20])}, r"every row start, .* lacks 10"),
        ({"chunk_size": 0}, r"chunk_size must be at least 1"),
        ({"backend": "triton9"}, r"gla has no backend 'triton9'; use auto, triton, chunked, reference"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {n: one(2, 10, 3, 8) for n in ("q", "k", "v")}
    arguments["log_decay"] = torch.zeros(2, 10, 3, 8)
    with pytest.raises(UserError, match=message):
        gla(**(arguments | change))
