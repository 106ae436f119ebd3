"""A small search, really trained: killed, started again, and beside one that was not. Three minutes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from lightscale.cli import main
from lightscale.runs.run_directory import read_lines
from lightscale.study.search.records import SearchRecords
from lightscale.study.study import Study
from tests.study.studies import SMALL, write_store, write_study

SEARCH = """
[search]
method = "successive_halving"
trials = 5
reduction_factor = 2
rungs = [6, 12]
metric = "validation.text"
[search.parameters]
"optimizer.lr" = { min = 1e-3, max = 1e-1, log = true }
"""
TIMEOUT_S = 500.0


def base() -> str:
    # A schedule that depends on the length of the whole run at each step.
    text = SMALL.replace('"constant"', '"cosine"').replace("steps = 40", "steps = 24, validate_every = 24")
    return text + '[base.data.validation.text]\nsource = "text"\nsequences = 8\n'


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lightscale", "study", "run", "tiny.toml", *more]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_search_is_killed_and_decides_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    # As many threads in jobs as here: another number sums in another order.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_store(tmp_path / "store")
    file = write_study(tmp_path, SEARCH, base=base())
    study = Study(file, tmp_path / "killed")
    first = start(tmp_path, "--dir", "killed", "--jobs", "2")
    deadline_s = time.monotonic() + TIMEOUT_S
    # Some scores of the first rung are there, others are not.
    while not SearchRecords(study.path / "search.jsonl").scores:
        assert first.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    second = start(tmp_path, "--dir", "killed", "--jobs", "2", "--json")
    output, _ = second.communicate(timeout=TIMEOUT_S)
    assert second.returncode == 0, output
    outcome = json.loads(output)
    assert (len(outcome["finished"]), len(outcome["stopped"]), outcome["failed"], outcome["left"]) == (1, 4, {}, [])
    # Never killed, as jobs of a queue.
    assert main(["study", "run", "tiny.toml", "--dir", "whole", "--scheduler", "local", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == outcome | {"study": "whole"}
    records = [SearchRecords(tmp_path / name / "search.jsonl") for name in ("killed", "whole")]
    assert records[0].decisions == records[1].decisions and len(records[0].decisions) == 2
    assert records[0].scores == records[1].scores
    assert Counter(step for _, step in records[0].scores) == {6: 5, 12: 2, 24: 1}
    for cell in study.cells():
        # No step twice.
        steps = [line["step"] for line in read_lines(study.run(cell).metrics) if "step_s" in line]
        assert steps == list(range(1, (cell.until or 0) + 1)), cell.name
    # The winner is the run that was never stopped, bit for bit.
    (winner,) = (cell for cell in study.cells() if cell.stopped is None)
    assert main(["train", str(study.run(winner).config), "--run", "alone", "--processes", "1"]) == 0
    found = [read_lines(path / "metrics.jsonl") for path in (study.run(winner).path, tmp_path / "alone")]
    losses = [{line["step"]: (line["loss"], line["lr"]) for line in lines if "loss" in line} for lines in found]
    assert losses[0] == losses[1] and len(losses[0]) == 24
    capsys.readouterr()
    assert main(["study", "search", "tiny.toml", "--dir", "killed", "--plot", "search.png"]) == 0
    assert f"best trial: {winner.name}" in capsys.readouterr().out
