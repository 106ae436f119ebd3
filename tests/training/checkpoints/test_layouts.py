"""A checkpoint of any layout of ranks is resumed on any other, by the parity rule, and on its own bit by bit."""

import random
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightscale.training.checkpoints.directories import directory_name
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "drawing.py")))
tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tiny_engine.py")))

STEPS = 3
Axes = tuple[int, ...]  # processes, tensor, pipeline, sequence, and virtual stages if any
ONE: Axes = (1, 1, 1, 1)
TWO: list[Axes] = [(2, 1, 1, 2), (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 1), (2, 1, 2, 1, 2)]
FOUR: list[Axes] = [(4, 2, 1, 2), (4, 1, 2, 2), (4, 4, 1, 1)]
RunRanks = Callable[..., list[Any]]
Model = dict[str, Any]
TNL: Model = {"mixer": "tnl"}


def draw() -> list[float]:
    """From every generator of the process."""
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def record(rank: int, world_size: int, init_method: str, folder: str, layouts: list[Axes], model: Model = TNL) -> None:
    """Three steps, a checkpoint, and three more: what a resumed run must repeat."""
    for axes in layouts:
        random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
        with tiny.engine_on(axes, rank, f"{init_method}-{axes}", **model) as engine:
            tiny.train(engine, 0, STEPS)
            path = Path(folder) / str(axes)
            saver, state = Saver(path, engine.mesh), {"common": {"place": [3, "x"]}, "facts": {"tokens": 9}}
            saver.save(engine, step=STEPS, **state, contents=("full", "weights"))
            torch.save((tiny.own_state(engine), draw()), f"{path}-{rank}")
            weights = tiny.weights(engine)
            if rank == 0:
                torch.save(weights, f"{path}-weights")
            continuation = tiny.train(engine, STEPS, 2 * STEPS)
            if rank == 0:
                torch.save(continuation, f"{path}-continuation")


def resume(
    rank: int,
    world_size: int,
    init_method: str,
    folder: str,
    layouts: list[Axes],
    sources: list[Axes],
    model: Model = TNL,
) -> dict[tuple[Axes, Axes], dict[str, Any]]:
    """For each layout and checkpoint: how far the continuation is from the uninterrupted run's."""
    found = {}
    for axes in layouts:
        with tiny.mesh_on(axes, rank, f"{init_method}-{axes}") as mesh:
            for source in sources:
                random.seed(7), np.random.seed(7), torch.manual_seed(7)
                path = Path(folder) / str(source)
                engine = tiny.engine_in(mesh, seed=1, **model)
                checkpoints = Checkpoints(path, mesh)
                alone = checkpoints.restore(engine, weights_only=True)
                assert alone is not None and alone.path.name == directory_name(STEPS, "weights")
                weights, kept = tiny.weights(engine), torch.load(f"{path}-weights")
                restored = checkpoints.restore(engine)
                assert restored is not None and restored.path.name == directory_name(STEPS)
                exact = None
                if axes == source:
                    state, drawn = torch.load(f"{path}-{rank}")
                    exact = tiny.differing(state, tiny.own_state(engine)), drawn == draw()
                expected = torch.load(f"{path}-continuation")
                pairs = list(zip(tiny.train(engine, STEPS, 2 * STEPS), expected, strict=True))
                found[axes, source] = {
                    "step": restored.step,
                    "common": restored.common,
                    "exact": exact,
                    "weights": [name for name in kept if not torch.equal(kept[name], weights[name])],
                    "loss": [abs(a[0] - b[0]) for a, b in pairs],
                    "gradient": max(tiny.error(a[1][key], b[1][key]) for a, b in pairs for key in b[1]),
                    "weight": max(tiny.error(a[2][key], b[2][key]) for a, b in pairs for key in b[2]),
                }
    return found


def check_all_pairs(run_ranks: RunRanks, folder: str, by_size: dict[int, list[Axes]], model: Model = TNL) -> None:
    """Every layout's checkpoint continues on each of them, optimizer included, by the parity rule."""
    every = [axes for layouts in by_size.values() for axes in layouts]
    for world_size, layouts in by_size.items():
        run_ranks(record, world_size, folder, layouts, model, timeout_s=200)
    found = [
        result
        for world_size, layouts in by_size.items()
        for result in run_ranks(resume, world_size, folder, layouts, every, model, timeout_s=300)
    ]
    assert {pair for result in found for pair in result} == {(axes, source) for axes in every for source in every}
    for result in found:
        for (axes, source), one in result.items():
            where = f"{axes} from {source}: {one}"
            assert (one["step"], one["common"]) == (STEPS, {"place": [3, "x"], "step": STEPS}), where
            assert one["weights"] == [], where
            if axes == source:
                assert one["exact"] == ([], True), where
                assert (one["loss"], one["gradient"], one["weight"]) == ([0.0] * STEPS, 0.0, 0.0), where
            else:
                assert max(one["loss"]) <= 1e-6, where
                assert one["gradient"] <= 1e-5, where
                assert one["weight"] <= 1e-5, where


@pytest.mark.long  # in short: tests/training/optimizer/test_steps.py
@pytest.mark.timeout(600)
def test_any_layout_resumes_any_other(run_ranks: RunRanks, tmp_path: Path) -> None:
    check_all_pairs(run_ranks, str(tmp_path), {1: [ONE], 2: TWO[:2]})


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rows", "tied"), [(301, True), (119, False)])
def test_padding_of_the_vocabulary_is_no_part_of_the_model(
    run_ranks: RunRanks, tmp_path: Path, rows: int, tied: bool
) -> None:
    """Each of two tensor ranks holds 256 rows where the model has 301, or 128 where it has 119, all on the first."""
    model = {"vocab_size": rows, "num_ids": rows - 5, "tie_word_embeddings": tied}
    check_all_pairs(run_ranks, str(tmp_path), {1: [ONE], 2: TWO[1:2], 4: [(4, 2, 2, 1)]}, model)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_any_layout_of_two_ranks_resumes_any_other(run_ranks: RunRanks, tmp_path: Path) -> None:
    check_all_pairs(run_ranks, str(tmp_path), {1: [ONE], 2: TWO})


@pytest.mark.long
@pytest.mark.timeout(900)
def test_any_layout_of_four_ranks_resumes_any_other(run_ranks: RunRanks, tmp_path: Path) -> None:
    check_all_pairs(run_ranks, str(tmp_path), {1: [ONE], 4: FOUR})


@pytest.mark.long
@pytest.mark.timeout(900)
def test_one_two_three_four_and_eight_ranks_resume_one_another(run_ranks: RunRanks, tmp_path: Path) -> None:
    layouts = {1: [ONE], 2: [TWO[1]], 3: [(3, 1, 1, 3)], 4: [(4, 1, 2, 2)], 8: [(8, 2, 2, 2)]}
    check_all_pairs(run_ranks, str(tmp_path), layouts)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mixer", "four"),
    drawing.some(
        "layouts", [("hgrn2", FOUR[0]), ("lightnet", FOUR[1]), ("cosformer2", FOUR[2]), ("llama", FOUR[1])], 2
    ),
)
def test_any_layout_resumes_any_other_of_the_other_architectures(
    run_ranks: RunRanks, tmp_path: Path, mixer: str, four: Axes
) -> None:
    """Each with some of the layouts of TNL above; `soak` has all pairs."""
    check_all_pairs(run_ranks, str(tmp_path), {1: [ONE], 2: TWO[-1:], 4: [four]}, {"mixer": mixer})


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mixer", ["hgrn2", "lightnet", "cosformer2", "llama"])
def test_any_layout_resumes_any_other_for_every_architecture(run_ranks: RunRanks, tmp_path: Path, mixer: str) -> None:
    check_all_pairs(run_ranks, str(tmp_path), {1: [ONE], 2: TWO[-1:], 4: FOUR}, {"mixer": mixer})
