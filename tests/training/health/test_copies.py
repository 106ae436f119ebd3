"""Weights that begin otherwise on one rank than on another are refused at the start, whichever axis copies them."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightscale.errors import UserError
from lightscale.training.health.copies import DifferingCopies, check_copies, differing_copies
from lightscale.training.health.replicas import ReplicaCheck, SilentCorruption

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tiny_engine.py")))

Axes = tuple[int, ...]  # processes, tensor, pipeline, sequence; data is the rest
NORM, PROJECTION = "decoder.layers.1.input_layernorm.weight", "decoder.layers.1.self_attention.out_proj.weight"
EMBEDDING = "embedding.word_embeddings.weight"


def drawn_apart(rank: int, world_size: int, init_method: str, cases: list[tuple[Axes, str, list[int]]]) -> list[Any]:
    """What is refused where one bit of ``name`` differs on the given ranks: at the start, and in the first step."""
    found = []
    for number, (axes, name, ranks) in enumerate(cases):
        with tiny.engine_on(axes, rank, f"{init_method}-{number}", norm="rmsnorm") as engine:
            assert differing_copies(engine) == []
            check_copies(engine)
            if rank in ranks:
                weight = dict(tiny.named(engine))[name]
                weight.data.view(torch.int32).view(-1)[5] ^= 1
            said = []
            try:
                check_copies(engine)
            except UserError as error:
                said.append(str(error))
            check = ReplicaCheck(engine, every=1)
            if rank in ranks:
                weight.data.view(torch.int32).view(-1)[5] ^= 1
            check.begin(0)
            if rank in ranks:
                weight.data.view(torch.int32).view(-1)[5] ^= 1
            engine.forward_backward(tiny.step_batches(1, engine.mesh))
            check.observe()
            try:
                check.compare(1)
            except SilentCorruption as error:
                said.append(str(error))
            found.append(said)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (2, [((2, 1, 1, 1), PROJECTION, [1]), ((2, 1, 1, 2), PROJECTION, [0]), ((2, 2, 1, 1), NORM, [1])]),
        (4, [((4, 2, 1, 2), NORM, [2]), ((4, 2, 1, 1), EMBEDDING, [3]), ((4, 1, 2, 1), PROJECTION, [1])]),
    ],
    ids=["two ranks", "four ranks"],
)
def test_a_copy_that_differs_is_named(
    run_ranks: Callable[..., list[Any]], processes: int, cases: list[tuple[Axes, str, list[int]]]
) -> None:
    every = run_ranks(drawn_apart, processes, cases, timeout_s=200)
    assert all(found == every[0] for found in every), "all ranks leave together"
    for (axes, name, ranks), (at_start, in_training) in zip(cases, every[0], strict=True):
        shared = name if axes[1] == 1 or name == NORM else f"{name} of tensor rank {ranks[0] % axes[1]}"
        assert at_start.startswith(f"the copies of {shared} differ: rank "), axes
        assert re.search(rf"rank {ranks[0]} \(.+\) hold different numbers\. .*lightscale doctor", at_start), axes
        assert f"rank {ranks[0]} (" in in_training, axes
        assert re.search(rf"different now: {re.escape(shared)} on (rank \d \(.+\))+", in_training), axes


def test_the_odd_ranks_are_those_that_differ_from_the_most() -> None:
    assert DifferingCopies(name="a", ranks=((0, 2, 3), (1,))).odd == (1,)
    assert DifferingCopies(name="a", ranks=((0, 2), (1,), (3,))).odd == (1, 3)
    assert DifferingCopies(name="a", ranks=((0, 2), (1, 3))).odd == (0, 1, 2, 3)
