"""Ranks that fail are started again, for as long as the run makes progress."""

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale.launch.launcher.failures import RankFailure, located
from lightscale.launch.launcher.restart import _wall
from lightscale.launch.slurm.allocation import _unreported
from lightscale.training.health.heartbeat import Beat

# Several starts of several processes, on a machine that may be busy.
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

Launcher = Any  # conftest.py
Ended = Any

AGAIN = {"again": True}


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory, launch_each: Callable[..., dict[str, Ended]]) -> dict[str, Ended]:
    behaviours = {
        "killed@2": AGAIN | {"processes": 3},
        "crash@9": AGAIN | {"max_cycles": 2},
        "progress@4": AGAIN | {"max_cycles": 1},
        "mistake": AGAIN,
        "wall": AGAIN | {"max_cycles": 5},
        "limit": AGAIN | {"max_cycles": 5},
        "late@1": AGAIN,
    }
    return launch_each(tmp_path_factory.mktemp("endings"), behaviours)


def launches(ended: Ended) -> int:
    return len(list((ended.run / "logs").iterdir()))


def test_a_killed_rank_is_started_again_with_all_others(endings: dict[str, Ended]) -> None:
    ended = endings["killed@2"]
    assert ended.code == 0, ended.output
    assert ended.status["status"] == "finished"
    assert launches(ended) == 3
    names = [event["event"] for event in ended.events()]
    assert names == ["start", "failed", "restart"] * 2 + ["start"]
    for number, event in enumerate(ended.events("restart"), start=1):
        assert event["reason"] == "rank 1: killed by SIGKILL; the machine may be out of memory (step 5, reading data)"
        assert (event["attempt"], event["checkpoint"], event["fruitless_starts"]) == (number, 0, number)
    for event in ended.events("failed"):
        assert {name: one["step"] for name, one in event["ranks"].items()} == {"0": 5, "1": 5, "2": 5}
    said = [line for line in ended.output.splitlines() if "restarting" in line]
    assert said == [
        "restarting the ranks from the beginning; 1 of at most 3 starts in a row without a new checkpoint",
        "restarting the ranks from the beginning; 2 of at most 3 starts in a row without a new checkpoint",
    ]


def test_a_run_without_progress_is_given_up(endings: dict[str, Ended]) -> None:
    ended = endings["crash@9"]
    assert ended.code == 70
    assert launches(ended) == 2
    reason = (
        "given up after 2 starts in a row without a new checkpoint; last failure: "
        "rank 1: ZeroDivisionError: the second rank is broken (step 5, reading data)"
    )
    assert (ended.status["status"], ended.status["reason"]) == ("stopped", reason)
    assert ended.output.splitlines()[-1] == reason
    assert [event["event"] for event in ended.events()] == ["start", "failed", "restart", "start", "failed", "given_up"]


def test_checkpoints_are_progress(endings: dict[str, Ended]) -> None:
    ended = endings["progress@4"]
    assert ended.code == 0, "one start without a checkpoint would have been too many"
    assert [event["checkpoint"] for event in ended.events("restart")] == [1, 2, 3, 4]
    assert "restarting the ranks from the checkpoint of step 4" in ended.output.splitlines()


def test_mistakes_are_not_tried_again(endings: dict[str, Ended]) -> None:
    ended = endings["mistake"]
    assert (ended.code, launches(ended)) == (78, 1)
    assert ended.status["status"] == "stopped"


def test_two_starts_that_end_alike_before_a_step_are_enough(endings: dict[str, Ended]) -> None:
    """But for the number of the process; others end as often before a step, killed, and are started again."""
    ended = endings["wall"]
    assert (ended.code, launches(ended)) == (70, 2), ended.output
    last = ended.output.splitlines()[-1]
    assert last.startswith("given up after 2 starts in a row without a new checkpoint; last failure: rank ")
    assert re.search(r"RuntimeError: no thread for process \d+ \(step 0, starting\)$", last)
    assert len({event["reason"] for event in ended.events("failed")}) == 2


def test_two_lost_nodes_are_not_alike() -> None:
    """But for numbers their messages are; the next node may not be lost."""
    launch: Any = SimpleNamespace(beats={})
    lost, silent = (_unreported(["gpu07"], 8, is_lost, 1) for is_lost in (True, False))
    assert _wall(lost, launch) is None
    assert _wall(silent, launch) == "rank 0: node gpu0 ended without a report (srun: exit code 0)"


def test_a_limit_is_met_twice_also_behind_steps(endings: dict[str, Ended]) -> None:
    """Whatever error it is each time: no stack, the remedy in the last line, and the code for what needs attention."""
    ended = endings["limit"]
    assert (ended.code, launches(ended)) == (78, 2), ended.output
    assert "Traceback" not in ended.output
    last = ended.output.splitlines()[-1]
    assert last == ended.status["reason"] and ended.status["status"] == "stopped"
    assert "rank 1: RuntimeError: DefaultCPUAllocator: can't allocate memory" in last
    assert "; free memory, raise its limit (`ulimit -v`), or use smaller batches" in last
    # Where it was met can still be read.
    assert "MemoryError" in (ended.run / "logs" / "launch-0001" / "rank-1.err").read_text()


def test_an_exchange_that_times_out_names_who_did_not_come(endings: dict[str, Ended]) -> None:
    ended = endings["late@1"]
    assert ended.code == 0, ended.output
    (event,) = ended.events("restart")
    assert event["reason"].startswith("rank 0: RuntimeError: ")
    assert re.search(r"\(step 5, agreeing; rank 1 arrived \d+ s later\)$", event["reason"]), event["reason"]


def test_an_exchange_that_times_out_names_who_was_silent() -> None:
    now_s = time.monotonic()

    def beat(rank: int, silent_s: float, step: int, doing: str) -> Beat:
        return Beat(rank=rank, time_s=now_s - silent_s, allowed_s=60.0, step=step, process_id=1, doing=doing)

    timeout = RankFailure(rank=0, summary="RuntimeError: Timed out", traceback="…", time_s=time.time())
    beats = {0: beat(0, 11, 8, "optimizer"), 1: beat(1, 12, 7, "reading data"), 2: beat(2, 11.5, 8, "optimizer")}
    silent = "RuntimeError: Timed out (step 8, optimizer; no heartbeat of rank 1 for 12 s, at step 7, reading data)"
    assert located(timeout, beats).summary == silent
    del beats[1]
    assert located(timeout, beats).summary == "RuntimeError: Timed out (step 8, optimizer)"
    assert located(timeout, {}) == timeout


def test_a_signal_while_ranks_are_started_again_ends_it(
    start: Callable[..., Launcher], wait_until: Callable[..., None]
) -> None:
    launcher = start("killed@2", AGAIN)
    wait_until(lambda: "restarting" in log(launcher))
    launcher.process.send_signal(signal.SIGTERM)
    ended = launcher.wait()
    assert ended.code == 75, ended.output
    assert ended.status["status"] == "resumable"
    assert "SIGTERM" in ended.status["reason"]
    assert launches(ended) == 2


def test_the_deadline_is_a_reason_to_stop_but_none_to_start_again(start: Callable[..., Launcher]) -> None:
    stopped = start("train", AGAIN | {"deadline_s": time.monotonic() + 5})
    failed = start("killed", AGAIN | {"deadline_s": time.monotonic()})
    ended = stopped.wait()
    assert ended.code == 75, ended.output
    assert (ended.status["status"], ended.status["reason"]) == ("resumable", "deadline")
    assert "deadline: saving and exiting" in ended.output
    saved = [(ended.run / f"saved-{rank}").read_text() for rank in (0, 1)]
    assert saved[0] == saved[1] == str(ended.status["step"])
    ended = failed.wait()
    assert (ended.code, launches(ended)) == (75, 1)
    assert ended.status["reason"] == "deadline"


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_twenty_starts_of_twenty(start: Callable[..., Launcher], processes: int) -> None:
    launcher = start("killed@20", AGAIN | {"processes": processes, "max_cycles": 30})
    code = launcher.process.wait(timeout=1700)
    ended = launcher.wait()
    assert code == 0, ended.output
    assert launches(ended) == 21
    reasons = {event["reason"] for event in ended.events("restart")}
    assert reasons == {"rank 1: killed by SIGKILL; the machine may be out of memory (step 5, reading data)"}


def log(launcher: Launcher) -> str:
    path: Path = launcher.run.parent / f"{launcher.run.name}.log"
    return path.read_text()
