"""Projections as one product: losses, gradients and weights are those of a product for each, on every layout."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lightscale.models.layers import projections

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tiny_engine.py")))

MIXERS = ["tnl", "hgrn2", "lightnet", "llama"]
Axes = tuple[int, ...]  # processes, tensor, pipeline, sequence; data is the rest


def both_ways(
    rank: int, world_size: int, init_method: str, layouts: list[Axes], precision: str
) -> list[tuple[int, float, dict[str, float]]]:
    """Of each layout: joint products, the losses' difference, and those of gradients and weights of two steps."""
    found = []
    model: dict[str, Any] = {"mixer": MIXERS, "precision": precision}
    for axes in layouts:
        records, products = [], 0
        for joins in (True, False):
            product = mock.Mock(side_effect=projections._product)
            with (
                mock.patch.object(projections, "_joins", return_value=joins),
                mock.patch.object(projections, "_product", product),
                tiny.engine_on(axes, rank, f"{init_method}-{axes}-{joins}", **model) as engine,
            ):
                records.append(tiny.train(engine, 0, 2))
            products += product.call_count
        joint, apart = records
        losses = max(abs(a[0] - b[0]) for a, b in zip(joint, apart, strict=True))
        errors = {
            f"{kind} {step} {name}": tiny.error(a[kind][name], b[kind][name])
            for step, (a, b) in enumerate(zip(joint, apart, strict=True))
            for kind in (1, 2)
            for name in b[kind]
        }
        found.append((products, losses, errors))
    return found


LAYOUTS: dict[int, list[Axes]] = {1: [(1, 1, 1, 1)], 2: [(2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 1, 1, 1)]}


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_joint_products_change_nothing(run_ranks: Callable[..., list[Any]], ranks: int, precision: str) -> None:
    """Gradients are summed in the products, in memory that other weights' gradients share."""
    # Adam's first step is of the sign of the gradient, also where that is as good as 0.
    first, later = (1e-5, 2e-3) if precision == "fp32" else (0.02, 0.1)
    for results in run_ranks(both_ways, ranks, LAYOUTS[ranks], precision, timeout_s=200):
        for axes, (products, losses, errors) in zip(LAYOUTS[ranks], results, strict=True):
            # A stage, segment or shard has fewer: two micro-batches a step, of which data ranks have one each.
            assert products >= 4, axes
            assert losses < later, axes
            limits = {name: first if name.startswith("1 0 ") else later for name in errors}
            assert {name: error for name, error in errors.items() if not error < limits[name]} == {}, axes


def test_weights_that_lie_apart_are_not_joined() -> None:
    whole = torch.arange(24.0).view(6, 4)
    assert projections._lie_together([whole[:2], whole[2:3], whole[3:]])
    assert torch.equal(projections._as_one([whole[2:3], whole[3:]]), whole[2:])
    for apart in ([whole[:2], whole[3:]], [whole[2:], whole[:2]], [whole[:2], whole[2:].clone()], [whole[:, :2]]):
        assert not projections._lie_together(apart)
    other = torch.arange(12.0).view(3, 4).double()
    assert not projections._lie_together([whole, other])
