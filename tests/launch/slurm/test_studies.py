"""A study whose cells are jobs of a real SLURM: its command is killed, the jobs go on, and so does the next command."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.runs.jobs import recorded_jobs
from lightscale.study.cells import Cell
from lightscale.study.study import Study

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

Run = Any  # conftest.py
TIMEOUT_S = 600.0
SMALL_RUN = Path(__file__).resolve().parents[2] / "helpers" / "small-run.toml"
STUDY = f"""
[base]
extends = "{SMALL_RUN}"
optimizer = {{ schedule = "constant", warmup_steps = 2 }}
train.steps = 20
[axes.size]
small = {{ model = {{ num_layers = 1 }} }}
large = {{ model = {{ num_layers = 2 }} }}
[axes]
"optimizer.lr" = [1e-3, 3e-3]
"""
SLURM = ("--scheduler", "slurm", "--time", "30", "--json")


@pytest.fixture
def study_run(new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> Run:
    """For its commands on the cluster, beside `little.toml`; the study is looked at from its folder."""
    run = new_run()
    monkeypatch.chdir(run.folder)
    (run.folder / "little.toml").write_text(STUDY)
    return run


def test_the_jobs_of_a_killed_study_go_on(study_run: Run) -> None:
    alone = study_run.command("study", "run", "little.toml", "--dir", "alone", "--json")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    study = Study(Path("little.toml"), Path("through-slurm"))
    command = ["study", "run", "little.toml", "--dir", str(study.path), *SLURM]
    first = subprocess.Popen(
        [sys.executable, "-P", "-m", "lightscale", *command],
        env={**study_run.cluster.environment, "CUDA_VISIBLE_DEVICES": "", "XDG_CONFIG_HOME": str(study.path / "none")},
        cwd=study_run.folder,
        stdout=subprocess.DEVNULL,
    )
    cells = study.cells()
    study_run.await_(lambda: first.poll() is not None or all(map(jobs_of(study), cells)))
    assert first.poll() is None
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    again = study_run.command(*command)
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads(again.stdout)["finished"] == sorted(cell.name for cell in cells)
    # Nobody submitted a cell twice.
    assert [len(jobs_of(study)(cell)) for cell in cells] == [1] * len(cells) == [1] * 4
    here = Study(Path("little.toml"), Path("alone"))
    for cell in cells:
        mine, other = study.curve(cell), here.curve(cell)
        assert mine is not None and other is not None
        assert list(mine.loss) == list(other.loss)


def jobs_of(study: Study) -> Callable[[Cell], list[Any]]:
    return lambda cell: recorded_jobs(study.run(cell))
