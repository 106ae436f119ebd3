"""A real run as jobs of this machine's queue, by the commands."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.launch.local.queue import Queue
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics
from lightscale.training.health.fault_injection import fault_file

# Several starts of real runs, on a machine that may be busy.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 300.0
RUN = f"""
extends = ["{ROOT}/tests/helpers/small-run.toml"]

[train]
steps = 40

[checkpoint]
every = 10
"""


def trajectory(run: RunDirectory) -> dict[int, tuple[Any, ...]]:
    """Step to what must be the same, bit by bit."""
    return {line["step"]: (line["tokens"], line["loss"], line["grad_norm"]) for line in read_metrics(run.metrics)}


def await_(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


def test_the_time_limit_saves_and_the_job_comes_back_with_the_same_losses(
    tmp_path: Path, write_store: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_store(tmp_path / "store", 300, text=np.random.default_rng(0).integers(1, 300, 20000))
    (tmp_path / "run.toml").write_text(RUN)
    faults = tmp_path / "faults"
    faults.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "LIGHTSCALE_FAULT": f"@{faults}",
        "XDG_CONFIG_HOME": str(tmp_path / "no-settings"),
    }

    def command(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "lightscale", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run, undisturbed = RunDirectory(tmp_path / "runs/run"), RunDirectory(tmp_path / "runs/undisturbed")
    # From the 15th step on each takes five seconds.
    fault_file(faults, 0).write_text("slow=5@step:begin#15")
    assert command("submit", "run.toml", "--scheduler", "local", "--time", "2:00:00") == "job 1 in runs/run\n"
    await_(lambda: run.progress()[0] >= 15)
    (line,) = json.loads(command("runs", str(run.path), "--json"))
    assert (line["state"], line["job"]) == ("running", "1 RUNNING")
    # The time limit comes within `signal_s`.
    queue = Queue()
    with queue.locked():
        job = queue.job(1)
        assert job is not None
        queue.write(job.model_copy(update={"signal_s": 7200}))
    log = run.logs / "local-1.out"
    await_(lambda: "resumable at step" in log.read_text())
    with queue.locked():
        again = queue.job(1)
        assert again is not None
        queue.write(again.model_copy(update={"signal_s": 300}))
    fault_file(faults, 0).unlink()
    await_(lambda: (status := run.read_status()) is not None and status.status == "finished")
    await_(lambda: (job := queue.job(1)) is not None and job.phase == "ended")
    assert command("logs", str(run.path), "--follow") == log.read_text()
    assert "finished at step 40" in log.read_text()
    assert "has no waiting or running job" in command("cancel", str(run.path))
    command("train", "run.toml", "--run", str(undisturbed.path), "--processes", "1")
    assert trajectory(run) == trajectory(undisturbed)
    assert len(trajectory(run)) == 40
    events = read_lines(run.events)
    assert [event["attempt"] for event in events if event["event"] == "start"] == [1, 2]
    assert not [event for event in events if event["event"] in ("failed", "lock_taken_over")]
