"""All that a job of SLURM consists of is killed in mid-run; the run goes on, with the losses of an undisturbed run.

`make test-soak` runs these: several starts each.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3000)]

Run = Any  # conftest.py
NewRun = Callable[..., Run]

# Two sequence ranks: one node alone cannot go on with it.
SPLIT = "parallel.sequence=2"
# A step between checkpoints.
STEP = 15
# As long as it takes to start a controller again.
AWAY_S = 60.0


def stepd_above(process: psutil.Process) -> psutil.Process:
    (stepd,) = [one for one in process.parents() if one.name().startswith("slurmstepd")]
    return stepd


def wait_for_restart(run: Run, number: int) -> None:
    run.await_(lambda: len(run.events("restart")) >= number)


def test_an_agent_a_node_and_the_controller(new_run: NewRun, undisturbed: NewRun) -> None:
    """One after the other, each between other checkpoints."""
    run = new_run(SPLIT)
    run.slow(STEP)
    (job,) = run.submit("launch.options=['--no-kill']")
    run.wait_for_step(STEP)
    rank = run.processes(RANK="1")[0]
    psutil.Process(rank.ppid()).kill()
    wait_for_restart(run, 1)

    run.wait_for_step(STEP + 10)
    run.cluster.kill("n2")
    # As after a restart of the machine.
    time.sleep(AWAY_S)
    run.cluster.start("n2")
    wait_for_restart(run, 2)

    run.wait_for_step(STEP + 20)
    run.cluster.kill("controller")
    away_s = time.monotonic()
    # The ranks cannot be started again before it is back, so that the run is not done meanwhile.
    run.processes(RANK="1")[0].kill()
    path = str(run.directory.path)
    cancelled = run.command("cancel", path)
    assert cancelled.returncode == 75
    assert f"job {job}: the scheduler does not answer, and the job may wait or run" in cancelled.stderr
    submitted = run.command("submit", "run.toml", SPLIT, "--run", path, "--nodes", "2", "--time", "9")
    assert submitted.returncode == 78, submitted.stderr
    (line,) = json.loads(run.command("runs", path, "--json").stdout)
    assert line["state"] == "running"
    time.sleep(max(0.0, AWAY_S - (time.monotonic() - away_s)))
    run.cluster.start("controller")
    wait_for_restart(run, 3)
    run.speed_up()
    run.wait_finished()
    assert run.trajectory() == undisturbed(SPLIT).trajectory()
    assert [path.name for path in run.directory.logs.glob("slurm-*")] == [f"slurm-{job}.out"]


def test_the_slurmstepd_of_a_chains_job_and_its_launcher(new_run: NewRun, undisturbed: NewRun) -> None:
    """That of the batch script: the script and the launcher live on, and nobody tells SLURM of their end."""
    run = new_run(SPLIT)
    run.slow(STEP)
    jobs = run.submit("--chain", "3")
    run.wait_for_step(STEP)
    stepd_above(run.launcher()).kill()
    run.wait_for_step(STEP + 1)
    run.launcher().kill()
    run.await_(lambda: len(run.events("start")) >= 2)
    run.wait_for_step(STEP + 10)
    # Now the last one, whose launcher ends by itself.
    stepd_above(run.launcher()).kill()
    run.speed_up()
    run.wait_finished()
    assert run.trajectory() == undisturbed(SPLIT).trajectory()
    assert len(run.events("start")) == 2
    assert {path.name for path in run.directory.logs.glob("slurm-*")} == {f"slurm-{job}.out" for job in jobs[:2]}


def test_a_job_that_is_killed_by_cancel_now(new_run: NewRun, undisturbed: NewRun) -> None:
    run = new_run(SPLIT)
    run.slow(STEP)
    jobs = run.submit("--chain", "2")
    run.wait_for_step(STEP)
    cancelled = run.command("cancel", str(run.directory.path), "--now")
    assert cancelled.stdout == f"job {jobs[1]} cancelled before it started\njob {jobs[0]} cancelled\n", cancelled
    run.await_(lambda: not run.cluster.client("squeue", "--noheader").strip())
    (line,) = json.loads(run.command("runs", str(run.directory.path), "--json").stdout)
    assert line["state"] not in ("running", "finished")
    run.speed_up()
    run.submit()
    run.wait_finished()
    assert run.trajectory() == undisturbed(SPLIT).trajectory()
