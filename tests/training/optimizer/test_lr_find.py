"""`lightscale lr-find` on two sequence ranks; the three rates of curves whose shape is known."""

import argparse
import json
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.runs.run_directory import LineWriter, RunDirectory, read_lines
from lightscale.study.commands import lr_find
from lightscale.study.range_test import read_range_test

HELPERS = Path(__file__).parents[2] / "helpers"
warm_commands = SimpleNamespace(**runpy.run_path(str(HELPERS / "warm_commands.py")))
RATES = np.geomspace(1e-5, 1.0, 101)


def recorded(folder: Path, losses: NDArray[np.float64], *, unlabelled: int | None = None) -> RunDirectory:
    """A run whose steps had ``losses`` at ``RATES``; one, ``unlabelled``, may have had no label to predict."""
    run = RunDirectory(folder)
    folder.mkdir()
    lines = LineWriter(run.metrics)
    for step, (rate, loss) in enumerate(zip(RATES, losses, strict=True), start=1):
        number = float(loss) if np.isfinite(loss) else None
        skipped = {"loss": 0.0, "skipped": "its data has no label to predict"} if step == unlabelled else {}
        lines.write({"step": step, "attempt": 1, "loss": number, "lr": float(rate), "step_s": 0.1, **skipped})
    lines.close()
    return run


def curve(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Falls fastest at 1e-2.5 and has its minimum at 1e-1.5."""
    x = np.log10(rates)
    return np.where(x < -1.5, 6.0 + np.cos(np.clip(np.pi * (x + 3.5) / 2, 0, np.pi)), 5.0 + (x + 1.5) ** 2)


@pytest.mark.parametrize("ends", ["in numbers", "in nan", "with a leap"])
def test_rates_of_a_known_curve(tmp_path: Path, ends: str) -> None:
    losses = curve(RATES)
    if ends == "in nan":
        losses[75:] = np.nan
    if ends == "with a leap":
        losses[50] = 3.0
    found = read_range_test(recorded(tmp_path / "run", losses))
    assert len(found.rates) == len(found.losses) == len(found.smoothed) == (75 if ends == "in nan" else 101)
    assert found.has_diverged == (ends == "in nan")
    # Medians of 5 steps on either side, of 20 steps a decade.
    assert np.log10(found.lowest) == pytest.approx(-1.5, abs=0.26)
    assert np.log10(found.steepest) == pytest.approx(-2.5, abs=0.26)
    assert found.suggested == found.lowest / 10
    assert found.fault is None


def test_a_step_without_labels_has_no_loss(tmp_path: Path) -> None:
    # At the end a median is of few steps.
    found = read_range_test(recorded(tmp_path / "run", curve(RATES), unlabelled=101))
    assert (len(found.rates), found.losses.min() > 4.9, found.has_diverged) == (100, True, False)


@pytest.mark.parametrize(
    ("losses", "fault"),
    [
        (np.linspace(6.0, 5.0, 101), "the loss does not rise before the last rate; choose a higher --to"),
        (np.linspace(6.0, 9.0, 101), "the loss never falls; choose a lower --from, or more --steps"),
    ],
)
def test_a_range_that_shows_nothing_suggests_nothing(tmp_path: Path, losses: NDArray[np.float64], fault: str) -> None:
    found = read_range_test(recorded(tmp_path / "run", losses))
    assert (found.fault, found.suggested) == (fault, None)


@pytest.mark.long
def test_a_test_on_two_ranks_has_the_rates_and_its_run_has_the_losses(workplace: Path) -> None:
    words = ["lr-find", "run.toml", "--from", "1e-4", "--to", "1e2", "--steps", "13", "--json"]
    words += ["parallel.sequence=2", "--processes", "2", "--plot", "range.svg"]
    results = []
    for _ in range(2):
        command = warm_commands.Command(words, cwd=workplace)
        stdout, stderr = command.communicate(timeout=200)
        assert command.returncode == 0, stderr
        results.append(json.loads(stdout))
    # The second finds the first one's run.
    assert results[0] == results[1]
    found: dict[str, Any] = results[0]
    run = RunDirectory(workplace / found["run"])
    assert found["run"] == "runs/run-lr-find"
    assert found["rates"] == pytest.approx(np.geomspace(1e-4, 1e2, 13)[: len(found["rates"])], rel=1e-12)
    losses = [line.get("loss") for line in read_lines(run.metrics) if "lr" in line]
    assert found["losses"] == losses[: len(found["losses"])]
    # A rate of 100 leaves no model of words.
    assert found["has_diverged"] or found["losses"][-1] > found["losses"][0]
    assert len(losses) == 13
    assert "</svg>" in (workplace / "range.svg").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.lr=1"], "optimizer.lr=1: lr-find sets optimizer.lr by --to; remove it"),
        (["guard.enabled=true"], "guard.enabled=true: lr-find sets guard.enabled; remove it"),
        (["--from", "1"], "--from 1 --to 1: must grow, from above 0"),
        (["--steps", "9"], "--steps 9: must be at least 10"),
        (["--to", "1000"], "optimizer.lr"),
        (["--plot", "a.gif"], "--plot a.gif: a picture has the suffix .png, .svg, .pdf"),
        (
            ["train.branch_from=runs/parent@4"],
            "and a branch begins behind it; test the weights with train.branch_from=none train.init_from=runs/parent@4",
        ),
    ],
)
def test_wrong_use_is_refused_before_a_run_is_there(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    run = tmp_path / "run"
    assert (
        main(["lr-find", str(workplace / "run.toml"), f"data.store={workplace}/store", *words, "--run", str(run)]) != 0
    )
    assert message in capsys.readouterr().err
    assert not run.exists()


def test_another_run_is_not_continued(workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(workplace / "run.toml", tmp_path / "config.toml")
    assert main(["lr-find", str(workplace / "run.toml"), "--run", str(tmp_path)]) == 2
    assert f"--run {tmp_path}: the directory holds another run" in capsys.readouterr().err


def test_another_test_is_not_continued(workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training's own message would offer --allow-change, which lr-find does not have."""
    words = ["lr-find", str(workplace / "run.toml"), f"data.store={workplace}/store", "--run", str(tmp_path / "run")]
    parser = argparse.ArgumentParser()
    lr_find.add_arguments(parser)
    overrides = lr_find._overrides(parser.parse_args(words[1:]))
    RunDirectory(tmp_path / "run").create(load(workplace / "run.toml", overrides))
    assert main([*words, "--to", "0.5"]) == 2
    message = capsys.readouterr().err
    assert f"--run {tmp_path / 'run'}: the directory holds another test (" in message
    assert "optimizer.lr = 1.0 there, 0.5 here" in message
    assert "--allow-change" not in message
