"""Branches of a run's stable phase: what they continue, what they record, and where they are refused."""

import argparse
import errno
import hashlib
import json
import math
import re
import runpy
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.data_pipeline.loading.samples import ROLLBACK_EVENT, SKIP_EVENT, run_loader, step_content
from lightscale.errors import UserError
from lightscale.launch.commands.anneal import resolve_anneal
from lightscale.parallel.engine import Engine
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics
from lightscale.training.branch import check_branch
from lightscale.training.checkpoints.directories import adopt, directory_name, list_steps
from lightscale.training.checkpoints.manifest import Manifest
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.health.guard import Guard
from lightscale.training.optimizer.registry import optimizer_spec
from lightscale.training.signals import StopSignal

commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]

pytestmark = pytest.mark.timeout(400)

RunRanks = Callable[..., list[Any]]
STEP_TOKENS = 256
# Steps 3 to 8 are the stable phase of the parent, which has checkpoints of steps 4, 8 and 12.
COMMON = ["train.validate_every=0", "metrics.parameter_norms_every=0", "optimizer.warmup_steps=2"]
WSD = [*COMMON, "optimizer.schedule=wsd", "optimizer.min_lr_ratio=0.0"]
PARENT = [
    "run.toml",
    *WSD,
    "optimizer.decay_steps=4",
    "train.steps=12",
    "checkpoint.every=4",
    "checkpoint.keep_every=4",
    # In the background a slow save takes the place of the next one.
    "checkpoint.asynchronous=false",
]


def tree(path: Path) -> dict[str, tuple[int, str]]:
    """Time and content of all files below `path`."""
    files = (file for file in path.rglob("*") if file.is_file())
    return {str(file): (file.stat().st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files}


def state_of(run: RunDirectory, step: int) -> Any:
    """The sizes and hashes of a checkpoint's files."""
    return json.loads((run.checkpoints / directory_name(step) / "MANIFEST.json").read_text())["files"]


def trajectory(run: RunDirectory) -> dict[int, tuple[Any, ...]]:
    return {one["step"]: (one["tokens"], one["loss"], one["grad_norm"], one["lr"]) for one in read_metrics(run.metrics)}


def interrupted(rank: int, world_size: int, init_method: str, folder: str, lines: list[list[str]]) -> list[Any]:
    """The first command is stopped after its first step, the others go to their ends."""
    with mock.patch.object(StopSignal, "should_stop", return_value=True):
        first = commands(rank, world_size, f"{init_method}-first", folder, lines[:1])
    return [*first, *commands(rank, world_size, init_method, folder, lines[1:])]


def with_a_bad_step(rank: int, world_size: int, init_method: str, folder: str, lines: list[list[str]]) -> list[Any]:
    """The first step that is judged is bad."""
    judged = []

    def reason(self: Guard, loss: float, grad_norm: float) -> str | None:
        judged.append(loss)
        return "made up" if len(judged) == 1 else None

    with mock.patch.object(Guard, "_reason", reason):
        result: list[Any] = commands(rank, world_size, init_method, folder, lines)
    return result


@pytest.fixture(scope="module")
def parent(workplace: Path, run_ranks: RunRanks) -> RunDirectory:
    """A run of 12 steps in runs/parent."""
    (((code, text),),) = run_ranks(commands, 1, str(workplace), [["train", *PARENT, "--run", "runs/parent"]])
    assert code == 0, text
    return RunDirectory(workplace / "runs/parent")


@pytest.fixture(scope="module")
def branch(parent: RunDirectory, workplace: Path, run_ranks: RunRanks) -> RunDirectory:
    """Its last two steps anew: all of the decay, from the checkpoint of step 8."""
    before = tree(parent.path)
    # Of the parent's checkpoints that of step 12 is behind the stable phase.
    lines = [
        ["train", "runs/parent", "--anneal", "0.2"],
        ["train", "runs/parent", "--anneal", "3", "--step", "4", "optimizer.decay=minus_sqrt"],
    ]
    results = run_ranks(commands, 1, str(workplace), lines)[0]
    assert [code for code, _ in results] == [0, 0], results
    assert "branching off runs/parent after step 8" in results[0][1]
    assert tree(parent.path) == before
    return RunDirectory(workplace / "runs/parent-anneal-8-2")


def test_branches_side_by_side(branch: RunDirectory, workplace: Path) -> None:
    rates = [lr for *_, lr in trajectory(branch).values()]
    assert rates == pytest.approx([0.5e-3, 0.0], rel=1e-12)
    rates = [lr for *_, lr in trajectory(RunDirectory(workplace / "runs/parent-anneal-4-3")).values()]
    assert rates == pytest.approx([1e-3 * (1 - math.sqrt(x / 3)) for x in (1, 2, 3)], rel=1e-12, abs=1e-18)


def test_a_branch_is_the_run_that_had_its_length_from_the_start(
    branch: RunDirectory, workplace: Path, run_ranks: RunRanks
) -> None:
    """Bit for bit: a branch, an interrupted branch, and a longer run that was shortened before its decay."""
    whole, again, shortened = (RunDirectory(workplace / "runs" / name) for name in ("whole-10", "again", "shortened"))
    twice = ["train", "runs/parent", "--anneal", "2", "--step", "8", "--run", str(again.path)]
    run = ["train", "run.toml", *WSD, "optimizer.decay_steps=2"]
    for lines in (
        [twice, twice],
        [[*run, f"train.steps={steps}", "--run", str(shortened.path)] for steps in (20, 10)],
    ):
        results = run_ranks(interrupted, 1, str(workplace), lines)[0]
        assert [code for code, _ in results] == [0, 0], results
        assert "resuming after step" in results[1][1]
    ((result,),) = run_ranks(commands, 1, str(workplace), [[*run, "train.steps=10", "--run", str(whole.path)]])
    assert result[0] == 0, result[1]
    expected = trajectory(whole)
    for one, steps in ((branch, (9, 10)), (again, (9, 10)), (shortened, range(1, 11))):
        assert trajectory(one) == {step: expected[step] for step in steps}
        assert state_of(one, 10) == state_of(whole, 10)
    # The parent's checkpoint stays the first one.
    assert list_steps(branch.checkpoints) == [8, 10]


def test_the_records_of_a_branch(branch: RunDirectory) -> None:
    assert load(branch.config).train.branch_from == "runs/parent@8"
    events = read_lines(branch.events)
    assert [event["event"] for event in events] == ["start", "branch", "resume", "checkpoint", "finished"]
    assert (events[1]["parent"], events[1]["step"], events[1]["skips"]) == ("runs/parent", 8, [])
    shown = EventAccumulator(str(branch.tensorboard), size_guidance={"tensors": 0})
    shown.Reload()
    assert shown.Tensors("parent/text_summary")[0].tensor_proto.string_val[0].decode().strip() == "runs/parent@8"


def test_the_tables_show_the_parent(
    branch: RunDirectory, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    assert main(["runs", "runs/parent-anneal-8-2"]) == 0
    assert "runs/parent-anneal-8-2: branch of runs/parent@8" in capsys.readouterr().out
    assert main(["runs", "runs/parent-anneal-8-2", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["parent"], one["step"], one["total_steps"], one["goodput"]["steps"]) == ("runs/parent@8", 10, 10, 2)
    assert main(["compare", "runs/parent", "runs/parent-anneal-8-2", "--out", "branches.html"]) == 0
    assert "parent-anneal-8-2 is a branch of runs/parent@8" in Path("branches.html").read_text()


def test_a_checkpoint_is_copied_where_it_cannot_be_linked(tmp_path: Path) -> None:
    source, directory = tmp_path / "a" / directory_name(8), tmp_path / "b"
    source.mkdir(parents=True)
    (source / "MANIFEST.json").write_text("{}")
    # Of an interrupted start.
    (directory / f"{directory_name(8)}.tmp").mkdir(parents=True)
    with mock.patch("os.link", side_effect=OSError(errno.EXDEV, "another file system")):
        adopt(source, directory)
    assert [path.name for path in directory.iterdir()] == [directory_name(8)]
    copy = directory / directory_name(8) / "MANIFEST.json"
    assert copy.read_text() == "{}" and copy.stat().st_nlink == 1


@pytest.mark.long
def test_a_branch_on_other_layouts(branch: RunDirectory, workplace: Path, run_ranks: RunRanks) -> None:
    """Two sequence ranks take the first step of the branch, two pipeline stages the second."""
    line = ["train", "runs/parent", "--anneal", "2", "--step", "8", "--run", "runs/split"]
    lines = [[*line, f"parallel.{axis}=2"] for axis in ("sequence", "pipeline")]
    for results in run_ranks(interrupted, 2, str(workplace), lines):
        assert [code for code, _ in results] == [0, 0], results
    split, alone = trajectory(RunDirectory(workplace / "runs/split")), trajectory(branch)
    assert list(split) == [9, 10]
    for step, (tokens, loss, grad_norm, lr) in split.items():
        assert (tokens, lr) == (alone[step][0], alone[step][3])
        assert loss == pytest.approx(alone[step][1], rel=1e-5)
        assert grad_norm == pytest.approx(alone[step][2], rel=1e-4)


@pytest.mark.long
def test_data_that_the_parent_skipped_and_a_rollback(
    parent: RunDirectory, workplace: Path, run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch of a run that skipped the data of a step, the third behind the branch; its own first step is bad."""
    jumped = RunDirectory(workplace / "runs/jumped")
    shutil.copytree(parent.path, jumped.path)
    skip = {"at_tokens": 10 * STEP_TOKENS, "skip_tokens": STEP_TOKENS}
    jumped.event(SKIP_EVENT, first_step=11, last_step=11, **skip)
    jumped.event(ROLLBACK_EVENT, step=10, put_aside=[], **skip)
    line = ["train", "runs/jumped", "--anneal", "3", "--step", "8", "guard.max_skips=1", "--allow-change=guard"]
    mixed = ["train", "runs/parent", "--anneal", "1", "--step", "8", "data.store=other", "--allow-change", "data"]
    mixed += ["data.validation.held.store=store", "--run", "runs/mixed"]
    (results,) = run_ranks(with_a_bad_step, 1, str(workplace), [line, mixed])
    assert [code for code, _ in results] == [0, 0], results
    (changed,) = [
        event for event in read_lines(workplace / "runs/mixed/events.jsonl") if event["event"] == "data_changed"
    ]
    assert changed["step"] == 8 and "store" in changed["changes"]

    branch = RunDirectory(workplace / "runs/jumped-anneal-8-3")
    kinds = " ".join(event["event"] for event in read_lines(branch.events))
    assert kinds == "start branch resume step_skipped data_skipped rollback resume checkpoint finished"
    state = json.loads((branch.checkpoints / directory_name(11) / "state.json").read_text())
    assert state["data"]["skips"] == [[8 * STEP_TOKENS, 3 * STEP_TOKENS], [10 * STEP_TOKENS, STEP_TOKENS]]
    # The bad step's data are those of step 9 of a run without jumps, and the parent has skipped those of its step 11:
    # neither comes back, although the parent's skip moves behind that of the branch.
    monkeypatch.chdir(workplace)
    (_, plain), (_, own) = run_loader(parent.path), run_loader(branch.path)
    for step, data in ((9, 12), (10, 13), (11, 15)):
        assert step_content(own, step).samples == step_content(plain, data).samples, step


def test_a_branch_with_another_batch_rolls_back_to_its_parents_tokens(
    parent: RunDirectory, workplace: Path, run_ranks: RunRanks
) -> None:
    """Steps before and behind the branch have other numbers of tokens: none of a checkpoint follows from its step."""
    batch = 2 * load(parent.config).train.global_batch_size
    words = ["--anneal", "3", "--step", "8", f"train.global_batch_size={batch}", "guard.max_skips=1"]
    allow = ["--allow-change=train.global_batch_size", "--allow-change=guard", "--run", "runs/larger"]
    (results,) = run_ranks(with_a_bad_step, 1, str(workplace), [["train", "runs/parent", *words, *allow]])
    assert [code for code, _ in results] == [0], results
    larger = RunDirectory(workplace / "runs/larger")
    (skip,) = [event for event in read_lines(larger.events) if event["event"] == SKIP_EVENT]
    assert (skip["at_tokens"], skip["skip_tokens"]) == (8 * STEP_TOKENS, 2 * STEP_TOKENS)
    kept = {one["step"]: one["tokens"] for one in read_metrics(larger.metrics)}
    assert kept == {step: 8 * STEP_TOKENS + (step - 8) * 2 * STEP_TOKENS for step in (9, 10, 11)}


def with_a_doubtful_beginning(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    """As of an old import in bf16: its weights are taken by name alone."""

    def check(self: Checkpoints, path: Path, manifest: Manifest, engine: Engine, allow: Collection[str]) -> None:
        if "optimizer.groups" not in allow:
            raise UserError("doubtful")

    line = ["train", "run.toml", *COMMON, "train.init_from=runs/parent@8", "train.steps=3", "--run", "runs/begun"]
    with mock.patch.object(Checkpoints, "_check_numbering", check):
        found: list[tuple[int, str]] = commands(
            rank, world_size, init_method, folder, [line, [*line, "--allow-change=optimizer.groups"]]
        )
    return found


def test_weights_to_begin_with_can_be_taken_by_name(parent: RunDirectory, workplace: Path, run_ranks: RunRanks) -> None:
    (((refused, said), (taken, _)),) = run_ranks(with_a_doubtful_beginning, 1, str(workplace))
    assert (refused, taken) == (78, 0), said
    assert 'train.init_from = "runs/parent@8": doubtful' in said


def test_constants_of_the_parents_length_stay(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdEMAMix's slow mean warms up over the length of the run, here 12 steps; a branch ends after 10 or 20."""
    monkeypatch.chdir(workplace)
    words = [*WSD, "optimizer.decay_steps=2", "optimizer.name=ademamix"]
    mixed = RunDirectory("runs/mixed-means")
    mixed.create(load("run.toml", [*words, "train.steps=12", "train.profile_steps=[11,12]"]))
    (mixed.checkpoints / directory_name(8)).mkdir(parents=True)
    for steps in ("2", "12"):
        args = argparse.Namespace(config=mixed.path, anneal=steps, step=8, overrides=[], run=None)
        resolve_anneal(args)
        branch = load(args.config, args.overrides)
        assert branch.train.profile_steps is None, "those of the parent may be behind the branch's end"
        check_branch(branch, RunDirectory("runs/never"))
        assert optimizer_spec(branch) == optimizer_spec(load(mixed.config))
    longer = load("run.toml", [*words, "train.steps=10", "train.branch_from=runs/mixed-means@8"])
    with pytest.raises(UserError, match=r"optimizer\.slow_warmup_steps: 12 there, 10 here"):
        check_branch(longer, RunDirectory("runs/never"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["runs/parent", "--anneal", "2", "--step", "12"],
            r"--step 12: not in the stable phase .*, steps 2 to 8; .*: 4, 8$",
        ),
        (["runs/parent", "--anneal", "2", "--step", "6"], r"has no checkpoint of step 6; it has: 4, 8, 12"),
        (["runs/parent", "--anneal", "1.5"], r"--anneal 1\.5: use a share of the whole run below 1"),
        (["runs/parent", "--anneal", "nan"], r"--anneal nan: use a share"),
        (["runs/parent", "--anneal", "2", "train.steps=9"], r"--anneal sets train\.steps; remove train\.steps=9"),
        (["runs/parent", "--step", "8"], r"--step 8: needs --anneal"),
        (
            ["runs/parent", "--anneal", "1", "train.seed=5"],
            r"train\.seed: 0 there, 5 here$",
        ),
        (["runs/decaying", "--anneal", "2"], r'runs/decaying: optimizer\.schedule = "cosine" has no stable phase'),
        (["runs/constant", "--anneal", "2"], r"no checkpoint in the stable phase of runs/constant, .*: none"),
        (
            ["runs/average", "--anneal", "2"],
            r'runs/average: optimizer\.name = "schedulefree" averages in the place of a decay: its checkpoints are',
        ),
        (["runs/never", "--anneal", "2"], r"no run runs/never"),
        (
            ["run.toml", *WSD, "train.steps=9", "optimizer.decay_steps=2", "train.branch_from=runs/parent@12"],
            r'@12": the run ends at step 9 .*; use more than 12',
        ),
        (["run.toml", *COMMON, "train.steps=20", "train.branch_from=runs/parent@8"], r"of step 8 is 0\.001 there"),
    ],
)
def test_what_cannot_branch_off_is_refused_by_name(
    parent: RunDirectory,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(workplace)
    for name, schedule in (("decaying", "cosine"), ("constant", "constant")):
        RunDirectory(f"runs/{name}").create(load("run.toml", [f"optimizer.schedule={schedule}"]))
    words_of_average = ["optimizer.name=schedulefree", "optimizer.schedule=constant"]
    RunDirectory("runs/average").create(load("run.toml", words_of_average))
    before = sorted(Path("runs").iterdir())
    assert main(["train", *words]) in (2, 78)
    assert re.search(message, capsys.readouterr().err, re.MULTILINE)
    assert sorted(Path("runs").iterdir()) == before


def test_a_parent_with_weights_alone_is_refused_and_a_change_can_be_accepted(
    parent: RunDirectory, workplace: Path, tmp_path: Path
) -> None:
    bare = RunDirectory(tmp_path / "bare")
    bare.create(load(parent.config))
    (bare.checkpoints / directory_name(8, "weights")).mkdir(parents=True)
    words = [*WSD, "train.steps=10", "optimizer.decay_steps=2", f'train.branch_from="{bare.path}@8"']
    config, never = load(workplace / "run.toml", words), RunDirectory(tmp_path / "never")
    with pytest.raises(UserError, match=r"bare@8\": .* has only weights of step 8; .* Full checkpoints: none"):
        check_branch(config, never)
    (bare.checkpoints / directory_name(8)).mkdir()
    check_branch(config, never)
    other = load(workplace / "run.toml", [*words, "train.seed=5"])
    with pytest.raises(UserError, match=r"--allow-change train\.seed"):
        check_branch(other, never)
    check_branch(other, never, {"train"})
