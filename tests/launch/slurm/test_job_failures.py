"""Jobs of a real SLURM whose processes and nodes fail: they come back, with the losses of an undisturbed run."""

import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "drawing.py")))
# Several starts of several processes, on a machine that may be busy.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

Run = Any  # conftest.py
NewRun = Callable[..., Run]

# Two sequence ranks: one node alone cannot go on with it.
SPLIT = "parallel.sequence=2"
# A step between checkpoints.
STEP = 15


def test_what_dies_or_hangs_on_the_second_node_is_named_and_started_again(new_run: NewRun, undisturbed: NewRun) -> None:
    """One after the other in one job: a rank is killed, a rank is stopped, a slurmstepd is killed."""
    run = new_run(SPLIT, "restart.hang_timeout_s=15.0")
    # Less than a rank may be silent.
    run.slow(STEP, 8.0)
    run.submit()
    for number, victim in enumerate(("rank", "rank stopped", "slurmstepd")):
        # Each start is slow from its own step on, and begins at the last checkpoint before that.
        run.wait_for_step(STEP + 10 * number)
        rank = run.processes(RANK="1")[0]
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


def test_a_job_whose_launcher_is_killed_comes_back_after_progress(new_run: NewRun, undisturbed: NewRun) -> None:
    run = new_run(SPLIT)
    # Before the first checkpoint.
    run.slow(STEP // 3)
    (first,) = run.submit()
    run.wait_for_step(STEP // 3)
    run.launcher().kill()
    run.await_(lambda: not run.cluster.client("squeue", "--noheader").strip())
    run.slow(STEP)
    (second,) = run.submit()
    run.wait_for_step(STEP)
    launcher = run.launcher()
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


@pytest.mark.parametrize("node", drawing.some("failed node", ["n1", "n2"], 1))
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


@pytest.mark.parametrize("words", drawing.some("chain", [(), (SPLIT,)], 1))
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
