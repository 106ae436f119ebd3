"""What the scan of Toeplitz positional encoding refuses, and in which words."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.tpe import tpe_scan


def one(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": one(2, 10, 3, 8)}, r"x must have 3 dimensions \(B, T, D\), got shape \(2, 10, 3, 8\)"),
        ({"x": one(2, 10, 8, dtype=torch.int64)}, r"x must be fp16, bf16, fp32 or fp64, got torch.int64"),
        ({"log_decay": -one(2, 3)}, r"log_decay must be \(E,\), .* got shape \(2, 3\)"),
        ({"log_decay": -one(3).bfloat16()}, r"log_decay must be \(E,\), fp32 or fp64 .* torch.bfloat16"),
        ({"log_decay": one(3)}, r"log_decay must be at most 0 .* largest value of 1"),
        ({"gamma": one(3, 8)}, r"gamma must be \(D, E\) = \(8, 3\), got shape \(3, 8\)"),
        ({"gamma": one(8, 3).half()}, r"gamma must be of x's dtype torch.float32, fp32 or fp64, got torch.float16"),
        ({"gamma": one(8, 3).to("meta")}, r"gamma is on meta, but x is on cpu"),
        ({"initial_state": one(2, 3, 8)}, r"initial_state must be \(B, D, E\) = \(2, 8, 3\)"),
        ({"initial_state": one(2, 8, 3).bfloat16()}, r"initial_state must be torch.float32 for inputs of"),
        ({"cu_seqlens": torch.tensor([[0, 10, 20]])}, r"cu_seqlens must be a non-empty 1-D int32 or int64"),
        ({"cu_seqlens": torch.tensor([0, 10, 19])}, r"end with B·T = 2·10 = 20, got 0 and 19"),
        ({"cu_seqlens": torch.tensor([0, 7, 20])}, r"every row start, .* lacks 10"),
        ({"chunk_size": 0}, r"chunk_size must be at least 1"),
        ({"backend": "triton9"}, r"no backend 'triton9'; use auto, triton, chunked, reference"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": one(2, 10, 8), "log_decay": -one(3), "gamma": one(8, 3)}
    with pytest.raises(UserError, match=message):
        tpe_scan(**(arguments | change))
