"""Saves that fail or are slow while a run continues: full disks, errors of the device, a disk that cannot keep up."""

import contextlib
import os
import runpy
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightscale.config.files import load
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics
from lightscale.training.checkpoints.directories import list_steps
from lightscale.training.checkpoints.save_policy import SavePolicy
from lightscale.training.health.fault_injection import VARIABLE

commands = runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "rank_commands.py"))["commands"]

pytestmark = pytest.mark.timeout(300)

RunRanks = Callable[..., list[Any]]
StepsOf = Callable[[list[dict[str, Any]]], dict[int, tuple[Any, ...]]]

WORDS = ("run.toml", "parallel.sequence=2", "train.steps=40", "train.validate_every=0", "checkpoint.every=8")


@contextmanager
def collected_at_the_next_step(before: Callable[[int], None]) -> Iterator[None]:
    """Every save ends within the step after it; ``before(step)`` is called at the end of each step."""
    collect = SavePolicy.collect

    def wait_and_collect(self: SavePolicy, step: int, *args: Any) -> None:
        while self.saver.is_writing and not self.saver.is_written:
            time.sleep(0.001)
        collect(self, step, *args)
        before(step)

    with mock.patch.object(SavePolicy, "collect", wait_and_collect):
        yield


def with_faults(
    rank: int, world_size: int, init_method: str, folder: str, faults: dict[int, str]
) -> list[tuple[int, str]]:
    """The run ``faults``, saved at every fourth step; each of ``faults`` is armed at the end of its step."""

    def arm(step: int) -> None:
        if step in faults:
            os.environ[VARIABLE] = faults[step]

    with collected_at_the_next_step(arm):
        words = [["train", *WORDS, "checkpoint.every=4", "--run", "faults"]]
        found: list[tuple[int, str]] = commands(rank, world_size, init_method, folder, words)
    return found


def with_a_full_disk(
    rank: int, world_size: int, init_method: str, folder: str, disk: str, at_step: int
) -> list[tuple[int, str]]:
    """The run ``full``, whose disk fills up at the end of a step; again, with as much space as at first."""
    ballast = Path(disk) / "ballast"

    def fill(step: int) -> None:
        if step == at_step and rank == 0:
            ballast.write_bytes(bytes(shutil.disk_usage(disk).free))

    words = [["train", *WORDS, "--run", "full"]]
    with collected_at_the_next_step(fill):
        results = commands(rank, world_size, f"{init_method}-full", folder, words)
    ballast.unlink(missing_ok=True)
    return results + commands(rank, world_size, f"{init_method}-again", folder, words)


def events(run: RunDirectory, *names: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run.events) if event["event"] in names]


@pytest.fixture(scope="module")
def undisturbed(whole: tuple[RunDirectory, Any], steps_of: StepsOf) -> dict[int, tuple[Any, ...]]:
    """Step to tokens, loss, gradient norm and learning rate of a run of the same words whose disk is sound."""
    return trained(whole[0], steps_of)


def trained(run: RunDirectory, steps_of: StepsOf) -> dict[int, tuple[Any, ...]]:
    """Without validation, which these runs do not have."""
    return {step: values[:4] for step, values in steps_of(read_metrics(run.metrics)).items()}


@pytest.mark.long
def test_errors_of_the_disk_cost_a_checkpoint_and_nothing_else(
    workplace: Path, run_ranks: RunRanks, undisturbed: dict[int, tuple[Any, ...]], steps_of: StepsOf
) -> None:
    """Of one rank, at several places of a save: reported within a step, with number, text and path."""
    faults = {6: "raise=EIO@save:open rank=1", 14: "raise=ENOSPC@save:sync rank=0", 22: "raise=EIO@save:rename rank=0"}
    results = run_ranks(with_faults, 2, str(workplace), faults)
    assert [code for ((code, _),) in results] == [0, 0], results[0][0][1]
    run = RunDirectory(workplace / "faults")
    failed = events(run, "checkpoint_failed")
    assert [event["step"] for event in failed] == [9, 17, 25], "at the end of the next step"
    texts = [
        "[Errno 5] Input/output error",
        "[Errno 28] No space left on device",
        "[Errno 5] Input/output error",
    ]
    for event, text in zip(failed, texts, strict=True):
        assert event["reason"].startswith(f"cannot write faults/checkpoints/step-{event['step'] - 1:08d}: ")
        assert text in event["reason"]
        assert event["reason"].endswith("; free some space, or write to another disk") == ("No space" in text)
        assert event["in_a_row"] == 1, "the save in between has succeeded"
        assert f"{event['reason']}; training continues\n" in results[0][0][1]
    saved = [event["step"] for event in events(run, "checkpoint")]
    assert saved == [4, 12, 20, 28, 32, 36, 40], "the next save succeeds"
    assert sorted(path.name for path in run.checkpoints.iterdir())[-1] == "step-00000040"
    assert not list(run.checkpoints.glob("*.tmp"))
    assert trained(run, steps_of) == undisturbed


@pytest.mark.long
def test_a_full_disk_in_a_run(
    workplace: Path, run_ranks: RunRanks, undisturbed: dict[int, tuple[Any, ...]], steps_of: StepsOf, small_disk: Path
) -> None:
    """After as many failures in a row as it may have the run stops; with space it continues as if nothing had been."""
    run = RunDirectory(workplace / "full")
    os.chdir(workplace)
    assert run.create_or_open(load(Path(WORDS[0]), WORDS[1:]))
    run.checkpoints.symlink_to(small_disk)
    results = run_ranks(with_a_full_disk, 2, str(workplace), str(small_disk), 10)
    (code, text), (again, text_again) = results[0]
    assert code == 78, text
    failed = events(run, "checkpoint_failed")
    assert [(event["step"], event["in_a_row"]) for event in failed] == [(17, 1), (25, 2), (33, 3)]
    for event in failed:
        assert "not enough space for a checkpoint: it needs" in event["reason"], event
    assert text.splitlines()[-1].startswith(
        "error: cannot write full/checkpoints/step-00000032: not enough space for a checkpoint"
    )
    assert again == 0, text_again
    assert "resuming after step 8 from" in text_again
    assert list_steps(run.checkpoints)[-1] == 40
    assert trained(run, steps_of) == undisturbed


def with_a_full_disk_for_a_while(
    rank: int, world_size: int, init_method: str, folder: str, disk: str
) -> list[tuple[int, str]]:
    """The run of which everything is on a disk that is full from the end of step 10 to that of step 30."""
    ballast = Path(disk) / "ballast"

    def fill(step: int) -> None:
        if step == 10 and rank == 0:
            with contextlib.suppress(OSError), ballast.open("wb") as file:
                while True:
                    file.write(bytes(1 << 12))
                    file.flush()
        elif step == 30 and rank == 0:
            ballast.unlink()

    with collected_at_the_next_step(fill):
        words = [["train", *WORDS, "--run", f"{disk}/run"]]
        found: list[tuple[int, str]] = commands(rank, world_size, init_method, folder, words)
    return found


@pytest.mark.long
def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_nothing_else(
    workplace: Path, run_ranks: RunRanks, undisturbed: dict[int, tuple[Any, ...]], steps_of: StepsOf, small_disk: Path
) -> None:
    """Metrics and events are there afterwards too, in order."""
    results = run_ranks(with_a_full_disk_for_a_while, 2, str(workplace), str(small_disk))
    ((code, text),) = results[0]
    assert code == 0, text
    run = RunDirectory(small_disk / "run")
    problem = f"[Errno 28] No space left on device: '{run.metrics}'"
    assert f"{problem}; training continues, records are kept in memory" in text
    assert trained(run, steps_of) == undisturbed
    assert [line["step"] for line in read_lines(run.metrics) if "loss" in line] == list(range(1, 41))
    saves = [(event["event"], event["step"]) for event in events(run, "checkpoint", "checkpoint_failed")]
    assert saves == [
        ("checkpoint", 8),
        ("checkpoint_failed", 17),
        ("checkpoint_failed", 25),
        ("checkpoint", 32),
        ("checkpoint", 40),
    ]
    shown = EventAccumulator(str(run.tensorboard)).Reload().Scalars("train/loss")
    assert {point.step for point in shown} >= {*range(1, 11), *range(32, 41)}, "TensorBoard has what came after it"


@pytest.mark.long
def test_a_disk_that_cannot_keep_up(workplace: Path, run_ranks: RunRanks, steps_of: StepsOf) -> None:
    """Every write takes longer by far: saves are skipped and counted, and steps do not wait for them."""
    run = RunDirectory(workplace / "slow")
    words = ["train", *WORDS[:2], "train.steps=40", "train.validate_every=0", "checkpoint.every=1", "--run", "slow"]
    results = run_ranks(commands, 2, str(workplace), [words], env={VARIABLE: "slow=0.04@save:write rank=1"})
    assert [code for ((code, _),) in results] == [0, 0], results[0][0][1]
    saved, skipped = events(run, "checkpoint"), events(run, "checkpoint_skipped")
    assert len(saved) + len(skipped) == 40
    assert len(skipped) >= 10
    assert {event["reason"] for event in skipped} == {"the previous save is still being written"}
    assert list_steps(run.checkpoints)[-1] == 40
    # The last one is waited for, and the one before it, so that it can begin.
    for event in saved[:-2]:
        assert event["write_s"] > max(10 * 0.04, 10 * event["stall_s"]), event
    shown = EventAccumulator(str(run.tensorboard)).Reload().Scalars("checkpoint/skipped")
    assert [point.value for point in shown] == list(range(1, len(skipped) + 1))
