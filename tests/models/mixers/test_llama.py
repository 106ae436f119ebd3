"""LLaMA against full matrices of attention, with rotations as products of complex numbers."""

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightscale.config.model import ModelConfig
from lightscale.config.schema import ParallelConfig
from lightscale.errors import UserError
from lightscale.models.registry import check_model

plain = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "plain_models.py")))
mixers = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "plain_mixers.py")))

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 30, "num_heads": 3, "intermediate_size": 37, "vocab_size": 101}
MODEL = ModelConfig(mixer="llama", norm="rmsnorm", glu_activation="silu", **SHAPE)
mix = functools.partial(mixers.llama, MODEL)
RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def built(run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(plain.initial_and_disturbed, 1, MODEL, plain.LENGTHS)
    return dict(found)


def test_the_model_is_the_plain_one(built: dict[str, Any]) -> None:
    expected = plain.plain_figures(MODEL, built["weights"], plain.batch(MODEL, plain.LENGTHS), mix)
    plain.assert_equal(built, expected)


def test_norms_begin_with_ones(built: dict[str, Any]) -> None:
    norms = {name: weight for name, weight in built["initial"].items() if "norm" in name}
    assert len(norms) == 2 * MODEL.num_layers + 1
    assert all(torch.equal(weight, torch.ones(MODEL.hidden_size)) for weight in norms.values())


def test_an_odd_head_width_is_refused() -> None:
    shape = {**SHAPE, "hidden_size": 33}
    with pytest.raises(
        UserError, match=r"model\.hidden_size = 33 and model\.num_heads = 3 .* model\.hidden_size = 36, or"
    ):
        check_model(ModelConfig(mixer=["tnl", "llama"], **shape), ParallelConfig())
    check_model(ModelConfig(mixer="tnl", **shape), ParallelConfig())
