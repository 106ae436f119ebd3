"""LightNet against full matrices of softmax weights."""

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale.config.model import ModelConfig

plain = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "plain_models.py")))
mixers = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "plain_mixers.py")))

MODEL = ModelConfig(
    mixer="lightnet",
    num_layers=3,
    hidden_size=27,
    num_heads=3,
    intermediate_size=37,
    vocab_size=101,
    glu_activation="silu",
)
mix = functools.partial(mixers.lightnet, MODEL)
RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def built(run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(plain.initial_and_disturbed, 1, MODEL, plain.LENGTHS)
    return dict(found)


def test_the_model_is_the_plain_one(built: dict[str, Any]) -> None:
    rows = plain.batch(MODEL, plain.LENGTHS)
    plain.assert_equal(built, plain.plain_figures(MODEL, built["weights"], rows, mix, plain.toeplitz))


def test_its_angles_are_fixed(built: dict[str, Any]) -> None:
    assert not [name for name in built["weights"] if "theta" in name or "lrpe" in name]
