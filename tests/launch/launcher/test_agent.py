"""Agents of two nodes, here two processes of one machine; their ranks are those of `ranks.py`."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightscale.launch.environment import job_port
from lightscale.launch.launcher.agent import Order
from lightscale.launch.launcher.failures import RankFailure
from lightscale.launch.launcher.reports import read_reports, write_report
from lightscale.launch.launcher.torchrun import Launch, NodeReport, conclude
from lightscale.launch.launcher.watchdog import Hang
from lightscale.training.health.heartbeat import Beat

# A machine that others use too is slow at times.
pytestmark = pytest.mark.timeout(300)

PROGRAM = Path(__file__).parents[1] / "ranks.py"
TIMEOUT_S = 200.0


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., tuple[Launch, list[int]]]]:
    """``launch("finished", …)``: how two agents end, each with one rank of that behaviour; and their exit codes."""
    agents: list[subprocess.Popen[bytes]] = []

    def launch(behaviour: str, hang_timeout_s: float = 60.0) -> tuple[Launch, list[int]]:
        run = tmp_path / behaviour
        logs = run / "logs" / "launch-0001"
        logs.mkdir(parents=True)
        order = Order(
            command=[sys.executable, str(PROGRAM), "rank", str(run), behaviour, str(hang_timeout_s)],
            processes=1,
            logs=str(logs),
            hang_timeout_s=hang_timeout_s,
            deadline_s=None,
            address="127.0.0.1",
            port=job_port(os.getpid(), len(agents)),
            num_nodes=2,
            node_variable="NODE",
        )
        command = [sys.executable, "-m", "lightscale.launch.launcher.agent", order.text()]
        for node in range(2):
            agents.append(subprocess.Popen(command, env={**os.environ, "NODE": str(node)}))
        codes = [agent.wait(timeout=TIMEOUT_S) for agent in agents[-2:]]
        reports = read_reports(logs)
        assert list(reports) == [0, 1]
        return conclude(list(reports.values()), logs), codes

    yield launch
    for agent in agents:
        # Their ranks end with them.
        with contextlib.suppress(ProcessLookupError):
            agent.kill()
        agent.wait()


def test_ranks_of_two_nodes_finish_together(launch: Callable[..., tuple[Launch, list[int]]]) -> None:
    ended, codes = launch("finished")
    assert (ended.failure, codes) == (None, [0, 0])
    assert {rank: beat.doing for rank, beat in ended.beats.items()} == {0: "leaving", 1: "leaving"}
    for rank in range(2):
        lines = (ended.logs / f"rank-{rank}.out").read_text().splitlines()
        assert lines == [f"rank {rank} step {step}" for step in range(1, 6)]
    status = json.loads((ended.logs.parents[1] / "status.json").read_text())
    assert (status["status"], status["step"]) == ("finished", 5)
    environment = (ended.logs.parents[1] / "environment-1").read_text().splitlines()
    assert {"RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", "PYTHONSAFEPATH=1"} <= set(environment)


@pytest.mark.long
def test_a_rank_that_is_killed_on_another_node_is_the_cause(launch: Callable[..., tuple[Launch, list[int]]]) -> None:
    ended, codes = launch("killed@1")
    assert codes == [1, 1]
    assert ended.failure is not None
    assert ended.failure.rank == 1
    assert ended.failure.summary.startswith("killed by SIGKILL")
    assert "(step 5, reading data)" in ended.failure.summary


@pytest.mark.long
def test_a_rank_that_hangs_on_another_node_is_named(launch: Callable[..., tuple[Launch, list[int]]]) -> None:
    ended, codes = launch("suspended", hang_timeout_s=3.0)
    assert codes == [1, 1]
    assert ended.failure is not None
    assert ended.failure.rank == 1, ended.failure
    assert "stopped by a signal at step 5, reading data" in ended.failure.summary
    assert (ended.logs / "rank-0.stacks").stat().st_size > 0


def test_a_report_comes_back_as_it_was(tmp_path: Path) -> None:
    beat = Beat(rank=3, time_s=time.monotonic(), allowed_s=60.0, step=7, process_id=11, doing="saving")
    killed = RankFailure(rank=3, summary="killed", time_s=5.5, killer=signal.SIGKILL)
    raised = RankFailure(rank=2, summary="raised", traceback="…", time_s=4.5, is_recorded=True, exit_code=78)
    hang = Hang(ranks=(2, 3), reason="silent", since_s=3.5, time_s=6.5, are_stopped=True)
    for report in (
        NodeReport(failures=[killed, raised], hang=hang, beats={3: beat}),
        NodeReport(failures=[], hang=None, beats={}),
    ):
        write_report(tmp_path, 1, report)
        (back,) = read_reports(tmp_path).values()
        assert (back.failures, back.hang) == (report.failures, report.hang)
        for rank, before in report.beats.items():
            # By way of the other clock.
            assert abs(back.beats[rank].time_s - before.time_s) < 1.0
    assert list(read_reports(tmp_path)) == [1]


def test_of_nodes_that_hang_the_first_to_be_silent_is_the_cause(tmp_path: Path) -> None:
    waiting = Hang(ranks=(0, 1), reason="waits", since_s=20.0, time_s=50.0)
    stuck = Hang(ranks=(3,), reason="is stuck", since_s=19.0, time_s=51.0)
    killed = [RankFailure(rank=rank, summary="killed", time_s=50.0, killer=signal.SIGKILL) for rank in range(4)]
    reports = [
        NodeReport(failures=killed[:2], hang=waiting, beats={}),
        NodeReport(failures=killed[2:], hang=stuck, beats={}),
    ]
    failure = conclude(reports, tmp_path).failure
    assert failure is not None
    assert failure.rank == 3
    assert failure.summary.startswith("is stuck; the stacks of all ranks are in ")
    # Clocks of nodes differ; what is stopped by a signal cannot have waited.
    stopped = Hang(ranks=(5,), reason="was stopped", since_s=19.5, time_s=50.5, are_stopped=True)
    last = conclude([*reports, NodeReport(failures=[], hang=stopped, beats={})], tmp_path).failure
    assert last is not None
    assert last.rank == 5
    raised = RankFailure(rank=2, summary="raised", traceback="…", time_s=18.0, is_recorded=True)
    reports.append(NodeReport(failures=[raised], hang=None, beats={}))
    assert conclude(reports, tmp_path).failure == raised
