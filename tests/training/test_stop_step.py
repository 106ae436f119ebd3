"""A run that ends at train.stop_step and goes on later: bit for bit the run that never stopped."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics
from lightscale.training.checkpoints.directories import directory_name

commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]

pytestmark = pytest.mark.timeout(400)

RunRanks = Callable[..., list[Any]]
# A schedule that depends on the length of the run at each step; the batch grows behind step 3, between two stops.
RAMP = "train.rampup_batch_size=[{global_batch_size=2,until_tokens=384}]"
RUN = ["run.toml", "optimizer.warmup_steps=2", "train.steps=7", "checkpoint.every=50", RAMP]
KEPT = ("tokens", "loss", "grad_norm", "lr")


def trajectory(run: RunDirectory) -> dict[int, tuple[Any, ...]]:
    return {one["step"]: tuple(one.get(key) for key in KEPT) for one in read_metrics(run.metrics)}


def files_of(run: RunDirectory, step: int) -> Any:
    """The sizes and hashes of a checkpoint's files."""
    return json.loads((run.checkpoints / directory_name(step) / "MANIFEST.json").read_text())["files"]


def test_a_stopped_run_goes_on_as_if_it_had_not(workplace: Path, run_ranks: RunRanks) -> None:
    stops = ["2", "5", "none"]
    lines = [
        ["train", *RUN, "--run", "runs/never-stopped"],
        *(["train", *RUN, f"train.stop_step={stop}", "--run", "runs/stopped-twice"] for stop in stops[:2]),
        # Nothing is left to do until there.
        ["train", *RUN, "train.stop_step=5", "--run", "runs/stopped-twice"],
        ["train", *RUN, f"train.stop_step={stops[2]}", "--run", "runs/stopped-twice"],
    ]
    results = run_ranks(commands, 1, str(workplace), lines)[0]
    assert [code for code, _ in results] == [0] * 5, results
    whole, stopped = (RunDirectory(workplace / "runs" / name) for name in ("never-stopped", "stopped-twice"))
    assert trajectory(stopped) == trajectory(whole)
    assert files_of(stopped, 7) == files_of(whole, 7)
    events = read_lines(stopped.events)
    ends = [(one["step"], one["reason"]) for one in events if one["event"] == "finished"]
    assert ends == [
        (2, "2 of 7 steps are done (train.stop_step)"),
        (5, "5 of 7 steps are done (train.stop_step)"),
        (7, "all 7 steps are done"),
    ]
    # validate_every is 20: the last step of each, and no other.
    validated = [one["step"] for one in read_lines(stopped.metrics) if "validation" in one]
    assert validated == [2, 5, 7]
    assert stopped.is_finished(load(stopped.config))


def test_a_branch_begins_where_its_parent_stopped(workplace: Path, run_ranks: RunRanks) -> None:
    stable = [*RUN, "optimizer.schedule=constant", "train.stop_step=3", "--run", "runs/stable"]
    lines = [["train", *stable], ["train", "runs/stable", "--anneal", "2"]]
    results = run_ranks(commands, 1, str(workplace), lines)[0]
    assert [code for code, _ in results] == [0, 0], results
    branch = RunDirectory(workplace / "runs/stable-anneal-3-2")
    assert sorted(trajectory(branch)) == [4, 5]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.stop_step=41"], "train.stop_step = 41 is none of the run's own steps, 1 to 40"),
        (["train.stop_step=4", "train.branch_from=runs/a@4"], "is none of the run's own steps, 5 to 40"),
        (["train.stop_step=0"], "train.stop_step = 0: must be"),
    ],
)
def test_steps_that_are_none_are_refused(workplace: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        load(workplace / "run.toml", overrides)
    assert message in str(error.value)
