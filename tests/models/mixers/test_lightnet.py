"""LightNet against full matrices of softmax weights."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.schema import ModelConfig

plain = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "plain_models.py")))

MODEL = ModelConfig(
    mixer="lightnet",
    num_layers=3,
    hidden_size=27,
    num_heads=3,
    intermediate_size=37,
    vocab_size=101,
    glu_activation="silu",
)
RunRanks = Callable[..., list[Any]]


def mix(x: Tensor, weights: dict[str, Tensor], layer: int) -> Tensor:
    q, k, v = plain.heads(MODEL, x, weights)
    position = torch.arange(len(x), dtype=torch.float64)
    distance = position[:, None] - position
    # After token t the weight of token s in channel c is the softmax of k over the tokens up to t.
    weight = torch.where(distance[None, :, :, None] >= 0, k.exp()[:, None], 0.0)
    weight = weight / weight.sum(dim=2, keepdim=True)
    j = torch.arange(MODEL.hidden_size, dtype=torch.float64).view(MODEL.num_heads, 1, 1, MODEL.head_dim)
    cosines = torch.cos(distance[None, :, :, None] * 10000.0 ** (-2 * j / MODEL.hidden_size))
    scores = torch.einsum("htc, htsc, htsc -> hts", plain.silu(q), weight, cosines)
    return plain.gated_output(MODEL, scores @ v, x, weights)


@pytest.fixture(scope="module")
def built(run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(plain.initial_and_disturbed, 1, MODEL, plain.LENGTHS)
    return dict(found)


def test_the_model_is_the_plain_one(built: dict[str, Any]) -> None:
    rows = plain.batch(MODEL, plain.LENGTHS)
    plain.assert_equal(built, plain.plain_figures(MODEL, built["weights"], rows, mix, plain.toeplitz))


def test_its_angles_are_fixed(built: dict[str, Any]) -> None:
    assert not [name for name in built["weights"] if "theta" in name or "lrpe" in name]
