"""Studies whose cells are jobs of a real SLURM: the command is killed, the jobs go on, and so does the next command."""

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
from lightscale.study.search.records import SearchRecords
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
SEARCH = f"""
[base]
extends = "{SMALL_RUN}"
optimizer = {{ schedule = "cosine", warmup_steps = 2 }}
train.steps = 20
[search]
method = "successive_halving"
trials = 3
reduction_factor = 3
rungs = [8]
[search.parameters]
"optimizer.lr" = {{ min = 1e-3, max = 1e-2, log = true }}
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
    study = killed_and_continued(study_run, "little.toml")
    cells = study.cells()
    assert all(study.finished_record(cell) is not None for cell in cells)
    # Nobody submitted a cell twice.
    assert [len(jobs_of(study)(cell)) for cell in cells] == [1] * len(cells) == [1] * 4
    here = Study(Path("little.toml"), Path("alone"))
    for cell in cells:
        mine, other = study.curve(cell), here.curve(cell)
        assert mine is not None and other is not None
        assert list(mine.loss) == list(other.loss)


def test_each_rung_of_a_search_is_a_job(study_run: Run) -> None:
    Path("search.toml").write_text(SEARCH)
    alone = study_run.command("study", "run", "search.toml", "--dir", "search-alone", "--json")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    study = killed_and_continued(study_run, "search.toml")
    records = [SearchRecords(path / "search.jsonl") for path in (study.path, Path("search-alone"))]
    assert records[0].scores == records[1].scores
    assert records[0].decisions == records[1].decisions and len(records[0].decisions) == 1
    assert sorted(len(jobs_of(study)(cell)) for cell in study.cells()) == [1, 1, 2]


def killed_and_continued(study_run: Run, file: str) -> Study:
    """The study of `file` through SLURM: its command is killed with all first jobs submitted, and given again."""
    study = Study(Path(file), Path(f"{file}-through-slurm"))
    command = ["study", "run", file, "--dir", str(study.path), *SLURM]
    first = subprocess.Popen(
        [sys.executable, "-P", "-m", "lightscale", *command],
        env={**study_run.cluster.environment, "CUDA_VISIBLE_DEVICES": "", "XDG_CONFIG_HOME": str(study.path / "none")},
        cwd=study_run.folder,
        stdout=subprocess.DEVNULL,
    )
    study_run.await_(lambda: first.poll() is not None or all(map(jobs_of(study), study.cells())))
    assert first.poll() is None
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    again = study_run.command(*command)
    assert again.returncode == 0, again.stdout + again.stderr
    outcome = json.loads(again.stdout)
    assert not outcome["failed"] and not outcome["left"]
    return study


def jobs_of(study: Study) -> Callable[[Cell], list[Any]]:
    return lambda cell: recorded_jobs(study.run(cell))
