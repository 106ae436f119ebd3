import datetime
import math
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightscale.config.model import ModelConfig
from lightscale.config.schedules.step_tokens import StepTokens
from lightscale.config.schema import DataConfig, OptimizerConfig, RunConfig, TrainConfig
from lightscale.runs.goodput import measure_goodput
from lightscale.runs.metrics.logger import MetricsLogger, ValidationLoss
from lightscale.runs.metrics.peak_flops import device_peak_flops
from lightscale.runs.metrics.registry import open_sinks
from lightscale.runs.metrics.sink import RunFacts
from lightscale.runs.run_directory import read_metrics

CONFIG = RunConfig(
    model=ModelConfig(num_layers=2, hidden_size=32, num_heads=4, intermediate_size=48, vocab_size=128),
    data=DataConfig(store=Path("store"), sequence_length=8),
    optimizer=OptimizerConfig(lr=1e-3),
    train=TrainConfig(steps=100, global_batch_size=1),
)


def logger(folder: Path, *, names: tuple[str, ...] = ("tensorboard", "jsonl"), **changes: Any) -> MetricsLogger:
    arguments: dict[str, Any] = {
        "enabled": True,
        "attempt": 1,
        "first_step": 1,
        "total_steps": 100,
        "step_tokens": StepTokens(full=1000),
    }
    arguments |= changes
    facts = RunFacts(directory=folder, config=CONFIG, first_step=arguments["first_step"])
    return MetricsLogger(open_sinks(names, facts) if arguments["enabled"] else (), **arguments)


def log(metrics: MetricsLogger, steps: range, loss: float) -> None:
    for step in steps:
        metrics.begin_step(1000 * (step - 1))
        metrics.log_step(step, tokens=1000 * step, loss=loss + step, grad_norm=0.5, lr=1e-3)


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows: tag to step to value."""
    reader = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: {event.step: event.value for event in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}


def test_a_step_is_one_line_with_all_fields(tmp_path: Path) -> None:
    began = datetime.datetime.now(datetime.UTC)
    with logger(tmp_path) as metrics:
        metrics.begin_step(2000)
        time.sleep(0.05)
        metrics.log_step(3, tokens=3000, loss=2.5, grad_norm=0.5, lr=1e-3, stall_s=0.25)
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    step_s, tokens_per_s = line.pop("step_s"), line.pop("tokens_per_s")
    ended = datetime.datetime.fromisoformat(line.pop("time"))
    now = datetime.datetime.now(datetime.UTC)
    assert began + datetime.timedelta(seconds=0.04) < ended <= now
    assert 0.05 <= step_s <= (now - began).total_seconds()
    assert tokens_per_s == pytest.approx(1000 / step_s)
    assert line == {
        "step": 3,
        "attempt": 1,
        "tokens": 3000,
        "loss": 2.5,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "mfu": None,
        "stall_s": 0.25,
    }


def test_time_between_steps_is_not_part_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    with logger(tmp_path) as metrics:
        metrics.begin_step(0)
        now_s += 10.0  # a save
        metrics.begin_step(0)
        now_s += 2.0
        metrics.log_step(1, tokens=1000, loss=1.0, grad_norm=1.0, lr=1.0)
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line["step_s"] == 2.0


def test_mfu_is_the_share_of_the_peak(tmp_path: Path) -> None:
    with logger(tmp_path, flops_per_token=2e6, peak_flops=8 * 989e12) as metrics:
        log(metrics, range(1, 2), 1.0)
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line["mfu"] == pytest.approx(line["tokens_per_s"] * 2e6 / (8 * 989e12))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA B200", 2250e12),
        # Near to those in the table, and others: no number is better than a wrong one.
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA GeForce RTX 3060", None),
        ("CPU", None),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name: str, peak: float | None) -> None:
    assert device_peak_flops(name) == peak


def test_validation_has_every_set_and_every_part_of_the_sequence(tmp_path: Path) -> None:
    losses = {
        "books": ValidationLoss(loss=3.0, by_position=tuple(float(bucket) for bucket in range(12))),
        "code": ValidationLoss(loss=1.5),
    }
    with logger(tmp_path) as metrics:
        log(metrics, range(4, 5), 0.0)
        metrics.log_validation(4, tokens=4000, losses=losses)
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line["loss"] == 4.0
    assert line["validation"] == {
        "books": {"loss": 3.0, "loss_by_position": [float(bucket) for bucket in range(12)]},
        "code": {"loss": 1.5, "loss_by_position": []},
    }
    shown = scalars(tmp_path)
    assert shown["validation/books"] == {4: 3.0}
    assert shown["validation/code"] == {4: 1.5}
    assert [shown[f"validation_by_position/books/{bucket:02}"][4] for bucket in range(12)] == list(range(12))
    assert not any(tag.startswith("validation_by_position/code") for tag in shown)


def test_tensorboard_shows_the_steps_after_a_rollback_only_once(tmp_path: Path) -> None:
    with logger(tmp_path) as metrics:
        log(metrics, range(1, 8), 100.0)
    with logger(tmp_path, attempt=2, first_step=5) as metrics:
        log(metrics, range(5, 7), 200.0)
    shown = scalars(tmp_path)
    expected = {1: 101.0, 2: 102.0, 3: 103.0, 4: 104.0, 5: 205.0, 6: 206.0}
    assert shown["train/loss"] == expected
    assert set(shown) == {f"train/{name}" for name in ("loss", "grad_norm", "lr", "step_s", "tokens_per_s", "tokens")}
    # The file of lines keeps all, and says which attempt a line is from.
    lines = {line["step"]: (line["attempt"], line["loss"]) for line in read_metrics(tmp_path / "metrics.jsonl")}
    assert lines == {step: (2 if step in (5, 6) else 1, loss) for step, loss in {**expected, 7: 107.0}.items()}


def test_goodput_is_shown_and_joins_the_line_of_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = {"time": "2026-11-22T08:00:00+00:00", "attempt": 1, "event": "start"}
    ended = {"time": "2026-11-22T08:01:40+00:00", "attempt": 1, "event": "finished"}
    one = {"step": 1, "attempt": 1, "step_s": 30.0, "checkpoint_stall_s": 5.0}
    goodput = measure_goodput([start, ended], [one, {**one, "step": 2}])
    assert goodput is not None
    with logger(tmp_path) as metrics:
        log(metrics, range(1, 3), 1.0)
        metrics.log_goodput(2, tokens=2000, goodput=goodput)
    (_, second) = read_metrics(tmp_path / "metrics.jsonl")
    assert (second["loss"], second["tokens"]) == (3.0, 2000)
    assert second["goodput"]["effective_time_ratio"] == 0.6
    assert "step 2/100  goodput 60.0%: 2 steps kept" in capsys.readouterr().err
    # An attempt that starts has no line yet, and leaves alone that of the attempt before.
    with logger(tmp_path, attempt=2, first_step=3) as metrics:
        metrics.log_goodput(2, tokens=2000, goodput=goodput)
    assert read_metrics(tmp_path / "metrics.jsonl")[1] == second
    shown = scalars(tmp_path)
    assert shown["goodput/effective_time_ratio"] == {2: pytest.approx(0.6)}
    assert shown["goodput/checkpoint_stall_share"] == {2: pytest.approx(0.1)}
    assert shown["goodput/lost_steps"] == {2: 0}
    assert "goodput/restart_s" not in shown, "there was none"


def test_a_run_that_goes_back_is_shown_only_once(tmp_path: Path) -> None:
    with logger(tmp_path) as metrics:
        log(metrics, range(1, 8), 100.0)
        metrics.go_back(4, attempt=2)
        log(metrics, range(5, 7), 200.0)
    expected = {1: 101.0, 2: 102.0, 3: 103.0, 4: 104.0, 5: 205.0, 6: 206.0}
    assert scalars(tmp_path)["train/loss"] == expected
    lines = {line["step"]: (line["attempt"], line["loss"]) for line in read_metrics(tmp_path / "metrics.jsonl")}
    assert lines == {step: (2 if step in (5, 6) else 1, loss) for step, loss in {**expected, 7: 107.0}.items()}


def test_a_step_left_out_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logger(tmp_path) as metrics:
        log(metrics, range(1, 2), 1.0)
        metrics.log_step(2, tokens=2, loss=math.nan, grad_norm=math.inf, lr=1e-3, skipped="the loss is nan")
    good, bad = read_metrics(tmp_path / "metrics.jsonl")
    assert "skipped" not in good
    assert (bad["skipped"], bad["loss"], bad["grad_norm"], bad["lr"]) == ("the loss is nan", None, None, 1e-3)
    shown = scalars(tmp_path)
    assert list(shown["train/loss"]) == list(shown["train/grad_norm"]) == [1]
    assert list(shown["train/lr"]) == [1, 2]
    first, second = capsys.readouterr().err.splitlines()
    assert second.endswith("  skipped") and not first.endswith("  skipped")


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logger(tmp_path, enabled=False) as metrics:
        log(metrics, range(1, 3), 1.0)
        metrics.log_validation(2, tokens=2, losses={"a": ValidationLoss(loss=1.0)})
        goodput = measure_goodput([{"time": "2026-11-22T08:00:00+00:00", "attempt": 1, "event": "start"}], [])
        assert goodput is not None
        metrics.log_goodput(2, tokens=2, goodput=goodput)
        metrics.go_back(1, attempt=2)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_without_tensorboard_there_is_no_directory(tmp_path: Path) -> None:
    with logger(tmp_path, names=("jsonl",)) as metrics:
        log(metrics, range(1, 2), 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_groups_are_tables_in_the_record_and_curves_side_by_side(tmp_path: Path) -> None:
    groups = {"loss_by_source": {"books": 2.5, "code": math.nan}, "update_ratio": {}}
    with logger(tmp_path) as metrics:
        metrics.begin_step(0)
        metrics.log_step(1, tokens=8, loss=2.0, grad_norm=1.0, lr=1.0, groups=groups)
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line["loss_by_source"] == {"books": 2.5, "code": None}
    assert "update_ratio" not in line
    shown = scalars(tmp_path)
    assert shown["loss_by_source/books"] == {1: 2.5}
    assert "loss_by_source/code" not in shown


def test_every_nth_step_and_the_last_are_due(tmp_path: Path) -> None:
    metrics = logger(tmp_path, enabled=False, log_every=3, total_steps=8)
    assert [step for step in range(1, 9) if metrics.due(step)] == [3, 6, 8]


def test_a_pipe_gets_one_line_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with logger(tmp_path, total_steps=5) as metrics:
        for step in range(1, 4):
            metrics.begin_step(12345 * (step - 1))
            now_s += 4.0
            metrics.log_step(step, tokens=12345 * step, loss=2.5, grad_norm=0.125, lr=1e-3)
        metrics.log_validation(3, tokens=3, losses={"books": ValidationLoss(loss=3.25)})
    first, _, third, validation = capsys.readouterr().err.splitlines()
    assert first.startswith("step 1/5  12.3k tokens  loss 2.5000  grad norm 0.125  lr 1.00e-03  ")
    assert first.endswith("tokens/s  left -:--:--"), "nothing is known of the pace yet"
    # 2000 tokens at 12345 per 4 s.
    assert third.endswith("tokens/s  left 0:00:01")
    assert validation == "step 3/5  validation loss  books 3.2500"


def test_time_left_follows_the_wall_clock_with_its_pauses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with logger(tmp_path, total_steps=1000, names=("jsonl",)) as metrics:
        for step in range(1, 501):
            now_s += 2.0 + (10.0 if step % 10 == 0 else 0.0)  # a save takes 10 s
            metrics.begin_step(1000 * (step - 1))
            metrics.log_step(step, tokens=1000 * step, loss=1.0, grad_norm=1.0, lr=1.0)
    # 3 s a step with its share of a save; the window holds one save more or less.
    for step, line in list(enumerate(capsys.readouterr().err.splitlines(), start=1))[-30:]:
        hours, minutes, seconds = map(int, line.rpartition("left ")[2].split(":"))
        assert 3600 * hours + 60 * minutes + seconds == pytest.approx(3.0 * (1000 - step), rel=0.05)


LIVE = """
import os, sys
from lightscale.config.schedules.step_tokens import StepTokens
from lightscale.runs.metrics.logger import MetricsLogger, ValidationLoss

def play():
    tokens = StepTokens(full=10)
    with MetricsLogger(enabled=True, attempt=1, first_step=1, total_steps=3, step_tokens=tokens) as metrics:
        for step in range(1, 4):
            metrics.begin_step(10 * (step - 1))
            metrics.log_step(step, tokens=10 * step, loss=1.0 + step, grad_norm=1.0, lr=1e-3)
            if step == 2:
                metrics.log_validation(step, tokens=20, losses={"books": ValidationLoss(loss=9.0)})
    print("done", file=sys.stderr)

screen = int(sys.argv[1])
play()
os.environ["LIGHTSCALE_TERMINAL"] = ""
sys.stderr.flush()
os.dup2(screen, 2)
play()
"""


def test_a_terminal_gets_one_line_that_is_written_over(tmp_path: Path, needs: Callable[..., None]) -> None:
    """Both when the launcher names it and stderr is a file, and when stderr is the terminal; in one process."""
    needs("pseudo-terminals")
    (named_keyboard, named), (own_keyboard, own) = pty.openpty(), pty.openpty()
    try:
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LIGHTSCALE_TERMINAL": os.ttyname(named)}
        with (tmp_path / "stderr").open("w") as file:
            command = [sys.executable, "-c", LIVE, str(own)]
            subprocess.run(command, env=environment, stderr=file, pass_fds=[own], timeout=60, check=True)
        screens = [os.read(keyboard, 1 << 16).decode() for keyboard in (named_keyboard, own_keyboard)]
    finally:
        for end in (named_keyboard, named, own_keyboard, own):
            os.close(end)
    for shown in screens:
        assert all(f"step {step}/3" in shown for step in (1, 2, 3))
        assert "\r\x1b[2K" in shown, "lines are written over"
        assert "step 2/3  validation loss  books 9.0000" in shown
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is back"
    assert "done" in screens[1] and "done" not in screens[0]
    assert (tmp_path / "stderr").read_text() == "done\n", "of the first part; the second's is on its terminal"
