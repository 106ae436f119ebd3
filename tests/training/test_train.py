"""Real runs by `lightscale train`: what they record, how they are stopped and resumed, and on which layouts."""

import datetime
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics
from lightscale.training.checkpoints.directories import list_steps
from lightscale.training.health.heartbeat import read_heartbeats

commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]

# Several starts of several processes, on a machine that may be busy.
pytestmark = pytest.mark.timeout(400)

RunRanks = Callable[..., list[Any]]
StepsOf = Callable[[list[dict[str, Any]]], dict[int, tuple[Any, ...]]]


def test_the_metrics_of_a_run(whole: tuple[RunDirectory, Any]) -> None:
    run, _ = whole
    lines = read_metrics(run.metrics)
    assert [line["step"] for line in lines] == list(range(1, 41))
    for line in lines:
        step = line["step"]
        assert (line["attempt"], line["tokens"]) == (1, step * 4 * 64)
        done = (step - 5) / 35
        lr = 1e-3 * step / 5 if step <= 5 else 1e-4 + 9e-4 * (1 + math.cos(math.pi * done)) / 2
        assert line["lr"] == pytest.approx(lr, rel=1e-12)
        assert 0 < line["grad_norm"] < 100
        assert line["tokens_per_s"] == pytest.approx(256 / line["step_s"], rel=1e-9)
        assert line["mfu"] is None, "there is no peak to compare a CPU with"
        assert ("validation" in line) == (step in (20, 40))
    assert lines[0]["loss"] == pytest.approx(math.log(300), abs=0.2), "all of 300 tokens are as likely at first"
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    for line in (lines[19], lines[39]):
        assert set(line["validation"]) == {"held", "other"}
        for measured in line["validation"].values():
            assert len(measured["loss_by_position"]) == 4
            # Parts of equal length.
            assert measured["loss"] == pytest.approx(sum(measured["loss_by_position"]) / 4, rel=1e-6)
    first, last = (line["validation"]["held"]["loss"] for line in (lines[19], lines[39]))
    assert last < first


def test_the_other_records_of_a_run(whole: tuple[RunDirectory, Any], workplace: Path) -> None:
    run, ended = whole
    events = read_lines(run.events)
    assert [(event["event"], event.get("step")) for event in events] == [
        ("start", None),
        ("checkpoint", 20),
        ("checkpoint", 40),
        ("finished", 40),
    ]
    assert (events[0]["world_size"], events[0]["device"]) == (2, "CPU")
    assert list_steps(run.checkpoints) == [20, 40]
    status = run.read_status()
    assert status is not None
    assert (status.status, status.step, status.tokens) == ("finished", 40, 40 * 256)
    assert run.is_finished(load(run.config))
    assert "finished at step 40, 10,240 tokens: all 40 steps are done" in ended.last_line
    assert "ranks: tensor 1, pipeline 1, sequence 2, data 1" in ended.stderr
    assert "step 40/40  10.2k tokens  loss " in ended.stderr
    assert ended.stderr.count("fused kernels: none") == 1
    assert "Warning" not in ended.stderr
    assert ended.stdout == ""
    assert sorted(path.name for path in run.profile.iterdir()) == [
        "rank-00000.memory.txt",
        "rank-00000.trace.json",
        "rank-00001.memory.txt",
        "rank-00001.trace.json",
    ]
    trace = json.loads((run.profile / "rank-00001.trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in trace)


def test_tensorboard_shows_the_same(whole: tuple[RunDirectory, Any]) -> None:
    run, _ = whole
    board = EventAccumulator(str(run.tensorboard), size_guidance={"scalars": 0})
    board.Reload()
    lines = read_metrics(run.metrics)
    shown = {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    for key in ("loss", "grad_norm", "lr", "step_s", "tokens_per_s", "tokens"):
        assert shown.pop(f"train/{key}") == [(line["step"], pytest.approx(line[key], rel=1e-6)) for line in lines]
    for name in ("held", "other"):
        measured = [(line["step"], line["validation"][name]) for line in lines if "validation" in line]
        losses = [(step, pytest.approx(one["loss"], rel=1e-6)) for step, one in measured]
        assert shown.pop(f"validation/{name}/loss") == losses
        for place in range(4):
            by_place = [(step, pytest.approx(one["loss_by_position"][place], rel=1e-6)) for step, one in measured]
            assert shown.pop(f"validation/{name}/loss_by_position/{place}") == by_place
    saves = [line for line in read_lines(run.metrics) if "checkpoint_step" in line]
    for key in ("stall_s", "write_s", "bytes_per_s"):
        values = [(line["checkpoint_step"], pytest.approx(line[f"checkpoint_{key}"], rel=1e-6)) for line in saves]
        assert shown.pop(f"checkpoint/{key}") == values
    assert [line["checkpoint_step"] for line in saves] == [20, 40]
    for tag in [tag for tag in shown if tag.startswith("goodput/")]:
        assert [step for step, _ in shown.pop(tag)] == [40], "once, at the end"
    assert shown == {}


def test_a_finished_run_is_left_alone(
    whole: tuple[RunDirectory, Any],
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, _ = whole
    monkeypatch.chdir(workplace)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    words = ["run.toml", "parallel.sequence=2", "train.profile_steps=[2, 3]", "--run", "runs/whole", "--processes", "2"]
    assert main(["train", *words]) == 0
    assert capsys.readouterr().err == "runs/whole is finished: all 40 steps are done\n"
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_stopped_runs_go_on_as_if_nothing_had_happened(
    whole: tuple[RunDirectory, Any], workplace: Path, start: Callable[..., Any], steps_of: StepsOf
) -> None:
    run = RunDirectory(workplace / "runs/stopped")
    words = ["run.toml", "parallel.sequence=2", "--run", "runs/stopped", "--processes", "2"]
    stops = []
    for signum, step in ((signal.SIGTERM, 7), (signal.SIGINT, 23)):
        running = start(*words)
        running.wait_for_step(run, step)
        running.process.send_signal(signum)
        ended = running.end()
        assert ended.code == 75, ended.stderr
        assert "Traceback" not in ended.stderr
        status = run.read_status()
        assert status is not None
        assert (status.status, status.reason) == ("resumable", f"stopped by {signum.name}")
        assert status.step >= step
        assert status.tokens == status.step * 256
        assert list_steps(run.checkpoints)[-1] == status.step
        assert f"{signum.name}: finishing this step, then saving and leaving" in ended.stderr
        # The line that says how to go on is the command itself.
        assert ended.last_line.startswith("resume with: lightscale train ")
        words = shlex.split(ended.last_line.partition("lightscale train ")[2])
        stops.append(status.step)
    ended = start(*words).end()
    assert ended.code == 0, ended.stderr
    assert f"resuming after step {stops[-1]} from" in ended.stderr

    assert steps_of(read_metrics(run.metrics)) == steps_of(read_metrics(whole[0].metrics))
    attempts = [(line["step"], line["attempt"]) for line in read_lines(run.metrics) if "loss" in line]
    assert attempts == [(step, 1 + sum(stop < step for stop in stops)) for step in range(1, 41)], (
        "no step is done twice"
    )
    resumes = [event["step"] for event in read_lines(run.events) if event["event"] == "resume"]
    assert resumes == stops


def test_a_killed_rank_costs_only_the_steps_since_the_last_checkpoint(
    whole: tuple[RunDirectory, Any], workplace: Path, start: Callable[..., Any], steps_of: StepsOf
) -> None:
    run = RunDirectory(workplace / "runs/killed")
    words = ["run.toml", "parallel.sequence=2", "--run", "runs/killed", "--processes", "2"]
    running = start(*words, "--no-restart")
    running.wait_for_step(run, 24)
    running.ranks()[1].kill()
    ended = running.end()
    assert ended.code == 1, ended.stderr
    assert "rank 1 failed: killed by SIGKILL" in ended.stderr
    assert ended.last_line.startswith("resume from the newest checkpoint with: lightscale train ")
    status = run.read_status()
    assert status is not None and status.status == "resumable"
    # The next one goes on by itself after such a failure.
    running = start(*words)
    running.wait_for_step(run, 30)
    running.ranks()[0].kill()
    ended = running.end()
    assert ended.code == 0, ended.stderr
    assert "rank 0 failed: killed by SIGKILL" in ended.stderr
    assert "restarting the ranks from the checkpoint of step 20; 1 of at most 3" in ended.stderr
    assert ended.stderr.count("resuming after step 20") == 2
    assert [event["step"] for event in read_lines(run.events) if event["event"] == "resume"] == [20, 20]
    assert steps_of(read_metrics(run.metrics)) == steps_of(read_metrics(whole[0].metrics))


def test_a_suspended_rank_is_started_again(
    whole: tuple[RunDirectory, Any], workplace: Path, start: Callable[..., Any], steps_of: StepsOf
) -> None:
    run = RunDirectory(workplace / "runs/suspended")
    words = ["run.toml", "parallel.sequence=2", "--run", "runs/suspended", "--processes", "2"]
    running = start(*words, "restart.hang_timeout_s=5")
    running.wait_for_step(run, 22)
    running.ranks()[1].send_signal(signal.SIGSTOP)
    stopped_at = time.time()
    ended = running.end(timeout_s=200)
    assert ended.code == 0, ended.stderr
    (event,) = [event for event in read_lines(run.events) if event["event"] == "restart"]
    assert re.match(r"rank 1: no heartbeat for \d+\.\d s, stopped by a signal at step 2\d, ", event["reason"])
    found_at = datetime.datetime.fromisoformat(event["time"]).timestamp()
    assert found_at - stopped_at < 60
    assert "File " in (run.logs / "launch-0001" / "rank-0.stacks").read_text()
    assert steps_of(read_metrics(run.metrics)) == steps_of(read_metrics(whole[0].metrics))


@pytest.mark.long
def test_an_exchange_that_times_out_is_named_and_the_run_goes_on(
    whole: tuple[RunDirectory, Any], workplace: Path, start: Callable[..., Any], steps_of: StepsOf
) -> None:
    """A rank is stopped, and the other notices before the launcher's watchdog would."""
    run = RunDirectory(workplace / "runs/timed-out")
    words = ["run.toml", "parallel.sequence=2", "--run", "runs/timed-out", "--processes", "2"]
    running = start(*words, "restart.hang_timeout_s=600", "restart.collective_timeout_s=10")
    running.wait_for_step(run, 22)
    running.ranks()[1].send_signal(signal.SIGSTOP)
    ended = running.end(timeout_s=300)
    assert ended.code == 0, ended.stderr
    (event,) = [event for event in read_lines(run.events) if event["event"] == "restart"]
    where = r"step 2\d, [a-z ]+"
    assert re.search(
        rf"^rank 0: RuntimeError: .*; rank 1 is stopped by a signal, at {where} \({where}", event["reason"]
    )
    assert steps_of(read_metrics(run.metrics)) == steps_of(read_metrics(whole[0].metrics))


def test_the_deadline_stops_and_saves(workplace: Path, train: Callable[..., Any]) -> None:
    ended = train("run.toml", "train.steps=100000", "--run", "runs/deadline", "--stop-after", "1s")
    assert ended.code == 75, ended.stderr
    run = RunDirectory(workplace / "runs/deadline")
    status = run.read_status()
    assert status is not None
    assert (status.status, status.reason) == ("resumable", "stopped by deadline")
    assert list_steps(run.checkpoints)[-1] == status.step
    assert ended.last_line.endswith("train.steps=100000 --run runs/deadline --stop-after 1s")


@pytest.mark.parametrize(
    ("moment", "signum", "to_rank"),
    [
        ("saving", signal.SIGTERM, 1),
        pytest.param("starting", signal.SIGUSR1, 0, marks=pytest.mark.long),
        pytest.param("starting", signal.SIGINT, 1, marks=pytest.mark.long),
        pytest.param("validation", signal.SIGUSR1, None, marks=pytest.mark.long),
        pytest.param("saving", signal.SIGINT, None, marks=pytest.mark.long),
        pytest.param("validation", signal.SIGTERM, 0, marks=pytest.mark.long),
    ],
)
def test_signals_at_any_moment(
    workplace: Path, start: Callable[..., Any], moment: str, signum: signal.Signals, to_rank: int | None
) -> None:
    """Two of them, to one rank or to the launcher: all ranks take the same step, save and leave."""
    run = RunDirectory(workplace / f"runs/signal-{moment}-{signum}-{to_rank}")
    words = ["run.toml", "parallel.sequence=2", "train.steps=100000", "checkpoint.every=3", "train.validate_every=4"]
    running = start(*words, "--run", str(run.path), "--processes", "2")
    heartbeats = run.logs / "launch-0001" / "heartbeats"
    deadline = time.monotonic() + 200
    while True:
        beats = read_heartbeats(heartbeats) if heartbeats.exists() else {}
        if len(beats) == 2 and beats[to_rank or 0].doing == moment:
            break
        assert time.monotonic() < deadline and running.process.poll() is None
        time.sleep(0.001)
    target = running.process.pid if to_rank is None else beats[to_rank].process_id
    for _ in range(2):
        os.kill(target, signum)
    ended = running.end()
    assert ended.code == 75, ended.stderr
    assert "Traceback" not in ended.stderr
    status = run.read_status()
    assert status is not None
    assert (status.status, status.reason) == ("resumable", f"stopped by {signum.name}")
    assert list_steps(run.checkpoints)[-1] == status.step
    assert {beat.where for beat in read_heartbeats(heartbeats).values()} == {f"step {status.step}, leaving"}


@pytest.mark.long
def test_a_killed_launcher_takes_its_ranks_along(
    whole: tuple[RunDirectory, Any], workplace: Path, start: Callable[..., Any], steps_of: StepsOf
) -> None:
    run = RunDirectory(workplace / "runs/orphaned")
    words = ["run.toml", "parallel.sequence=2", "--run", "runs/orphaned", "--processes", "2"]
    for step in (5, 24, 31):
        running = start(*words)
        running.wait_for_step(run, step)
        ranks = running.ranks()
        assert len(ranks) == 2
        os.kill(running.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
            assert time.monotonic() < deadline, "a rank was left behind"
            time.sleep(0.05)
        assert run.read_status() is None
    ended = start(*words).end()
    assert ended.code == 0, ended.stderr
    assert "resuming after step 20" in ended.stderr
    assert steps_of(read_metrics(run.metrics)) == steps_of(read_metrics(whole[0].metrics))


# ----- other layouts and other beginnings, several runs in one process -----------------------------------------------


def copy_at(run: RunDirectory, step: int, path: Path) -> RunDirectory:
    """``run`` as it would be, had it been killed after the checkpoint of ``step``."""
    shutil.copytree(run.path, path)
    copy = RunDirectory(path)
    copy.status.unlink()
    for newer in list_steps(copy.checkpoints):
        if newer > step:
            shutil.rmtree(copy.checkpoints / f"step-{newer:08d}")
    return copy


def test_one_rank_goes_on_where_two_left_and_the_reverse(
    whole: tuple[RunDirectory, Any], workplace: Path, run_ranks: RunRanks, steps_of: StepsOf
) -> None:
    one, two = "parallel.sequence=1", "parallel.sequence=2"
    on_one = copy_at(whole[0], 20, workplace / "runs/two-then-one")
    alone = RunDirectory(workplace / "runs/alone")
    lines = [
        ["train", "run.toml", one, "--run", str(on_one.path)],
        ["train", "run.toml", "--run", str(alone.path)],
    ]
    for code, text in run_ranks(commands, 1, str(workplace), lines)[0]:
        assert code == 0, text
    on_two = copy_at(alone, 20, workplace / "runs/one-then-two")
    lines = [["train", "run.toml", two, "--run", str(on_two.path)]]
    for ((code, text),) in run_ranks(commands, 2, str(workplace), lines):
        assert code == 0, text
    for found, expected in ((on_one, whole[0]), (on_two, alone)):
        later, reference = steps_of(read_metrics(found.metrics)), steps_of(read_metrics(expected.metrics))
        assert sorted(later) == list(range(1, 41))
        events = read_lines(found.events)
        assert [event["step"] for event in events if event["event"] == "resume"] == [20]
        changed = next(event for event in events if event["event"] == "configuration_changed")
        assert "parallel.sequence" in changed["changes"]
        for step in range(1, 21):
            assert later[step] == reference[step]
        for step in range(21, 24):
            assert later[step][0] == reference[step][0]
            assert later[step][1] == pytest.approx(reference[step][1], abs=1e-6), f"loss of step {step}"
            assert later[step][2] == pytest.approx(reference[step][2], rel=1e-5), f"gradient norm of step {step}"


def test_beginning_from_the_weights_of_another_run(
    whole: tuple[RunDirectory, Any], workplace: Path, run_ranks: RunRanks
) -> None:
    base = [
        "train",
        "run.toml",
        "train.steps=8",
        "train.validate_every=8",
        "data.store=other",
        'data.validation.other.source="words"',
    ]
    base += ["data.validation.other.store=store", "data.validation.held.store=store", "checkpoint.every=4"]
    fresh, tuned = RunDirectory(workplace / "runs/fresh"), RunDirectory(workplace / "runs/tuned")
    lines = [
        [*base, "--run", str(fresh.path)],
        [*base, "train.init_from=runs/whole@40", "data.sequence_length=128", "--run", str(tuned.path)],
        [*base, "train.init_from=runs/whole@30", "--run", "runs/none"],
        [*base, "train.init_from=runs/nowhere@30", "--run", "runs/nothing"],
        [*base, "train.init_from=runs/whole@40", "model.intermediate_size=64", "--run", "runs/wider"],
    ]
    results = run_ranks(commands, 1, str(workplace), lines)[0]
    assert [code for code, _ in results] == [0, 0, 78, 78, 78], results
    assert f"starting from the weights of {Path('runs/whole/checkpoints/step-00000040')}" in results[1][1]
    first, tuned_first = (read_metrics(run.metrics)[0] for run in (fresh, tuned))
    assert tuned_first["loss"] < first["loss"] - 0.5
    assert (tuned_first["step"], tuned_first["tokens"]) == (1, 4 * 128)
    assert tuned_first["lr"] == first["lr"], "the schedule begins anew"
    (event,) = [event for event in read_lines(tuned.events) if event["event"] == "init_from"]
    assert event["checkpoint"].endswith("runs/whole/checkpoints/step-00000040")
    messages = [text.splitlines()[-1] for _, text in results[2:]]
    assert messages[0] == (
        'error: train.init_from = "runs/whole@30": runs/whole/checkpoints has no checkpoint of step 30; it has: 20, 40'
    )
    assert messages[1].endswith("runs/nowhere/checkpoints has no checkpoint of step 30; it has: none")
    assert (
        "is of another model: decoder.layers.0.mlp.linear_fc1.weight is (256, 64) there and (128, 64) here"
        in messages[2]
    )
    for run in (fresh, tuned):
        assert list_steps(run.checkpoints) == [4, 8]
