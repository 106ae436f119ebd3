"""Two architectures at three sizes, really trained: killed, started again, fitted and reported. Two minutes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightscale.cli import main
from lightscale.launch.commands.runs import is_running
from lightscale.study.study import Study
from tests.study.studies import TINY, write_store, write_study

SWEEP = """
[sweep]
key = "optimizer.lr"
values = [3e-3, 1e-2]
per = []
at = { architecture = "llama", size = "small" }
set.train.steps = 20
[fit]
draws = 10
"""
LIGHTSCALE = [sys.executable, "-m", "lightscale"]
TIMEOUT_S = 500.0


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [*LIGHTSCALE, "study", "run", "tiny.toml", "--jobs", "2", *more]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)


def wait_for(what: str, is_there: object, timeout_s: float = TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_there():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, f"no {what} after {timeout_s} s"
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_study_is_killed_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_store(tmp_path / "store")
    study = Study(write_study(tmp_path, TINY + SWEEP))
    cells = {cell.name: cell for cell in study.cells()}
    first = start(tmp_path)
    # The sweep has chosen, and the first of the others trains.
    wait_for("cell", lambda: first.poll() is not None or study.run(cells["tnl-small"]).metrics.exists())
    assert first.poll() is None
    first.kill()
    first.wait()
    # What it had started goes on; a second start of it would be refused and fail.
    assert any(is_running(study.run(cell)) for cell in study.cells())
    second = start(tmp_path)
    assert second.stdout is not None
    # It has the lock, and takes signals.
    assert any(line.endswith(": started\n") for line in second.stdout)
    assert (study.path / "lock").read_text().strip() == str(second.pid)
    # As Ctrl-C does.
    second.send_signal(signal.SIGINT)
    output, _ = second.communicate(timeout=TIMEOUT_S)
    assert second.returncode == 75, output
    assert not any(is_running(study.run(cell)) for cell in study.cells())
    third = start(tmp_path, "--json")
    output, _ = third.communicate(timeout=TIMEOUT_S)
    assert third.returncode == 0, output
    assert json.loads(output)["finished"] == sorted(cells)
    for cell in study.cells():
        curve = study.curve(cell)
        assert curve is not None and curve.step[-1] == cell.config.total_steps
        assert curve.smoothed[-1] < curve.smoothed[0]
    assert main(["study", "fit", "tiny.toml", "--json"]) == 0
    assert {one["architecture"] for one in json.loads(capsys.readouterr().out)["laws"]} == {"tnl", "llama"}
    assert main(["study", "report", "tiny.toml"]) == 0
    assert Path("studies/tiny/report.html").stat().st_size > 100_000
    # Curves are enough: runs need not be kept.
    Path("studies/tiny/runs").rename("elsewhere")
    assert main(["study", "run", "tiny.toml", "--json"]) == 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_cells_are_jobs_of_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    write_store(tmp_path / "store")
    write_study(tmp_path)
    assert main(["study", "run", "tiny.toml", "--only", "tnl-small", "--scheduler", "local", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"] == ["tnl-small"]
    assert (tmp_path / "studies" / "tiny" / "runs" / "tnl-small" / "jobs.jsonl").exists()
