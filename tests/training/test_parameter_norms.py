"""Norms by group of parameters, and the loss by source, against plain computations on whole tensors, on any layout."""

import math
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.parallel.engine import Engine
from lightscale.training.measurements.parameter_norms import GROUPS, ParameterNorms, group_of

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "tiny_engine.py")))

RunRanks = Callable[..., list[Any]]
# Weights of every group: of norms, of an embedding with a part of its own, of mixers that tensor ranks do not split.
MODEL: dict[str, Any] = {"mixer": ["tnl", "lightnet"], "norm": "rmsnorm"}
ON_TWO = [(2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 1, 1, 1), (2, 1, 2, 1, 2)]
STEPS = 3


def whole_norms(tensors: dict[str, Tensor]) -> dict[str, float]:
    """By group, of whole tensors."""
    squares = dict.fromkeys(GROUPS, 0.0)
    for name, tensor in tensors.items():
        squares[GROUPS[group_of(name)]] += float(tensor.double().square().sum())
    return {group: math.sqrt(square) for group, square in squares.items()}


def measure(engine: Engine, is_measured: bool) -> tuple[list[Any], dict[str, Tensor]]:
    """For each step what is measured, what is expected, the global norm; and the weights at the end."""
    found = []
    for step in range(STEPS):
        engine.forward_backward(tiny.step_batches(step, engine.mesh))
        norm = engine.gradient_norm()
        before = {name: weight.clone() for name, weight in tiny.weights(engine).items()}
        norms = ParameterNorms(engine) if is_measured else None
        names = {id(parameter): name for name, parameter in tiny.named(engine)}
        own = {names[id(p)]: (p, gradient) for _, p, gradient in engine.gradients()} if is_measured else {}
        gradients = {name: one.clone() for name, one in tiny.gather(engine, own).items()}
        engine.apply(0.1)
        if norms is not None:
            after = tiny.weights(engine)
            weights, updates = whole_norms(before), whole_norms({name: after[name] - before[name] for name in before})
            ratios = {group: updates[group] / weights[group] for group in GROUPS}
            found.append((norms.result(), whole_norms(gradients), ratios, norm))
    return found, tiny.weights(engine)


def on_layouts(rank: int, world_size: int, init_method: str, layouts: list[Any]) -> list[Any]:
    found = []
    for number, axes in enumerate(layouts):
        runs = []
        for is_measured in (True, False):
            with tiny.engine_on(axes, rank, f"{init_method}-{number}-{is_measured}", **MODEL) as engine:
                runs.append(measure(engine, is_measured))
        (steps, weights), (_, undisturbed) = runs
        same = all(torch.equal(weights[name], undisturbed[name]) for name in undisturbed)
        found.append((axes, steps, same))
    return found


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "layouts"), [(1, [(1, 1, 1, 1)]), (2, ON_TWO)])
def test_norms_are_those_of_the_whole_tensors_and_change_nothing(
    run_ranks: RunRanks, world_size: int, layouts: list[Any]
) -> None:
    for of_rank in run_ranks(on_layouts, world_size, layouts):
        for axes, steps, same in of_rank:
            assert same, f"{axes}: the weights with and without measuring"
            for result, gradients, ratios, norm in steps:
                assert set(result["gradient_norm"]) == set(GROUPS), axes
                assert result["gradient_norm"] == pytest.approx(gradients, rel=1e-5), axes
                assert result["update_ratio"] == pytest.approx(ratios, rel=1e-4), axes
                assert math.hypot(*result["gradient_norm"].values()) == pytest.approx(norm, rel=1e-5), axes


def by_source(rank: int, world_size: int, init_method: str, layouts: list[Any]) -> list[Any]:
    """What one pass says of all sources, and what a pass says of the rows of each source alone."""
    found = []
    for number, axes in enumerate(layouts):
        with tiny.engine_on(axes, rank, f"{init_method}-{number}") as engine:
            engine.num_sources = 3
            # Of source 1 there is nothing; row 0 of each micro-batch is of source 2, its other row of source 0.
            plain = tiny.step_batches(0, engine.mesh)
            for one in plain:
                one.loss_mask[0, 5:] = 0
            batches = [replace(one, sources=torch.tensor([2, 0])) for one in plain]
            sums = engine.forward_backward(batches)
            alone = []
            for source in range(3):
                of_source = [
                    replace(one, loss_mask=one.loss_mask * (one.sources == source)[:, None]) for one in batches
                ]
                alone.append(engine.forward_only(of_source))
            found.append((axes, sums, alone))
    return found


def test_the_loss_of_each_source_is_that_of_its_rows(run_ranks: RunRanks) -> None:
    for of_rank in run_ranks(by_source, 2, ON_TWO):
        for axes, sums, alone in of_rank:
            assert [count for _, count in sums.by_source] == [one.tokens for one in alone], axes
            assert alone[1].tokens == 0 < alone[2].tokens < alone[0].tokens
            for (loss, _), one in zip(sums.by_source, alone, strict=True):
                assert loss == pytest.approx(one.loss, rel=1e-6), axes
            assert sum(loss for loss, _ in sums.by_source) == pytest.approx(sums.loss, rel=1e-12), axes
            assert sum(count for _, count in sums.by_source) == sums.tokens, axes
