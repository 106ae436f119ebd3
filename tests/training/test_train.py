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


EXPECTED = {
    "memory_gib": {"resident", "peak", "planned"},
    "gradient_norm": {"embedding", "mixer", "glu"},
    "update_ratio": {"embedding", "mixer", "glu"},
}


def test_norms_by_parameters_are_parts_of_the_whole_norm(whole: tuple[RunDirectory, Any]) -> None:
    for line in read_metrics(whole[0].metrics)[9::10]:
        assert math.hypot(*line["gradient_norm"].values()) == pytest.approx(line["grad_norm"], rel=1e-6)
        assert all(0 < ratio < 0.2 for ratio in line["update_ratio"].values())


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
        assert shown.pop(f"validation/{name}") == losses
        for part in range(4):
            of_part = [(step, pytest.approx(one["loss_by_position"][part], rel=1e-6)) for step, one in measured]
            assert shown.pop(f"validation_by_position/{name}/{part}") == of_part
    saves = [line for line in read_lines(run.metrics) if "checkpoint_step" in line]
    for key in ("stall_s", "write_s", "bytes_per_s"):
        values = [(line["checkpoint_step"], pytest.approx(line[f"checkpoint_{key}"], rel=1e-6)) for line in saves]
        assert shown.pop(f"checkpoint/{key}") == values
    assert [line["checkpoint_step"] for line in saves] == [20, 40]
    for group, step in (("memory_gib", 1), ("gradient_norm", 10), ("update_ratio", 10)):
        for tag in [tag for tag in shown if tag.startswith(f"{group}/")]:
            values = [(line["step"], pytest.approx(line[group][tag.split("/")[1]])) for line in lines[step - 1 :: step]]
            assert shown.pop(tag) == values
        assert set(lines[9][group]) == EXPECTED[group]
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


def wait_for_moment(running: Any, run: RunDirectory, launch: int, moments: dict[int, str], step: int = 0) -> Any:
    """The heartbeats of two ranks as soon as those in ``moments`` do what it says, at ``step`` or later."""
    path, deadline = run.logs / f"launch-{launch:04d}" / "heartbeats", time.monotonic() + 200
    while True:
        beats = read_heartbeats(path) if path.exists() else {}
        if len(beats) == 2 and all(beats[r].doing == doing and beats[r].step >= step for r, doing in moments.items()):
            return beats
        assert time.monotonic() < deadline and running.process.poll() is None
        time.sleep(0.001)


def assert_all_left(run: RunDirectory, launch: int, reason: str) -> int:
    """All ranks took the same steps, saved and left; the number of steps."""
    status = run.read_status()
    assert status is not None
    assert (status.status, status.reason) == ("resumable", f"stopped by {reason}")
    assert status.tokens == status.step * 256
    assert list_steps(run.checkpoints)[-1] == status.step
    beats = read_heartbeats(run.logs / f"launch-{launch:04d}" / "heartbeats")
    assert {beat.where for beat in beats.values()} == {f"step {status.step}, leaving"}
    return status.step


def test_stopped_runs_go_on_as_if_nothing_had_happened(
    whole: tuple[RunDirectory, Any], workplace: Path, start: Callable[..., Any], steps_of: StepsOf
) -> None:
    """Stopped by a signal to the launcher, and by two to one rank while it saves."""
    run = RunDirectory(workplace / "runs/stopped")
    words = ["run.toml", "parallel.sequence=2", "--run", "runs/stopped", "--processes", "2"]
    stops = []
    for launch in (1, 2):
        running = start(*words)
        if launch == 1:
            running.wait_for_step(run, 7)
            running.process.send_signal(signal.SIGINT)
        else:
            beats = wait_for_moment(running, run, launch, {1: "saving"}, step=23)
            for _ in range(2):
                os.kill(beats[1].process_id, signal.SIGTERM)
        ended = running.end()
        assert ended.code == 75, ended.stderr
        assert "Traceback" not in ended.stderr
        stops.append(assert_all_left(run, launch, ("SIGINT", "SIGTERM")[launch - 1]))
        if launch == 1:
            assert "SIGINT: finishing this step, then saving and exiting" in ended.stderr
        # The line that says how to go on is the command itself.
        assert ended.last_line.startswith("resume with: lightscale train ")
        words = shlex.split(ended.last_line.partition("lightscale train ")[2])
        # From the second start on every step is saved, and waits for that.
        words += ["checkpoint.every=1", "checkpoint.asynchronous=false"] if launch == 1 else []
    assert stops[0] >= 7 and stops[1] >= 23
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


@pytest.mark.long
def test_a_killed_or_suspended_rank_costs_only_the_steps_since_the_last_checkpoint(
    whole: tuple[RunDirectory, Any], workplace: Path, start: Callable[..., Any], steps_of: StepsOf
) -> None:
    """Killed where nothing restarts it; then suspended and killed where the launcher does."""
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
    running = start(*words, "restart.hang_timeout_s=5")
    # The steps of this attempt must be known, or the first one's long allowance holds.
    running.wait_for_step(run, 25, attempt=2)
    running.ranks()[1].send_signal(signal.SIGSTOP)
    stopped_at = time.time()
    running.wait_for_step(run, 30, attempt=3)
    running.ranks()[0].kill()
    ended = running.end()
    assert ended.code == 0, ended.stderr
    hanging, killed = [event for event in read_lines(run.events) if event["event"] == "restart"]
    assert re.match(r"rank 1: no heartbeat for \d+\.\d s, stopped by a signal at step 2\d, ", hanging["reason"])
    found_at = datetime.datetime.fromisoformat(hanging["time"]).timestamp()
    assert found_at - stopped_at < 60
    assert "File " in (run.logs / "launch-0002" / "rank-0.stacks").read_text()
    assert "rank 0 failed: killed by SIGKILL" in ended.stderr
    assert "rank 0" in killed["reason"]
    for number in (1, 2):
        assert f"restarting the ranks from the checkpoint of step 20; {number} of at most 3" in ended.stderr
    assert ended.stderr.count("resuming after step 20") == 3
    assert [event["step"] for event in read_lines(run.events) if event["event"] == "resume"] == [20, 20, 20]
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


@pytest.mark.long
def test_the_deadline_stops_and_saves(workplace: Path, train: Callable[..., Any]) -> None:
    ended = train("run.toml", "train.steps=100000", "--run", "runs/deadline", "--stop-after", "1s")
    assert ended.code == 75, ended.stderr
    run = RunDirectory(workplace / "runs/deadline")
    status = run.read_status()
    assert status is not None
    assert (status.status, status.reason) == ("resumable", "stopped by deadline")
    assert list_steps(run.checkpoints)[-1] == status.step
    assert ended.last_line.endswith("train.steps=100000 --run runs/deadline --stop-after 1s")


@pytest.mark.long
@pytest.mark.parametrize(
    ("moment", "signals", "reason"),
    [
        # Each rank another one: the highest number is what they agree on.
        ("starting", {0: signal.SIGUSR1, 1: signal.SIGINT}, "SIGUSR1"),
        ("validation", {None: signal.SIGUSR1}, "SIGUSR1"),
        ("saving", {None: signal.SIGINT}, "SIGINT"),
        ("validation", {0: signal.SIGTERM}, "SIGTERM"),
    ],
)
def test_signals_at_any_moment(
    workplace: Path,
    start: Callable[..., Any],
    moment: str,
    signals: dict[int | None, signal.Signals],
    reason: str,
) -> None:
    """Two of each, to a rank or to the launcher: all ranks take the same step, save and leave."""
    run = RunDirectory(workplace / f"runs/signal-{moment}-{reason}")
    words = ["run.toml", "parallel.sequence=2", "train.steps=100000", "checkpoint.every=3", "train.validate_every=4"]
    running = start(*words, "--run", str(run.path), "--processes", "2")
    beats = wait_for_moment(running, run, 1, {rank or 0: moment for rank in signals})
    for rank, signum in signals.items():
        for _ in range(2):
            os.kill(running.process.pid if rank is None else beats[rank].process_id, signum)
    ended = running.end()
    assert ended.code == 75, ended.stderr
    assert "Traceback" not in ended.stderr
    assert_all_left(run, 1, reason)


@pytest.mark.long
def test_a_killed_launcher_takes_its_ranks_along(
    whole: tuple[RunDirectory, Any], workplace: Path, start: Callable[..., Any], steps_of: StepsOf
) -> None:
    run = RunDirectory(workplace / "runs/orphaned")
    words = ["run.toml", "parallel.sequence=2", "--run", "runs/orphaned", "--processes", "2"]
    # Before the first checkpoint, and after it.
    for step in (5, 24):
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


@pytest.mark.long
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
    converted = RunDirectory(workplace / "runs/converted")
    lines = [
        [*base, "--run", str(fresh.path)],
        [*base, "train.init_from=runs/whole@40", "data.sequence_length=128", "--run", str(tuned.path)],
        [*base, "train.init_from=runs/whole@30", "--run", "runs/none"],
        [*base, "train.init_from=runs/nowhere@30", "--run", "runs/nothing"],
        [*base, "train.init_from=runs/whole@40", "model.intermediate_size=64", "--run", "runs/wider"],
        [*base, "train.init_from=runs/whole@40", "model.mixer=hgrn2", "--run", str(converted.path)],
        [*base, "train.init_from=runs/whole@40", "model.mixer=hgrn2", "model.hidden_size=32", "--run", "runs/half"],
    ]
    results = run_ranks(commands, 1, str(workplace), lines)[0]
    assert [code for code, _ in results] == [0, 0, 78, 78, 78, 0, 78], results
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
    assert messages[2] == (
        'error: train.init_from = "runs/whole@40": its model.intermediate_size is 128 and that of this run 64; '
        "kept weights need the same value: use model.intermediate_size=128"
    )
    for run in (fresh, tuned, converted):
        assert list_steps(run.checkpoints) == [4, 8]

    # Another mixer keeps what has the same role, and says so.
    assert read_metrics(converted.metrics)[0]["loss"] < first["loss"] - 0.2
    attention = "decoder.layers.0-3.self_attention"
    assert f"  {attention}.fv_proj.weight (v): from {attention}.kv_proj.weight\n" in results[5][1]
    assert f"  {attention}.fv_proj.weight (forget): drawn, missing in the source\n" in results[5][1]
    (event,) = [event for event in read_lines(converted.events) if event["event"] == "init_from"]
    row = {"parameter": f"{attention}.fv_proj.weight", "role": "v", "from": f"{attention}.kv_proj.weight"}
    assert row in event["conversion"]
    assert "conversion" not in next(event for event in read_lines(tuned.events) if event["event"] == "init_from")
    assert messages[4] == (
        'error: train.init_from = "runs/whole@40": its model.hidden_size is 64 and that of this run 32; '
        "kept weights need the same value: use model.hidden_size=64"
    )
