"""Runs as jobs of a real SLURM: stopped in time, they come back, with the losses of a run that nothing happened to."""

import json
import shlex
import sys
from collections.abc import Callable
from typing import Any

import pytest

# Several starts of several processes, on a machine that may be busy.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

Run = Any  # conftest.py
NewRun = Callable[..., Run]

# Two sequence ranks: one node alone cannot go on with it.
SPLIT = "parallel.sequence=2"
# A step between checkpoints.
STEP = 15


def test_a_run_on_two_nodes_is_the_run_on_one_machine(new_run: NewRun, undisturbed: NewRun) -> None:
    run = new_run(SPLIT)
    (job,) = run.submit()
    run.wait_finished()
    assert run.trajectory() == undisturbed(SPLIT).trajectory()
    assert len(run.trajectory()) == 40
    assert "finished at step 40" in run.output()
    logs = run.directory.logs / "launch-0001"
    assert {"rank-0.out", "rank-1.out", "node-0.json", "node-1.json"} <= {path.name for path in logs.iterdir()}
    shown = run.command("logs", str(run.directory.path), "--follow")
    assert shown.stdout == run.output()
    assert (run.directory.logs / f"slurm-{job}.out").exists()
    again = run.command("submit", "run.toml", SPLIT, "--run", str(run.directory.path), "--nodes", "2", "--time", "9")
    assert (again.returncode, again.stdout) == (0, "")
    assert "is finished: all 40 steps are done" in again.stderr


def test_the_time_limit_saves_and_the_job_goes_on_when_it_is_queued_again(new_run: NewRun, undisturbed: NewRun) -> None:
    run = new_run(SPLIT)
    run.slow(STEP)
    (job,) = run.submit("launch.signal_s=600")
    run.wait_for_step(STEP)
    assert_in_use(run, job)
    # Less than the ten minutes are left.
    run.cluster.client("scontrol", "update", f"JobId={job}", "TimeLimit=8")
    run.wait_stopped("SIGUSR1")
    run.cluster.client("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    run.wait_finished()
    assert run.trajectory() == undisturbed(SPLIT).trajectory()
    assert [event["attempt"] for event in run.events("start")] == [1, 2]
    assert "SIGUSR1: finishing this step, then saving and exiting" in run.output()
    assert run.events("lock_taken_over", "failed") == []


def assert_in_use(run: Run, job: int) -> None:
    """While `job` runs nobody else can have the run."""
    path = str(run.directory.path)
    submitted = run.command("submit", "run.toml", SPLIT, "--run", path, "--nodes", "2", "--time", "9")
    assert submitted.returncode == 78
    assert f"is in use by job {job} RUNNING" in submitted.stderr
    trained = run.command("train", "run.toml", SPLIT, "--run", path, "--processes", "2")
    assert trained.returncode == 78
    assert f"of job {job}, since" in trained.stderr
    (line,) = json.loads(run.command("runs", path, "--json").stdout)
    assert (line["state"], line["job"]) == ("running", f"{job} RUNNING")
    assert line["step"] >= STEP


def test_a_preempted_job_saves_within_the_grace_time_and_comes_back(new_run: NewRun, undisturbed: NewRun) -> None:
    run = new_run(SPLIT)
    run.slow(STEP)
    (job,) = run.submit("--partition", "low")
    run.wait_for_step(STEP)
    other = "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    run.cluster.client("sbatch", *other)
    run.wait_stopped("SIGTERM")
    run.wait_finished()
    assert run.trajectory() == undisturbed(SPLIT).trajectory()
    assert [event["attempt"] for event in run.events("start")] == [1, 2]
    assert run.directory.jobs.read_text().count("\n") == 1, f"job {job} itself came back"


def test_a_chain_goes_on_with_the_next_job_and_ends_with_the_run(new_run: NewRun, undisturbed: NewRun) -> None:
    run = new_run(SPLIT)
    run.slow(STEP)
    jobs = run.submit("--chain", "4")
    assert len(jobs) == 4
    run.wait_for_step(STEP)
    # As before the time limit.
    run.cluster.client("scancel", "--batch", "--signal=USR1", str(jobs[0]))
    run.wait_stopped("SIGUSR1")
    run.wait_finished()
    assert run.trajectory() == undisturbed(SPLIT).trajectory()
    states = run.cluster.client("squeue", "--noheader", "--states=all", "--format=%A %T").splitlines()
    ended = {int(number): state for number, state in map(str.split, states)}
    assert [ended[job] for job in jobs] == ["FAILED", "COMPLETED", "CANCELLED", "CANCELLED"]
    assert run.output().count("resumable at step") == 1
    assert max(run.trajectory()) == 40, "not one step beyond"


def test_a_cancelled_job_saves_and_is_not_queued_again(new_run: NewRun, undisturbed: NewRun) -> None:
    run = new_run(SPLIT)
    run.slow(STEP)
    (job,) = run.submit()
    run.wait_for_step(STEP)
    cancelled = run.command("cancel", str(run.directory.path))
    assert cancelled.stdout == f"job {job} saves and exits\n", cancelled.stderr
    run.wait_stopped("SIGUSR1")
    run.await_(lambda: not run.cluster.client("squeue", "--noheader").strip())
    status = run.directory.read_status()
    assert (status.status, status.reason) == ("resumable", "stopped by SIGUSR1")
    assert f"{job} COMPLETED" in run.cluster.client("squeue", "--noheader", "--states=all", "--format=%A %T")
    run.submit()
    run.wait_finished()
    assert run.trajectory() == undisturbed(SPLIT).trajectory()


def test_ranks_by_srun_alone(new_run: NewRun, undisturbed: NewRun) -> None:
    run = new_run(SPLIT)
    words = run.rank_command()
    # The nodes' names are no names of hosts here.
    environment = "--export=ALL,MASTER_ADDR=127.0.0.1"
    options = "--nodes=2", "--ntasks-per-node=1", environment, f"--chdir={run.folder}"
    run.cluster.client("srun", *options, *words)
    assert run.trajectory() == undisturbed(SPLIT).trajectory()
    (start,) = run.events("start")
    assert start["world_size"] == 2


def test_the_doctor_by_srun(new_run: NewRun) -> None:
    """It sees both nodes together, by the names that SLURM has for them."""
    run = new_run(SPLIT)
    runs = run.folder / "runs"
    runs.mkdir(exist_ok=True)
    environment = "--export=ALL,MASTER_ADDR=127.0.0.1,CUDA_VISIBLE_DEVICES="
    options = "--nodes=2", "--ntasks-per-node=1", environment, f"--chdir={run.folder}"

    def doctor(*before: str) -> dict[str, Any]:
        command = [sys.executable, "-P", "-m", "lightscale", "doctor", "run.toml", SPLIT, "--json"]
        said = run.cluster.client("srun", *options, *before, *command, check=False)
        report: dict[str, Any] = json.loads(said)
        report["findings"] = {result["check"]: result for result in report["findings"]}
        return report

    report = doctor()
    assert report["hosts"] == ["n1", "n2"]
    checks = "GPUs", "versions", "apex", "all alike", "clocks", "shared directory", "disk"
    assert {name: report["findings"][name]["result"] for name in checks} == dict.fromkeys(checks, "ok")
    # How fast two nodes on the cores of one machine are is for other tests.
    assert {"matrix product", "exchange of pairs", "all-reduce"} <= report["findings"].keys()

    alone = f'[ "$SLURM_PROCID" = 0 ] || mount -t tmpfs none {shlex.quote(str(runs))}; exec "$@"'
    report = doctor("unshare", "--mount", "sh", "-c", alone, "sh")
    assert report["exit_code"] == 78
    shared = report["findings"]["shared directory"]
    assert shared["result"] == "failed"
    assert shared["ranks"] == [1]
    # One of two: whose is wrong nobody knows. A node that was slow, on a busy machine, may be excluded all the same.
    assert not shared["blames_host"]
