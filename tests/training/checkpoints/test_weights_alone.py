"""Checkpoints of the weights alone: kept for ever, never resumed from, bit by bit those of the full one of the step."""

import json
import os
import runpy
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from lightscale.cli import main
from lightscale.errors import UserError
from lightscale.runs.run_directory import RunDirectory, read_lines
from lightscale.training.checkpoints.directories import (
    CheckpointName,
    Retention,
    directory_name,
    list_checkpoints,
    list_steps,
)
from lightscale.training.checkpoints.reader import shares_by_size
from lightscale.training.checkpoints.restore import Checkpoints, NoGoodCheckpoint
from lightscale.training.checkpoints.saving import Saver
from lightscale.training.health.fault_injection import SAVE_POINTS, VARIABLE

HELPERS = Path(__file__).parents[2] / "helpers"
tiny = SimpleNamespace(**runpy.run_path(str(HELPERS / "tiny_engine.py")))
commands = runpy.run_path(str(HELPERS / "rank_commands.py"))["commands"]

pytestmark = pytest.mark.timeout(300)

RunRanks = Callable[..., list[Any]]

ONE = (1, 1, 1, 1)
TWO = (2, 1, 1, 2)
KEEP = ("checkpoint.keep_weights_every=8", "checkpoint.keep_every=none", "checkpoint.every=16")
WORDS = ("run.toml", "parallel.sequence=2", "train.validate_every=0", *KEEP)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def boxes(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every box of a checkpoint by its name, read by another program."""
    files = sorted(checkpoint.glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in safetensors.torch.load_file(path).items()}


# ----- one save ------------------------------------------------------------------------------------------------------


def save_both(rank: int, world_size: int, init_method: str, folder: str) -> None:
    with tiny.engine_on(TWO, rank, init_method) as engine:
        directory = Path(folder) / "run"
        saver, checkpoints = Saver(directory, engine.mesh), Checkpoints(directory, engine.mesh)
        common: dict[str, Any] = {"common": {"a": 1}, "facts": {"tokens": 1}}
        saver.save(engine, step=1, **common)
        tiny.train(engine, 0, 1)
        saved = saver.save(engine, step=2, **common, contents=("full", "weights"))
        assert [path.name for path in saved.paths.values()] == [directory_name(2), directory_name(2, "weights")]
        in_both = [path for one in saved.paths.values() for path in one.iterdir() if path.name != "MANIFEST.json"]
        assert saved.num_bytes == sum(path.stat().st_size for path in in_both)
        tiny.train(engine, 1, 2)
        alone = saver.save(engine, step=3, **common, contents=("weights",), retention=Retention(keep=2))
        assert (alone.path.name, alone.removed) == (directory_name(3, "weights"), ())

        # A run continues from full ones; whoever evaluates has the newest weights.
        restored = checkpoints.restore(engine)
        assert restored is not None and restored.step == 2
        with pytest.raises(UserError, match="step-00000003-weights has only weights; resuming also needs"):
            checkpoints.restore(engine, step=3)
        restored = checkpoints.restore(engine, weights_only=True)
        assert restored is not None and restored.path.name == directory_name(3, "weights")

        # A step that the run comes to again: the same weights stay, others take the name.
        engine.mesh.control.barrier().wait()
        before = alone.path.stat().st_ino
        saver.save(engine, step=3, **common, contents=("weights",))
        assert alone.path.stat().st_ino == before
        tiny.train(engine, 2, 3)
        state = boxes_of(engine)
        saver.save(engine, step=3, **common, contents=("weights",))
        assert alone.path.stat().st_ino != before
        engine.mesh.control.barrier().wait()
        assert alone.path.with_suffix(".bad").is_dir()
        written = boxes(alone.path)
        assert all(torch.equal(written[name], data) for name, data in state.items())


def boxes_of(engine: Any) -> dict[str, torch.Tensor]:
    shards = [shard for shard in engine.owned_shards() if shard.box.key.startswith("model.")]
    return {f"{one.box.key}@{','.join(map(str, one.box.offset))}": one.data.clone() for one in shards}


def test_weights_beside_and_without_a_full_checkpoint(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(save_both, 2, str(tmp_path))
    directory = tmp_path / "run"
    assert list_checkpoints(directory) == [
        CheckpointName(1),
        CheckpointName(2),
        CheckpointName(2, "weights"),
        CheckpointName(3, "weights"),
    ]
    full, alone = boxes(directory / directory_name(2)), boxes(directory / directory_name(2, "weights"))
    assert alone.keys() == {name for name in full if name.startswith("model.")}
    for name, tensor in alone.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, full[name]), name
    stored = sum(tensor.nbytes for tensor in alone.values())
    assert sum(tensor.nbytes for tensor in full.values()) == 3 * stored, "weights and two moments"
    assert "rank-00000.json" not in names(directory / directory_name(2, "weights"))
    assert json.loads((directory / directory_name(2, "weights") / "state.json").read_text()) == {"a": 1, "step": 2}


def resume_from_renamed(rank: int, world_size: int, init_method: str, folder: str) -> str:
    with tiny.engine_on(ONE, rank, init_method) as engine:
        try:
            Checkpoints(Path(folder), engine.mesh).restore(engine)
        except NoGoodCheckpoint as refusal:
            return str(refusal)
    return "resumed"


def killed_at_every_point(rank: int, world_size: int, init_method: str, folder: str) -> dict[str, list[str]]:
    """What is there after a kill at each point of a save of weights, and after the save that follows."""
    found, directories = {}, {point: Path(folder) / point for point in SAVE_POINTS[:-1]}
    # Before this process has threads, as it has with an engine.
    for point, directory in directories.items():
        child = os.fork()
        if child == 0:
            with tiny.engine_on(ONE, 0, f"{init_method}-{point}") as engine:
                saver = Saver(directory, engine.mesh)
                saver.save(engine, step=1, common={}, facts={})
                os.environ[VARIABLE] = f"kill@{point}"
                saver.save(engine, step=2, common={}, facts={}, contents=("weights",))
            os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, point
        assert list_checkpoints(directory) == [CheckpointName(1)], point
    with tiny.engine_on(ONE, 0, init_method) as engine:
        for point, directory in directories.items():
            restored = Checkpoints(directory, engine.mesh).restore(engine, weights_only=True)
            assert restored is not None and (restored.step, restored.refused) == (1, ())
            Saver(directory, engine.mesh).save(engine, step=2, common={}, facts={}, contents=("weights",))
            found[point] = names(directory)
    return found


@pytest.mark.long
def test_a_kill_within_a_save_of_weights_leaves_nothing(run_ranks: RunRanks, tmp_path: Path) -> None:
    (found,) = run_ranks(killed_at_every_point, 1, str(tmp_path))
    assert found == {point: [directory_name(1), directory_name(2, "weights")] for point in SAVE_POINTS[:-1]}
    # Under the name of a full checkpoint they are no checkpoint either.
    directory = tmp_path / SAVE_POINTS[0]
    shutil.rmtree(directory / directory_name(1))
    (directory / directory_name(2, "weights")).rename(directory / directory_name(2))
    (message,) = run_ranks(resume_from_renamed, 1, str(directory))
    assert "holds only weights, without optimizer moments" in message


def test_files_are_dealt_by_size() -> None:
    """In the order of their names small files and large ones alternate."""
    sizes = {f"rank-{rank:05d}.{kind}": size for rank in range(8) for kind, size in (("json", 9), ("safetensors", 900))}
    for num_shares in (1, 2, 4, 8):
        shares = shares_by_size({**sizes, "state.json": 30}, num_shares)
        assert sorted(name for share in shares for name in share) == sorted([*sizes, "state.json"])
        loads = [sum({**sizes, "state.json": 30}[name] for name in share) for share in shares]
        assert max(loads) - min(loads) <= 30, num_shares
    assert shares_by_size({"a": 1}, 3) == [["a"], [], []]


# ----- a run ---------------------------------------------------------------------------------------------------------


def keep_weights(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    """A run that keeps weights, one that starts from them, and the first again without its full checkpoints."""
    start = ["optimizer.schedule=constant", "optimizer.warmup_steps=0", "train.steps=2", "train.init_from=kept@24"]
    words = [["train", *WORDS, "--run", "kept"], ["train", *WORDS, *start, "--run", "started"]]
    results: list[tuple[int, str]] = commands(rank, world_size, init_method, folder, words)
    if rank == 0:
        shutil.copytree("kept", "stripped")
        run = RunDirectory("stripped")
        run.status.unlink()
        for step in list_steps(run.checkpoints):
            shutil.rmtree(run.checkpoints / directory_name(step))
    again = ["train", *WORDS, "--run", "stripped"]
    return results + commands(rank, world_size, f"{init_method}-again", folder, [again])


@pytest.fixture(scope="module")
def kept(workplace: Path, run_ranks: RunRanks) -> tuple[RunDirectory, list[tuple[int, str]]]:
    results = run_ranks(keep_weights, 2, str(workplace))
    return RunDirectory(workplace / "kept"), results[0]


@pytest.mark.long
def test_a_run_keeps_the_weights_of_every_eighth_step(kept: tuple[RunDirectory, list[tuple[int, str]]]) -> None:
    run, results = kept
    assert [code for code, _ in results] == [0, 0, 74], results
    assert list_steps(run.checkpoints) == [32, 40], "two are kept"
    assert list_steps(run.checkpoints, "weights") == [8, 16, 24, 32, 40]
    events = [event for event in read_lines(run.events) if event["event"] in ("checkpoint", "weights")]
    assert [(event["event"], event["step"]) for event in events] == [
        ("weights", 8),
        ("checkpoint", 16),
        ("weights", 24),
        ("checkpoint", 32),
        ("checkpoint", 40),
    ]
    assert events[1]["weights"] == directory_name(16, "weights")
    assert run.newest_checkpoint() == 40
    manifest = json.loads((run.checkpoints / directory_name(8, "weights") / "MANIFEST.json").read_text())
    description = json.loads((run.path / "tokenizer" / "tokenizer.json").read_text())
    assert manifest["contents"] == "weights" and manifest["tokenizer"] == description["sha256"]
    assert f"starting from the weights of kept/checkpoints/{directory_name(24, 'weights')}" in results[1][1]
    last = results[2][1].splitlines()[-2:]
    assert "stripped/checkpoints has no checkpoint to resume from, only the weights of step 40" in "".join(last)


@pytest.mark.long
def test_the_command_understands_them(
    kept: tuple[RunDirectory, list[tuple[int, str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(kept[0].path, run := tmp_path / "run")

    def command(*words: str) -> tuple[int, str]:
        code = main(["checkpoint", *words])
        output = capsys.readouterr()
        return code, output.out + output.err

    rows = json.loads(command("list", str(run), "--json")[1])["checkpoints"]
    assert [(row["step"], row["contents"]) for row in rows[-4:]] == [
        (32, "full"),
        (32, "weights"),
        (40, "full"),
        (40, "weights"),
    ]
    assert 2.9 < rows[-2]["num_bytes"] / rows[-1]["num_bytes"] < 3.1
    assert command("diff", f"{run}@40", f"{run}@40-weights") == (0, "all weights are bitwise equal\n")
    code, text = command("diff", f"{run}@8", f"{run}@40", "--json")
    assert code == 1 and all(row["tensor"].startswith("model.") for row in json.loads(text)["tensors"])
    shown = json.loads(command("show", f"{run}@24", "--json")[1])
    assert shown["contents"] == "weights" and all(key.startswith("model.") for key in shown["tensors"])
    assert json.loads(command("show", str(run), "--json")[1])["contents"] == "full"
    damaged = run / "checkpoints" / directory_name(8, "weights") / "rank-00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    code, text = command("verify", str(run))
    assert code == 1 and f"step 8 (weights): {damaged}: expected" in text and "step 40: intact" in text
    assert command("verify", f"{run}@16-weights") == (0, "step 16 (weights): intact\n")
    assert command("prune", str(run))[0] == 0
    assert len(list_steps(run / "checkpoints", "weights")) == 5
    assert (
        "no checkpoint of step 7; it has: 8 (weights), 16 (weights), 24 (weights), 32, 40"
        in command("show", f"{run}@7")[1]
    )
