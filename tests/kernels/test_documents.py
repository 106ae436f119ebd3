"""Boundaries of one size for all documents: what they are, and that operators compute with them what they compute with
each boundary once, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.kernels.common.documents import boundaries_of_tokens, check_cu_seqlens, document_numbers
from lightscale.kernels.common.triton.documents import document_starts
from lightscale.models import kernel_check

SHAPE = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "vocab_size": 128}
TOKENS = 40


def test_boundaries_of_tokens() -> None:
    """A document in the middle of a row, one of a single token, and a row that continues one of the rank before."""
    positions = torch.tensor([[0, 1, 0, 0, 1], [7, 8, 9, 0, 1]])
    boundaries = boundaries_of_tokens(positions)
    assert boundaries.tolist() == [0, 0, 2, 3, 3, 5, 5, 5, 8, 8, 10]
    check_cu_seqlens(boundaries, num_rows=2, num_tokens=5)
    each_once = torch.tensor([0, 2, 3, 5, 8, 10])
    numbers, starts = (
        [of(cut, num_rows=2, num_tokens=5) for cut in (boundaries, each_once)] for of in (document_numbers, starts_of)
    )
    assert torch.equal(*numbers) and torch.equal(*starts)
    assert boundaries_of_tokens(torch.empty(2, 0, dtype=torch.int64)).tolist() == [0]


def starts_of(cut: Tensor, **sizes: int) -> Tensor:
    found = document_starts(cut, **sizes)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_boundaries", [2, 3, 4, 5, 33])
def test_starts_of_documents(num_boundaries: int, dtype: torch.dtype) -> None:
    """Against a search from the front: rows of 350 tokens of which two programs take parts, and empty documents."""
    rows, tokens = 3, 350
    generator = torch.Generator().manual_seed(num_boundaries)
    inner = torch.randint(0, rows * tokens + 1, (num_boundaries - 2,), generator=generator).tolist()
    edges = sorted([0, *inner, rows * tokens])
    expected = [max(edge for edge in edges if edge <= i) - i // tokens * tokens for i in range(rows * tokens)]
    found = starts_of(torch.tensor(edges, dtype=dtype), num_rows=rows, num_tokens=tokens)
    assert found.dtype == torch.int32
    assert found.flatten().tolist() == [start if start > 0 else -1 for start in expected]
    assert document_starts(None, num_rows=rows, num_tokens=tokens) is None
    assert starts_of(torch.zeros(1, dtype=dtype), num_rows=2, num_tokens=0).shape == (2, 0)


@pytest.mark.parametrize("mixer", ["tnl", "hgrn2", "lightnet", "gated-delta-net", "lion-s", "decay-attention"])
def test_operators_compute_the_same(monkeypatch: pytest.MonkeyPatch, mixer: str) -> None:
    """Outputs and gradients of the chunked forms and the references, which read boundaries themselves."""
    model = ModelConfig.model_validate({"mixer": mixer, **SHAPE})
    draw = kernel_check._Draw(model, torch.float32, torch.device("cpu"), TOKENS, 1)
    cases = [kernel_check._CASES[name] for name in kernel_check.operators_of(model) if name in kernel_check._CASES]
    assert cases
    once = draw.documents()
    repeated = boundaries_of_tokens(draw.positions())
    assert len(once) < len(repeated) == TOKENS + 1

    def results(case: Any, cut: Tensor, backend: str) -> list[Tensor]:
        draw = kernel_check._Draw(model, torch.float32, torch.device("cpu"), TOKENS, 1)
        monkeypatch.setattr(draw, "documents", lambda: cut)
        made = case(draw)
        inputs = {name: x.requires_grad_() for name, x in made.inputs.items()}
        output = made.compute(backend, **inputs)
        cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        return [output, *torch.autograd.grad(output, list(inputs.values()), cotangent)]

    for case in cases:
        for backend in ("chunked", "reference"):
            for found, expected in zip(results(case, repeated, backend), results(case, once, backend), strict=True):
                assert torch.equal(found, expected)
