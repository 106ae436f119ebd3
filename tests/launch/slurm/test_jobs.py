"""Runs as jobs of a real SLURM: whatever happens, they come back, with the losses of a run that nothing happened to."""

import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Callable
from typing import Any

import psutil
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
    wait_stopped(run, "SIGUSR1")
    run.cluster.client("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    run.speed_up()
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


def wait_stopped(run: Run, reason: str) -> None:
    run.await_(lambda: f"stopped by {reason}\n" in run.output() and "resumable at step" in run.output())


def test_a_preempted_job_saves_within_the_grace_time_and_comes_back(new_run: NewRun, undisturbed: NewRun) -> None:
    run = new_run(SPLIT)
    run.slow(STEP)
    (job,) = run.submit("--partition", "low")
    run.wait_for_step(STEP)
    other = "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    run.cluster.client("sbatch", *other)
    wait_stopped(run, "SIGTERM")
    run.speed_up()
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
    wait_stopped(run, "SIGUSR1")
    run.speed_up()
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
    run.await_(lambda: not run.cluster.client("squeue", "--noheader").strip())
    status = run.directory.read_status()
    assert (status.status, status.reason) == ("resumable", "stopped by SIGUSR1")
    assert f"{job} COMPLETED" in run.cluster.client("squeue", "--noheader", "--states=all", "--format=%A %T")
    run.speed_up()
    run.submit()
    run.wait_finished()
    assert run.trajectory() == undisturbed(SPLIT).trajectory()


def test_what_dies_or_hangs_on_the_second_node_is_named_and_started_again(new_run: NewRun, undisturbed: NewRun) -> None:
    """One after the other in one job: a rank is killed, a rank is stopped, a slurmstepd is killed."""
    run = new_run(SPLIT, "restart.hang_timeout_s=20.0")
    run.slow(STEP)
    run.submit()
    for number, victim in enumerate(("rank", "rank stopped", "slurmstepd")):
        # Each start is slow from its own step on, and begins at the last checkpoint before that.
        run.wait_for_step(STEP + 10 * number)
        rank = processes_of(run, RANK="1")[0]
        if victim == "slurmstepd":
            agent = psutil.Process(rank.ppid())
            step = psutil.Process(agent.ppid())
            assert "slurmstepd" in step.name()
            step.send_signal(signal.SIGKILL)
        else:
            rank.send_signal(signal.SIGKILL if victim == "rank" else signal.SIGSTOP)
        run.await_(lambda before=number: len(run.events("restart")) > before)
    run.speed_up()
    run.wait_finished()
    assert run.trajectory() == undisturbed(SPLIT).trajectory()
    assert [restart["checkpoint"] for restart in run.events("restart")] == [10, 20, 30]
    killed, stopped, lost = run.events("failed")
    assert "n2" in lost["reason"]
    for failed, named in ((killed, "killed by SIGKILL"), (stopped, "stopped by a signal")):
        assert failed["rank"] == 1
        assert named in failed["reason"]
        assert failed["ranks"]["0"]["step"] >= STEP
    assert len(run.events("start")) == 4


def processes_of(run: Run, **variables: str) -> list[psutil.Process]:
    """Those of the run's jobs that have `variables`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            is_ours = environment.get("SLURM_CONF") == run.cluster.environment["SLURM_CONF"]
            if is_ours and all(environment.get(name) == value for name, value in variables.items()):
                found.append(process)
    return found


def launcher_of(run: Run) -> psutil.Process:
    processes = processes_of(run, SLURM_PROCID="0")
    (launcher,) = [process for process in processes if {"train", "--scheduler"} <= words(process)]
    return launcher


def words(process: psutil.Process) -> set[str]:
    with contextlib.suppress(psutil.Error):
        return set(process.cmdline())
    return set()


def test_a_job_whose_launcher_is_killed_comes_back_after_progress(new_run: NewRun, undisturbed: NewRun) -> None:
    run = new_run(SPLIT)
    # Before the first checkpoint.
    run.slow(STEP // 3)
    (first,) = run.submit()
    run.wait_for_step(STEP // 3)
    launcher_of(run).kill()
    run.await_(lambda: not run.cluster.client("squeue", "--noheader").strip())
    run.slow(STEP)
    (second,) = run.submit()
    run.wait_for_step(STEP)
    launcher = launcher_of(run)
    launcher.kill()
    run.wait_for_event("resume")
    run.speed_up()
    run.wait_finished()
    assert run.trajectory() == undisturbed(SPLIT).trajectory()
    assert [event["attempt"] for event in run.events("start")] == [1, 2, 3]
    before, after = run.events("lock_taken_over")
    assert before["from_job"] == str(first)
    assert (after["from_process"], after["from_job"]) == (launcher.pid, str(second))
    states = run.cluster.client("squeue", "--noheader", "--states=all", "--format=%A %T").splitlines()
    assert f"{first} FAILED" in states


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_failed_node_is_replaced(new_run: NewRun, undisturbed: NewRun, node: str) -> None:
    """n1 is that of the batch script."""
    run = new_run(SPLIT)
    run.slow(STEP)
    (job,) = run.submit()
    run.wait_for_step(STEP)
    run.cluster.client("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    run.speed_up()
    # It may have come back by itself.
    run.cluster.try_client("scontrol", "update", f"nodename={node}", "state=resume")
    run.wait_finished()
    assert run.trajectory() == undisturbed(SPLIT).trajectory()
    assert [event["world_size"] for event in run.events("start")] == [2, 2]
    assert [path.name for path in run.directory.logs.glob("slurm-*")] == [f"slurm-{job}.out"]


@pytest.mark.parametrize("words", [(), (SPLIT,)])
def test_a_chain_goes_on_with_the_nodes_that_are_left_or_the_next_job(
    new_run: NewRun, undisturbed: NewRun, words: tuple[str, ...]
) -> None:
    run = new_run(*words)
    run.slow(STEP)
    jobs = run.submit("--chain", "2")
    run.wait_for_step(STEP)
    run.cluster.client("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    restart = run.wait_for_event("restart")
    run.speed_up()
    run.cluster.try_client("scontrol", "update", "nodename=n2", "state=resume")
    run.wait_finished()
    assert restart["reason"].startswith("rank 1: node n2 failed")
    losses, expected = run.trajectory(), undisturbed(*words).trajectory()
    if words:
        assert losses == expected
        assert f"1 of the 2 nodes of job {jobs[0]} are up" in run.output()
        return
    assert [event["world_size"] for event in run.events("start")] == [2, 1]
    assert {step: losses[step] for step in range(1, 11)} == {step: expected[step] for step in range(1, 11)}
    for step in range(11, 41):
        # Another sum over the same sequences.
        assert losses[step][1] == pytest.approx(expected[step][1], rel=1e-5)


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
    # One of two: whose is wrong nobody knows.
    assert report["exclude"] == []
