"""Ranks that a real MPI starts are the ranks of the launcher."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics

MPIEXEC = Path(sys.executable).with_name("mpiexec")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ranks_by_mpiexec(
    workplace: Path,
    whole: tuple[RunDirectory, Any],
    steps_of: Callable[[list[dict[str, Any]]], dict[int, tuple[Any, ...]]],
    needs: Callable[..., None],
) -> None:
    needs("mpiexec")
    mpiexec = str(MPIEXEC) if MPIEXEC.exists() else "mpiexec"
    words = ["train", "run.toml", "parallel.sequence=2", "--run", "runs/mpi"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
    command = [mpiexec, "-n", "2", sys.executable, "-m", "lightscale", *words]
    done = subprocess.run(
        command, cwd=workplace, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    run = RunDirectory(workplace / "runs/mpi")
    (start,) = [event for event in read_lines(run.events) if event["event"] == "start"]
    assert start["world_size"] == 2
    assert steps_of(read_metrics(run.metrics)) == steps_of(read_metrics(whole[0].metrics))
