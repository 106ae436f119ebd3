"""What LION's operator refuses, and in which words."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.lion import LionState, lion


def one(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


STATE = one(2, 3, 8, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": one(2, 10, 24)}, r"q must have 4 dimensions"),
        ({"v": one(2, 11, 3, 8)}, r"v must be \(B, T, H, V\) = \(2, 10, 3, V\), got \(2, 11, 3, 8\)"),
        ({"log_decay": -one(2)}, r"log_decay must be \(H,\) = \(3,\) or \(B, T, H\) = \(2, 10, 3\), got shape \(2,\)"),
        ({"log_decay": -one(3, dtype=torch.bfloat16)}, r"log_decay must be fp32 or fp64"),
        ({"log_decay": one(3)}, r"log_decay must be at most 0 .* largest value of 1"),
        ({"gate": "left"}, r"gate must be one of leave, enter, got 'left'"),
        ({"eps": -1.0}, r"eps must be at least 0, got -1.0"),
        (
            {"initial_state": LionState(STATE, one(2, 3, 8, 8))},
            r"initial_state.suffix must be \(B, H, K, V \+ 1\) = \(2, 3, 8, 9\), got shape \(2, 3, 8, 8\)",
        ),
        (
            {"initial_state": LionState(STATE, STATE), "normalize": False},
            r"initial_state.prefix must be \(B, H, K, V\) = \(2, 3, 8, 8\), got shape \(2, 3, 8, 9\)",
        ),
        ({"initial_state": LionState(STATE.half(), STATE)}, r"initial_state.prefix must be torch.float32"),
        ({"cu_seqlens": torch.tensor([0, 7, 20])}, r"every row start, .* lacks 10"),
        ({"chunk_size": 0}, r"chunk_size must be at least 1"),
        ({"backend": "triton9"}, r"no backend 'triton9'; use auto, triton, chunked, reference"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {n: one(2, 10, 3, 8) for n in ("q", "k", "v")}
    with pytest.raises(UserError, match=message):
        lion(**(arguments | change))
