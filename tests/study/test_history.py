"""Curves of runs: steps that count, once each; smoothing; files."""

from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from lightscale.config.schedules.step_tokens import StepTokens
from lightscale.errors import UserError
from lightscale.runs.run_directory import LineWriter, RunDirectory
from lightscale.study.counts import count
from lightscale.study.curve_files import read_curve, write_curve, write_parquet
from lightscale.study.fits.curves import PFLOP_DAY
from lightscale.study.history import RunCurve, kept_lines, run_curve, smooth
from lightscale.study.study import Study
from tests.study.studies import pretend, write_study


def line(attempt: int, step: int, loss: float) -> dict[str, object]:
    return {"attempt": attempt, "step": step, "loss": loss, "step_s": 1.0}


def test_what_was_trained_again_counts_once() -> None:
    events = [
        {"event": "start", "attempt": 1},
        {"event": "start", "attempt": 2},
        {"event": "resume", "attempt": 2, "step": 4},
        {"event": "rollback", "attempt": 3, "step": 2},
    ]
    lines = [line(1, step, 10 + step) for step in range(1, 7)]
    lines += [line(2, step, 20 + step) for step in range(5, 9)]
    lines += [line(3, step, 30 + step) for step in range(3, 5)]
    # Steps 5 to 8 of the second attempt are of a way that was given up, although nothing has replaced them yet.
    assert [(one["step"], one["loss"]) for one in kept_lines(events, lines)] == [(1, 11), (2, 12), (3, 33), (4, 34)]


def test_a_run_that_begins_anew_forgets_all() -> None:
    lines = [line(1, 1, 5), line(1, 2, 4), line(2, 1, 3)]
    assert [one["loss"] for one in kept_lines([], lines)] == [3]


def test_tokens_flops_and_seconds_of_steps_that_count(tmp_path: Path) -> None:
    study = Study(write_study(tmp_path), tmp_path / "study")
    cell = study.cells()[0]
    pretend(study, cell, [5.0, 4.0, 9.0, 3.0])
    run = study.run(cell)
    run.event("step_skipped", step=3)
    counts = count(cell.config)
    curve = run_curve(run, counts, cell.config.step_tokens, smoothing=1.1)
    assert curve is not None
    assert curve.step.tolist() == [1, 2, 4]
    assert curve.tokens.tolist() == [128, 256, 384]
    assert curve.loss.tolist() == [5.0, 4.0, 3.0]
    assert curve.seconds.tolist() == [0.5, 1.0, 2.0]
    assert curve.flops == pytest.approx(curve.tokens * counts.flops_per_token)
    assert counts.compute == pytest.approx(counts.flops_per_token * 40 * 128 / PFLOP_DAY)
    growing = run_curve(run, counts, StepTokens(full=128, ramp=((40, 32), (100, 64))), smoothing=1.1)
    assert growing is not None
    assert growing.tokens.tolist() == [32, 64, 64 + 128], "steps of 32, 32, 64 (skipped), 128 tokens"


def test_a_branch_has_the_tokens_of_its_model_and_seconds_of_its_own(tmp_path: Path) -> None:
    study = Study(write_study(tmp_path), tmp_path / "study")
    config = study.cells()[0].config
    run = RunDirectory(tmp_path / "branch")
    run.create(config)
    run.event("start", attempt=1)
    run.event("branch", parent="runs/a", step=8, manifest="", skips=[])
    with LineWriter(run.metrics) as writer:
        for step in (9, 10):
            writer.write(line(1, step, 3.0))
    curve = run_curve(run, count(config), config.step_tokens, smoothing=1.1)
    assert curve is not None
    assert (curve.step.tolist(), curve.seconds.tolist()) == ([9, 10], [1.0, 2.0])
    assert curve.tokens.tolist() == [9 * 128, 10 * 128]


def test_tokens_are_the_recorded_ones_where_the_batch_was_changed_on_the_way(tmp_path: Path) -> None:
    config = Study(write_study(tmp_path), tmp_path / "study").cells()[0].config
    run = RunDirectory(tmp_path / "changed")
    run.create(config)
    run.event("start", attempt=1)
    with LineWriter(run.metrics) as writer:
        for step, tokens in ((1, 512), (2, 1024), (3, 1152), (4, 1280)):
            writer.write({**line(1, step, 3.0), "tokens": tokens})
    curve = run_curve(run, count(config), config.step_tokens, smoothing=1.1)
    assert curve is not None
    assert curve.tokens.tolist() == [512, 1024, 1152, 1280], "steps of 128 tokens since the third"


def test_smoothing_keeps_a_power_law_and_lowers_noise() -> None:
    tokens = np.arange(1.0, 2001.0)
    law = 7 * tokens**-0.3
    every = np.arange(len(tokens))
    assert smooth(tokens, law, every, factor=1.1) == pytest.approx(law, rel=1e-9)
    noisy = law * np.exp(np.random.default_rng(0).normal(0, 0.05, size=len(law)))
    errors = np.log(smooth(tokens, noisy, every, factor=1.2) / law)
    # 400 steps and more are in a window there: in the middle the error falls with their root, at the end to twice that.
    assert np.abs(errors[1000:]).max() < 0.02
    assert np.sqrt((errors[1000:1600] ** 2).mean()) < 0.05 / np.sqrt(300)


def curve() -> RunCurve:
    values = np.array([100.0, 200.0, 300.0])
    return RunCurve(
        step=np.array([1, 2, 3]),
        tokens=values,
        flops=values * 6e3,
        paper_flops=np.full(3, np.nan),
        seconds=np.array([0.0, 1.0, 2.0]),
        loss=np.array([5.0, 4.5, 4.25]),
        smoothed=np.array([5.0, 4.5, 4.25]),
    )


def test_files_of_curves_are_read_back(tmp_path: Path) -> None:
    write_curve(tmp_path / "a.csv", curve())
    found = read_curve(tmp_path / "a.csv")
    for name, values in vars(curve()).items():
        np.testing.assert_array_equal(getattr(found, name), values)
    write_parquet(tmp_path / "all.parquet", {"a": curve(), "b": curve()})
    table = pyarrow.parquet.read_table(tmp_path / "all.parquet")
    assert table.num_rows == 6
    assert table.column("cell").to_pylist() == ["a"] * 3 + ["b"] * 3
    assert table.column("loss").to_pylist() == [5.0, 4.5, 4.25] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("4.5", "many", 1), "line 3: loss = 'many'; must be a number above 0"),
        (lambda text: text.replace("4.5", "-4.5", 1), "line 3: loss = '-4.5'"),
        (lambda text: text.replace("2,200", "2,20", 1), "step and tokens must increase"),
        (lambda text: text.replace("step,", "steps,"), "the first line must be step,tokens"),
        (lambda text: text[: text.index("4.5")], r"line 3: \d values; must be 7|line 3"),
    ],
)
def test_damaged_curves_are_refused(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "a.csv"
    write_curve(path, curve())
    path.write_text(change(path.read_text()))  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        read_curve(path)
