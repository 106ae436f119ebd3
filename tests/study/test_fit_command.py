"""`lightscale study fit --points`: published points in, constants with intervals out; and files that it refuses."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lightscale.cli import main
from lightscale.study.fits.parametric import CONSTANTS
from tests.study.fits.surfaces import HOFFMANN, points


def write(path: Path, *, columns: str = "N,D,loss", noise: float = 0.0) -> Path:
    simulated = points(HOFFMANN, np.random.default_rng(0), noise=noise)
    lines = [columns]
    for size, tokens, loss in zip(simulated.parameters, simulated.tokens, simulated.loss, strict=True):
        values = {"N": size, "D": tokens, "C": 6 * size * tokens, "loss": loss, "run": f"n{size:.0f}"}
        lines.append(",".join(str(values[name]) for name in columns.split(",")))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("columns", ["N,D,loss", "loss,C,N"])
def test_constants_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], columns: str) -> None:
    file = write(tmp_path / "points.csv", columns=columns, noise=0.001)
    assert main(["study", "fit", "--points", str(file), "--draws", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: found[name]["value"] for name in CONSTANTS} == pytest.approx(HOFFMANN.constants(), rel=0.15)
    for name in CONSTANTS:
        assert found[name]["low"] <= found[name]["value"] <= found[name]["high"]
    assert (found["num_points"], found["num_runs"]) == (64, 64)
    assert found["a"]["value"] == pytest.approx(HOFFMANN.optimal_exponents()[0], abs=0.02)


def test_points_of_one_run_are_drawn_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "points.csv", columns="N,D,loss,run", noise=0.001)
    assert main(["study", "fit", "--points", str(file), "--draws", "5"]) == 0
    output = capsys.readouterr().out
    assert "64 points of 8 runs" in output
    assert "loss = E + A / N^alpha + B / D^beta" in output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("N,loss\n1,2\n", r"columns N, loss; it needs N \(parameters\)"),
        ("", "columns none"),
        ("N,D,loss\n1e6,1e9,3\n1e6,many,3\n", "line 3: D = 'many'; must be a number above 0"),
        ("N,D,loss\n1e6,1e9,-3\n", "line 2: loss = '-3'"),
        ("N,D,loss\n1e6,1e9\n", "line 2: loss = None"),
        ("N,D,loss\n1e6,inf,3\n", "line 2: D = 'inf'"),
        ('N,D,loss\n1e6,"1e9,3\n', "not CSV"),
        ("N,D,loss\n1e6,1e9,3\n", "needs 3 different N, and there are 1"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    file = tmp_path / "points.csv"
    file.write_text(text)
    assert main(["study", "fit", "--points", str(file)]) == 78
    assert re.search(message, capsys.readouterr().err)


def test_what_is_no_file_of_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    for name, message in [("missing.csv", "no such file"), ("binary.csv", "not UTF-8 text"), (".", "a directory")]:
        assert main(["study", "fit", "--points", str(tmp_path / name)]) == 78
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("--draws", "1"), ("--draws", "1000000000"), ("--seed", "-1")])
def test_options_out_of_range(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    file = write(tmp_path / "points.csv")
    assert main(["study", "fit", "--points", str(file), option, value]) == 78
    assert f"{option} {value}: must be" in capsys.readouterr().err
