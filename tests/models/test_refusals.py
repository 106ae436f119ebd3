"""Never a wrong result: every architecture on every axis, at every degree, either runs or is refused by name.

What runs is held to one process in tests/parallel/test_parity.py.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from lightscale.config.layout import check_layout
from lightscale.config.mixers import MIXERS, reading
from lightscale.config.model import ModelConfig
from lightscale.config.schema import ParallelConfig, RunConfig
from lightscale.errors import UserError
from lightscale.models.registry import check_model

AXES = ("tensor", "pipeline", "sequence")
# Of the model below: 4 layers, width 64, 4 heads, GLU width 128, 512 ids; sequences of 64 tokens, 4 a step.
ABLE = {"tensor": {1, 2, 4}, "pipeline": {1, 2, 3, 4}, "sequence": {1, 2, 4, 8, 16, 32, 64}}


@pytest.mark.parametrize(("name", "axis"), list(itertools.product(MIXERS, AXES)))
def test_every_degree_runs_or_is_refused_with_what_to_use(
    name: str, axis: str, tiny_config: Callable[..., RunConfig]
) -> None:
    for degree in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128):
        task = "causal" if name in reading("causal") else "masked"
        config = tiny_config(f"model.mixer={name}", f"task.name={task}", f"parallel.{axis}={degree}")
        if degree in ABLE[axis]:
            check_model(config.model, config.parallel)
            assert getattr(check_layout(config, degree), axis) == degree
            continue
        with pytest.raises(UserError) as refused:
            check_layout(config, degree)
        message = str(refused.value)
        assert f"parallel.{axis} = {degree}" in message or f"parallel.{axis} = {degree} times" in message
        assert "; use " in message


@pytest.mark.parametrize("axis", AXES)
def test_a_layer_that_cannot_be_split_says_so(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it stands in the model, and whatever stands beside it: a mixer of whole sequences and all heads."""
    whole = replace(MIXERS["tnl"], axes=frozenset({"pipeline", "data"}))
    monkeypatch.setitem(MIXERS, "whole", whole)
    model = ModelConfig(
        mixer=["tnl", "tnl", "whole"], num_layers=3, hidden_size=64, num_heads=4, intermediate_size=96, vocab_size=128
    )
    parallel = ParallelConfig(**{axis: 2})
    if axis in whole.axes:
        check_model(model, parallel)
        return
    with pytest.raises(UserError) as refused:
        check_model(model, parallel)
    for part in (f"parallel.{axis} = 2", "layer 2 (whole)", f"use parallel.{axis} = 1,", "pipeline"):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "world_size", "parts"),
    [
        (["parallel.virtual_stages=2"], 1, ["parallel.virtual_stages = 2", "parallel.pipeline >= 2"]),
        (
            ["parallel.virtual_stages=3", "parallel.pipeline=2"],
            2,
            ["model.num_layers = 4", "6 stages", "use parallel.pipeline = 1"],
        ),
        (
            ["parallel.virtual_stages=2", "parallel.pipeline=2", "train.global_batch_size=3"],
            2,
            ["train.global_batch_size = 3", "groups of parallel.pipeline = 2", "use 4 sequences"],
        ),
    ],
)
def test_virtual_stages_that_cannot_be(
    overrides: list[str], world_size: int, parts: list[str], tiny_config: Callable[..., RunConfig]
) -> None:
    with pytest.raises(UserError) as refused:
        check_layout(tiny_config(*overrides), world_size)
    for part in parts:
        assert part in str(refused.value)
