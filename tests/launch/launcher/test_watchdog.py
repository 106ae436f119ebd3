"""Ranks that hang are found, named with their stacks, and started again."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.launch.launcher.watchdog import Watchdog
from lightscale.training.health.heartbeat import Beat, start_allowance_s

# Several starts of several processes, on a machine that may be busy.
pytestmark = pytest.mark.timeout(600)

Ended = Any  # conftest.py

HANG_TIMEOUT_S = 4.0
# What a busy machine may add.
PATIENCE_S = 4.0


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory, launch_each: Callable[..., dict[str, Ended]]) -> dict[str, Ended]:
    """Each hangs in its first start and is whole in the second."""
    policy = {"again": True, "hang_timeout_s": HANG_TIMEOUT_S}
    behaviours = ("suspended@1", "locked@1", "stuck@1")
    return launch_each(tmp_path_factory.mktemp("endings"), dict.fromkeys(behaviours, policy))


def restarted(ended: Ended) -> str:
    """Checks that the hang was found in time and got over; returns what was said of it."""
    assert ended.code == 0, ended.output
    (failed,), (restart,) = ended.events("failed"), ended.events("restart")
    assert failed["rank"] == 1
    # Rank 1 was silent for as long as it may, and nobody waited much longer.
    silent_s = failed["ranks"]["1"]["silent_s"]
    assert HANG_TIMEOUT_S <= silent_s <= HANG_TIMEOUT_S + PATIENCE_S + 2.5, "with the time for the stacks"
    assert failed["ranks"]["1"] | {"silent_s": 0} == {"step": 5, "doing": "reading data", "silent_s": 0}
    assert restart["reason"] in ended.output.replace("rank 1 failed: ", "rank 1: ")
    logs = ended.run / "logs" / "launch-0001"
    assert restart["reason"].endswith(f"; the stacks of all ranks are in {logs}/rank-*.stacks")
    reason: str = restart["reason"].partition(";")[0]
    assert reason.startswith("rank 1: no heartbeat for 4.")
    return reason


def stacks(ended: Ended, rank: int) -> str:
    path = ended.run / "logs" / "launch-0001" / f"rank-{rank}.stacks"
    return path.read_text() if path.exists() else ""


def test_a_suspended_rank(endings: dict[str, Ended]) -> None:
    ended = endings["suspended@1"]
    assert restarted(ended).endswith(" s, stopped by a signal at step 5, reading data")
    assert "all_reduce_max" in stacks(ended, 0)
    assert stacks(ended, 1) == "", "it could not"


def test_a_rank_that_holds_the_interpreter_for_ever(endings: dict[str, Ended]) -> None:
    ended = endings["locked@1"]
    assert restarted(ended).endswith(" s at step 5, reading data")
    assert "in misbehave" in stacks(ended, 1)
    assert "all_reduce_max" in stacks(ended, 0)


def test_a_rank_that_waits_for_its_data(endings: dict[str, Ended]) -> None:
    ended = endings["stuck@1"]
    assert restarted(ended).endswith(" s at step 5, reading data")
    assert "in stuck_reader" in stacks(ended, 1)


def test_launches_without_a_hang_leave_no_stacks(endings: dict[str, Ended]) -> None:
    for ended in endings.values():
        assert not list((ended.run / "logs" / "launch-0002").glob("*.stacks"))
        assert (ended.run / "logs" / "launch-0002" / "rank-1.out").exists()


@pytest.mark.long
def test_a_suspended_job_does_not_count_as_hanging(start: Callable[..., Any]) -> None:
    """All of it, the launcher too, as by `scontrol suspend`."""
    launcher = start("train", {"hang_timeout_s": 3.0})
    pids = [launcher.process.pid, *launcher.working()]
    # Longer than the ranks may be silent; then a moment for the watchdog to look.
    for signum, pause_s in ((signal.SIGSTOP, 5.0), (signal.SIGCONT, 1.0)):
        for pid in pids:
            os.kill(pid, signum)
        time.sleep(pause_s)
    launcher.process.send_signal(signal.SIGTERM)
    ended = launcher.wait()
    assert ended.code == 75, ended.output
    assert ended.status["reason"] == "SIGTERM"


def test_a_start_may_take_longer() -> None:
    assert start_allowance_s(3.0) == 120.0
    assert start_allowance_s(60.0) == 600.0


@pytest.mark.parametrize(
    ("beats", "cause"),
    [
        # A rank that came last to where it hangs, since it had waited for a core; the other waits for it.
        ({0: (5, "agreeing", 1.0), 1: (5, "reading data", 1.1)}, (1,)),
        ({0: (6, "forward and backward", 1.0), 1: (6, "reading data", 1.1)}, (1,)),
        ({0: (5, "agreeing", 1.1), 1: (5, "saving", 1.0)}, (0,)),
        ({0: (6, "reading data", 1.0), 1: (5, "saving", 1.1)}, (1,)),
        ({0: (4, "forward and backward", 1.1), 1: (7, "rolling back", 1.0)}, (1,)),
        ({0: (6, "optimizer", 1.0), 1: (6, "optimizer", 1.1)}, (0, 1)),
    ],
)
def test_the_rank_that_is_least_far_is_the_cause(
    tmp_path: Path, beats: dict[int, tuple[int, str, float]], cause: tuple[int, ...]
) -> None:
    watchdog = Watchdog(tmp_path / "heartbeats", logs=tmp_path, ranks=range(2), hang_timeout_s=HANG_TIMEOUT_S)
    watchdog._last = {
        rank: Beat(rank=rank, time_s=time_s, allowed_s=4.0, step=step, process_id=os.getpid(), doing=doing)
        for rank, (step, doing, time_s) in beats.items()
    }
    watchdog._silent_s = {0: 4.5, 1: 4.5}
    assert watchdog._describe([0, 1], []).ranks == cause
