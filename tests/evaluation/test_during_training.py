"""What evaluation between steps decides by itself; whole runs are in tests/training/test_evaluation.py."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightscale.errors import UserError
from lightscale.evaluation.during_training import check_layout, weights_hash
from lightscale.evaluation.inference.requests import GenerateUntil, LogLikelihood

ids = np.array([0, 1], dtype=np.int32)
QUESTION = LogLikelihood(context=ids[:1], continuation=ids[1:])
TEXT = GenerateUntil(context=ids, max_tokens=3)


def mesh(*, pipeline: int = 1, sequence: int = 1) -> Any:
    return SimpleNamespace(pipeline=pipeline, sequence=sequence)


@pytest.mark.parametrize(
    ("requests", "ranks"), [([QUESTION, TEXT], mesh()), ([QUESTION], mesh(sequence=2)), ([QUESTION], mesh(pipeline=2))]
)
def test_what_a_layout_can_answer(requests: list[Any], ranks: Any) -> None:
    check_layout(requests, ranks)


@pytest.mark.parametrize("ranks", [mesh(sequence=2), mesh(pipeline=2)])
def test_text_is_not_generated_by_stages_or_parts_of_a_sequence(ranks: Any) -> None:
    with pytest.raises(UserError, match=r"only tensor and data ranks.*--follow"):
        check_layout([QUESTION, TEXT], ranks)


def of(model: nn.Module, *, copy: int = 0) -> str:
    """The hash on one rank, which holds the first copy of the weights or another."""
    engine: Any = SimpleNamespace(
        chunks=[model], mesh=SimpleNamespace(groups=SimpleNamespace(dp_cp=SimpleNamespace(rank=lambda: copy)))
    )
    ranks: Any = SimpleNamespace(on_all=lambda action: [action()])
    return weights_hash(engine, ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hash_of_weights(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 2).to(dtype)
    before = of(model)
    assert of(model) == before
    assert of(model, copy=1) != before, "copies add nothing"
    with torch.no_grad():
        model.bias[0] = torch.nextafter(model.bias[0], torch.tensor(9.0, dtype=dtype))
    assert of(model) != before, "one bit"
