"""A tied embedding with an initial deviation of its own: one model on every layout, and its copies are checked."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.training.health.copies import check_copies
from lightscale.training.health.replicas import ReplicaCheck, SilentCorruption

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "tiny_engine.py")))

Axes = tuple[int, ...]  # processes, tensor, pipeline, sequence, and virtual stages if any; data is the rest
RunRanks = Callable[..., list[Any]]
STEPS = 2
NAME = "embedding.word_embeddings.weight"
MODEL = {"embedding_std": 0.5, "tie_word_embeddings": True}
TWO: list[Axes] = [(2, 1, 2, 1), (2, 1, 2, 1, 2)]
FOUR: list[Axes] = [(4, 1, 4, 1), (4, 2, 2, 1)]


def tied(engine: Any) -> list[tuple[Any, Tensor]]:
    """This rank's copies, unsplit; collective over tensor ranks."""
    found = [parameter for name, parameter in tiny.named(engine) if name == NAME]
    return [(parameter, tiny.whole(parameter, parameter.detach(), engine.mesh)) for parameter in found]


def follow(rank: int, world_size: int, init_method: str, layouts: list[Axes]) -> dict[Axes, dict[str, Any]]:
    """Losses and gradients of each layout, and what this rank holds of the embedding before and after."""
    found = {}
    for axes in layouts:
        with tiny.engine_on(axes, rank, f"{init_method}-{axes}", **MODEL) as engine:
            check_copies(engine)
            drawn = [weight for _, weight in tied(engine)]
            steps = []
            for step in range(STEPS):
                loss = engine.forward_backward(tiny.step_batches(step, engine.mesh)).mean
                parameters = {id(parameter): name for name, parameter in tiny.named(engine)}
                gradients = {
                    parameters[id(p)]: tiny.whole(p, gradient, engine.mesh) for _, p, gradient in engine.gradients()
                }
                steps.append((loss, gradients))
                engine.step(tiny.LR)
            engine.gather_weights()
            check_copies(engine)
            found[axes] = {"drawn": drawn, "steps": steps, "trained": [weight for _, weight in tied(engine)]}
    return found


@pytest.fixture(scope="module")
def on_one(run_ranks: RunRanks) -> dict[str, Any]:
    one = (1, 1, 1, 1)
    found: dict[str, Any] = run_ranks(follow, 1, [one])[0][one]
    return found


@pytest.mark.parametrize("layouts", [TWO, FOUR], ids=["two ranks", "four ranks"])
def test_stages_train_the_model_of_one_process(
    run_ranks: RunRanks, on_one: dict[str, Any], layouts: list[Axes]
) -> None:
    assert float(on_one["drawn"][0].std()) == pytest.approx(0.5, rel=0.05)
    ranks = run_ranks(follow, layouts[0][0], layouts)
    for axes in layouts:
        of_layout = [found[axes] for found in ranks]
        for when in ("drawn", "trained"):
            copies = [copy for found in of_layout for copy in found[when]]
            assert len(copies) == 2 * axes[1], "the first stage's and the last one's"
            assert all(torch.equal(copy, copies[0]) for copy in copies), f"{axes}, {when}"
        assert torch.equal(of_layout[0]["drawn"][0], on_one["drawn"][0]), axes
        compared = set()
        for rank, found in enumerate(of_layout):
            for step, (loss, gradients) in enumerate(found["steps"]):
                expected_loss, expected = on_one["steps"][step]
                # Where weights are the same bits, by the parity rule; AdamW's steps widen what rounding leaves.
                assert loss == pytest.approx(expected_loss, rel=1e-6 if step == 0 else 1e-5), f"{axes}, step {step}"
                for name, gradient in gradients.items():
                    limit = 1e-5 if step == 0 else 1e-4
                    assert tiny.error(gradient, expected[name]) < limit, f"{axes}, rank {rank}, step {step}: {name}"
                    compared.add(name)
        assert compared == set(on_one["steps"][0][1])


def part(rank: int, world_size: int, init_method: str, axes: Axes) -> list[str]:
    """What is said of a copy of the last stage in which one bit differs: at the start, and in training."""
    said = []
    with tiny.engine_on(axes, rank, init_method, **MODEL) as engine:
        if engine.mesh.groups.pp.rank() == axes[2] - 1:
            ((parameter, _),) = tied(engine)
            parameter.data.view(torch.int32)[0, 3] ^= 1
        try:
            check_copies(engine)
        except UserError as error:
            said.append(str(error))
        check = ReplicaCheck(engine, every=1)
        check.begin(0)
        engine.forward_backward(tiny.step_batches(1, engine.mesh))
        check.observe()
        try:
            check.compare(1)
        except SilentCorruption as error:
            said.append(str(error))
    return said


def test_copies_that_differ_are_refused(run_ranks: RunRanks) -> None:
    one, other = run_ranks(part, 2, (2, 1, 2, 1))
    assert one == other, "all ranks leave together"
    at_start, in_training = one
    assert re.match(rf"the copies of {re.escape(NAME)} differ: rank 0 \(.+\) and rank 1 \(.+\) hold", at_start)
    assert "model.embedding_std" in at_start
    assert f"{NAME} differs, and no majority of ranks agrees" in in_training
