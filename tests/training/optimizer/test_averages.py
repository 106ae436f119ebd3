"""Averages of the weights on all layouts, beside their definition in fp64; `lightscale average` of such a run."""

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lightscale
from lightscale.cli import main
from lightscale.config.files import load
from lightscale.exchange.files.stored_tensors import StoredTensors
from lightscale.exchange.files.weights import TensorRows
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import NUMBERING, directory_name
from lightscale.training.checkpoints.reader import read_headers, verify
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver

HELPERS = Path(__file__).parents[2] / "helpers"
tiny = SimpleNamespace(**runpy.run_path(str(HELPERS / "tiny_engine.py")))
commands = runpy.run_path(str(HELPERS / "rank_commands.py"))["commands"]

RunRanks = Callable[..., list[Any]]
MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 24}
DECAYS = {"fast": 0.5, "slow": 0.9}
# Processes, tensor, pipeline, sequence; then the optimizer.
CASES = [
    ((1, 1, 1, 1), "adamw", "fp32"),
    ((2, 2, 1, 1), "lion", "fp32"),
    ((2, 1, 2, 1), "soap", "bf16"),
    ((2, 1, 1, 2), "muon", "fp32"),
    ((2, 1, 1, 1), "adamw", "fp32"),
]


def owned(engine: Any) -> dict[str, Any]:
    found = {name: engine.optimizer.owned(parameter) for name, parameter in tiny.named(engine)}
    return {name: one for name, one in found.items() if one is not None}


def on_ranks(rank: int, world_size: int, init_method: str, axes: Any, optimizer: str, precision: str) -> list[str]:
    """Averages that are not those of the weights, of three steps, of which one is skipped, and after a reset."""
    faults = []
    chosen = {"name": optimizer, "ema": DECAYS}
    with tiny.engine_on(axes, rank, init_method, optimizer=chosen, precision=precision, **MODEL) as engine:
        for begin in range(2):
            expected = {
                (name, key): one.weights.double().clone() for key, one in owned(engine).items() for name in DECAYS
            }
            for step in range(3):
                engine.forward_backward(tiny.step_batches(step, engine.mesh))
                engine.gradient_norm()
                if step == 1:
                    continue
                engine.step(tiny.LR)
                for key, one in owned(engine).items():
                    for name, decay in DECAYS.items():
                        wanted = decay * expected[name, key] + (1 - decay) * one.weights.double()
                        expected[name, key] = wanted
                        off = (one.state[f"ema_{name}"].double() - wanted).abs().max() if len(wanted) else 0.0
                        if off > 1e-6:
                            faults.append(f"start {begin}, step {step}: {name} of {key} is {float(off)} apart")
            assert len(expected) == len(DECAYS) * len(owned(engine)) > 0
            engine.reset_optimizer()
    return faults


@pytest.mark.parametrize(("axes", "optimizer", "precision"), CASES)
def test_averages_are_those_of_the_main_weights(axes: Any, optimizer: str, precision: str, run_ranks: RunRanks) -> None:
    assert run_ranks(on_ranks, axes[0], axes, optimizer, precision) == [[]] * axes[0]


def begun_late(rank: int, world_size: int, init_method: str, folder: str) -> list[str]:
    """Averages that do not begin at the weights of a checkpoint without them, and those of it that change."""
    with tiny.mesh_on((world_size, world_size, 1, 1), rank, init_method) as mesh:
        if world_size == 1:
            engine = tiny.engine_in(mesh, optimizer={"ema": {"fast": 0.5}}, **MODEL)
            tiny.train(engine, 0, 2)
            Saver(Path(folder), mesh).save(engine, step=2, common={}, facts={})
        engine = tiny.engine_in(mesh, optimizer={"ema": DECAYS}, seed=7, **MODEL)
        assert Checkpoints(Path(folder), mesh).restore(engine) is not None
        before = {key: (one.weights.clone(), one.state["ema_fast"].clone()) for key, one in owned(engine).items()}
        faults = [f"{key}: read" for key, one in owned(engine).items() if not one.state["ema_slow"].equal(one.weights)]
        faults += [
            f"{key}: no average" for key, (weights, fast) in before.items() if "weight" in key and weights.equal(fast)
        ]
        tiny.train(engine, 2, 3)
        for key, one in owned(engine).items():
            for name, start in zip(("slow", "fast"), before[key], strict=True):
                wanted = DECAYS[name] * start.double() + (1 - DECAYS[name]) * one.weights.double()
                if float((one.state[f"ema_{name}"].double() - wanted).abs().max()) > 1e-6:
                    faults.append(f"{key}: {name}")
        return faults


def test_an_average_that_a_checkpoint_lacks_begins_at_its_weights(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(begun_late, 1, str(tmp_path)) == [[]]
    assert run_ranks(begun_late, 2, str(tmp_path)) == [[], []]


WORDS = [
    "run.toml",
    *("train.steps=4", "train.validate_every=0", "train.profile_steps=none", "checkpoint.every=2"),
    *("optimizer.warmup_steps=0", "optimizer.schedule=constant", "optimizer.ema={slow=0.9, fast=0.5}"),
]


def weights(checkpoint: Path, step: int, prefix: str = "model.") -> dict[str, Tensor]:
    stored = StoredTensors(checkpoint, read_headers(checkpoint, verify(checkpoint, step)), prefix=prefix)
    return {key: stored.read(TensorRows(key=key)) for key in stored.shapes()}


@pytest.fixture(scope="module")
def run(workplace: Path, run_ranks: RunRanks) -> RunDirectory:
    # The first ends within the run, and is resumed.
    two = ["train", *WORDS, "parallel.tensor=2", "parallel.sequence=1", "--run", "averaged"]
    results = run_ranks(commands, 2, str(workplace), [two])
    assert [code for code, _ in results[0]] == [0], results
    return RunDirectory(workplace / "averaged")


def test_an_average_of_training_becomes_a_run(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = run.checkpoints / directory_name(4)
    assert main(["average", str(run.path), "--ema", "slow", "--to", str(tmp_path / "slow")]) == 0
    assert "evaluate, generate and export take" in capsys.readouterr().err
    made = weights(tmp_path / "slow" / "checkpoints" / directory_name(4, "weights"), 4)
    # Else a run with fp32 and bf16 parameters could not begin from it in bf16.
    for path in (kept, tmp_path / "slow/checkpoints" / directory_name(4, "weights")):
        assert verify(path, 4).facts["numbering"] == NUMBERING
    expected = weights(kept, 4, "ema_slow.")
    assert made.keys() == expected.keys()
    assert all(made[key].equal(expected[key]) for key in made)
    last = weights(kept, 4)
    assert not any(made[key].equal(last[key]) for key in made if made[key].dim() == 2)
    # It is a run as any other.
    assert load(tmp_path / "slow" / "config.toml") == load(run.config)
    model = lightscale.load(tmp_path / "slow")
    assert math.isfinite(float(model.logits("the other").sum()))
    assert not model.logits("the other").equal(lightscale.load(run.path).logits("the other"))
    assert main(["export", str(tmp_path / "slow"), "--to", str(tmp_path / "exported")]) == 0
    assert main(["verify", str(tmp_path / "slow")]) == 0


def test_the_mean_of_checkpoints(run: RunDirectory, tmp_path: Path) -> None:
    to = tmp_path / "mean"
    assert main(["average", f"{run.path}@2", str(run.path), "--to", str(to)]) == 0
    made = weights(to / "checkpoints" / directory_name(4, "weights"), 4)
    parts = [weights(run.checkpoints / directory_name(step), step) for step in (2, 4)]
    for key, found in made.items():
        assert torch.equal(found, ((parts[0][key].double() + parts[1][key].double()) / 2).float()), key
    status = RunDirectory(to).read_status()
    assert status is not None
    assert (status.status, status.step, status.reason) == ("finished", 4, "mean of averaged@2 and averaged@4")


def test_what_cannot_be_averaged_is_named(
    run: RunDirectory, saved_other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        ([str(run.path), "--ema", "medium"], "keeps no such average; optimizer.ema has: slow, fast"),
        ([str(run.path), f"{saved_other}"], "is of another model than"),
        ([f"{run.path}@3"], "no checkpoint of step 3"),
    ):
        assert main(["average", *words, "--to", str(tmp_path / "to")]) == 78
        assert message in capsys.readouterr().err
        assert not (tmp_path / "to").exists()
    (tmp_path / "to").mkdir()
    assert main(["average", str(run.path), "--to", str(tmp_path / "to")]) == 78
    assert "it exists; use a new run" in capsys.readouterr().err


@pytest.fixture(scope="module")
def saved_other(workplace: Path, run_ranks: RunRanks) -> Path:
    words = ["train", *WORDS, "parallel.sequence=1", "train.steps=2", "model.num_layers=1", "--run", "another"]
    ((result,),) = run_ranks(commands, 1, str(workplace), [words])
    assert result[0] == 0, result
    return workplace / "another"
