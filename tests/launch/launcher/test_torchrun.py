"""The launcher with real processes: how ranks end, and what stops them. The ranks' program is `ranks.py`."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightscale.launch.launcher.failures import RankFailure, first_failure
from lightscale.launch.launcher.torchrun import _rank_variables

# A machine that others use too is slow at times.
pytestmark = pytest.mark.timeout(300)

Launcher = Any  # conftest.py
Ended = Any


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory, launch_each: Callable[..., dict[str, Ended]]) -> dict[str, Ended]:
    """What becomes of ranks that end by themselves; all are started by one process, one after the other."""
    behaviours = ("finished", "stopped", "mistake", "no_checkpoint", "statusless", "crash", "killed", "silent")
    return launch_each(tmp_path_factory.mktemp("endings"), {behaviour: {} for behaviour in behaviours})


@pytest.mark.parametrize(("behaviour", "code"), [("finished", 0), ("stopped", 78)])
def test_the_status_of_the_ranks_becomes_the_exit_code(endings: dict[str, Ended], behaviour: str, code: int) -> None:
    ended = endings[behaviour]
    assert ended.code == code, ended.output
    assert (ended.status["status"], ended.status["step"], ended.status["tokens"]) == (behaviour, 5, 500)
    assert ended.output.splitlines()[-1] == f"{behaviour} at step 5, 500 tokens: as asked"


def test_output_of_rank_0_is_shown_as_it_is_and_all_output_is_kept(endings: dict[str, Ended]) -> None:
    ended = endings["finished"]
    lines = [f"rank 0 step {step}" for step in range(1, 6)]
    assert ended.output.splitlines()[:-1] == lines
    logs = ended.run / "logs" / "launch-0001"
    assert (logs / "rank-0.out").read_text().splitlines() == lines
    assert (logs / "rank-1.out").read_text().splitlines() == [f"rank 1{line[6:]}" for line in lines]


def test_the_ranks_find_the_settings_that_torchrun_needs(endings: dict[str, Ended]) -> None:
    text = (endings["finished"].run / "environment-1").read_text()
    environment = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert environment["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert environment["PYTHONSAFEPATH"] == "1"
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("1", "2", "1")
    assert environment["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 30


def test_an_empty_number_of_threads_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert int(_rank_variables(2)["OMP_NUM_THREADS"]) >= 1


def test_a_crash_shows_the_traceback_of_the_rank_that_failed_and_no_other(endings: dict[str, Ended]) -> None:
    ended = endings["crash"]
    assert ended.code == 1
    shown = [line for line in ended.output.splitlines() if not line.startswith("rank 0 step")]
    assert shown[0] == "Traceback (most recent call last):"
    assert "ZeroDivisionError: the second rank is broken" in shown
    assert ended.output.count("Traceback") == 1, "rank 0 only lost its peer"
    assert "by peer" not in ended.output
    assert shown[-1] == "resume from the newest checkpoint with: the same command"
    logs = ended.run / "logs" / "launch-0001"
    assert "ZeroDivisionError" in (logs / "rank-1.err").read_text()
    # Empty where the machine is so busy that the rank is ended before it meets the loss.
    of_rank_0 = (logs / "rank-0.err").read_text()
    assert not of_rank_0 or re.search("Connection (closed|reset) by peer", of_rank_0)
    assert ended.status["status"] == "resumable"
    assert ended.status["reason"] == "rank 1: ZeroDivisionError: the second rank is broken (step 5, reading data)"
    events = [json.loads(line) for line in (ended.run / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["attempt"]) for event in events] == [("start", 1), ("failed", 1)]


def test_a_killed_rank_is_named_as_the_cause(endings: dict[str, Ended]) -> None:
    ended = endings["killed"]
    assert ended.code == 1
    assert ended.status["reason"].startswith("rank 1: killed by SIGKILL")
    assert "Traceback" not in ended.output
    # See above.
    of_rank_0 = (ended.run / "logs" / "launch-0001" / "rank-0.err").read_text()
    assert not of_rank_0 or "lost rank 1" in of_rank_0


def test_a_rank_that_exits_without_a_record_is_named_and_its_output_shown(endings: dict[str, Ended]) -> None:
    ended = endings["silent"]
    assert ended.code == 1
    assert ended.status["reason"] == "rank 1: exit code 3 (step 5, reading data)"
    assert "said before the end" in ended.output


LOST = RankFailure(rank=0, summary="lost its peer", traceback="…", time_s=100.7, is_recorded=True)
RAISED = RankFailure(rank=1, summary="raised", traceback="…", time_s=100.6, is_recorded=True)
KILLED = RankFailure(rank=2, summary="killed", killer=signal.SIGKILL, time_s=101.0)
EXITED = RankFailure(rank=3, summary="exited", time_s=101.0)
ENDED_BY_AGENT = RankFailure(rank=4, summary="ended", killer=signal.SIGTERM, time_s=100.0)
KILLED_BY_AGENT = RankFailure(rank=5, summary="did not end", killer=signal.SIGKILL, time_s=131.0)
SIGNALLED = RankFailure(rank=6, summary="stopped", killer=signal.SIGTERM, time_s=100.5, is_recorded=True)


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ([], None),
        ([LOST, RAISED], RAISED),
        # The agent sees a death only after the peers have raised.
        ([LOST, KILLED, ENDED_BY_AGENT], KILLED),
        ([LOST, EXITED], EXITED),
        ([ENDED_BY_AGENT, RAISED, KILLED_BY_AGENT], RAISED),
        ([ENDED_BY_AGENT, KILLED], KILLED),
        ([ENDED_BY_AGENT], ENDED_BY_AGENT),
        # Its peers were ended because of it, by the same signal.
        ([SIGNALLED, LOST, ENDED_BY_AGENT, KILLED_BY_AGENT], SIGNALLED),
    ],
)
def test_the_failure_that_the_others_follow_from(failures: list[RankFailure], first: RankFailure | None) -> None:
    assert first_failure(failures) == first
    assert first_failure(failures[::-1]) == first


def test_a_mistake_of_the_user_is_one_line_and_final(endings: dict[str, Ended]) -> None:
    ended = endings["mistake"]
    assert ended.code == 78
    assert ended.output == "error: data.store = nowhere: no such store\n"
    assert ended.status["status"] == "stopped"


def test_no_whole_checkpoint_has_an_exit_code_of_its_own(endings: dict[str, Ended]) -> None:
    ended = endings["no_checkpoint"]
    assert (ended.code, ended.output) == (74, "error: no checkpoint is whole\n")
    assert ended.status["status"] == "stopped"


def test_ranks_that_end_without_a_status_have_failed(endings: dict[str, Ended]) -> None:
    ended = endings["statusless"]
    assert ended.code == 1
    assert ended.status["reason"] == "rank 0: all ranks ended without writing status.json"


def assert_stopped_together(launcher: Launcher, name: str) -> str:
    """The ranks saved at one step after the signal `name`. Returns what the launcher printed."""
    ended = launcher.wait()
    assert ended.code == 75, ended.output
    saved = [(ended.run / f"saved-{rank}").read_text() for rank in (0, 1)]
    assert saved[0] == saved[1] == str(ended.status["step"])
    assert (ended.status["status"], ended.status["reason"]) == ("resumable", name)
    assert "Traceback" not in ended.output
    return ended.output


def test_sigterm_to_the_launcher_twice_reaches_each_rank_once(
    start: Callable[..., Launcher], wait_until: Callable[..., None]
) -> None:
    launcher = start("train")
    launcher.working()
    launcher.process.send_signal(signal.SIGTERM)
    wait_until(lambda: bool(launcher.signals(0)))
    launcher.process.send_signal(signal.SIGTERM)
    output = assert_stopped_together(launcher, "SIGTERM")
    assert launcher.signals(0) == launcher.signals(1) == ["SIGTERM"]
    assert output.count("SIGTERM: finishing this step, then saving and exiting") == 1
    assert output.splitlines()[-1] == "resume with: the same command"


def test_sigusr1_to_one_rank_stops_all_at_one_step(start: Callable[..., Launcher]) -> None:
    launcher = start("train")
    pids = launcher.working()
    os.kill(pids[1], signal.SIGUSR1)
    assert_stopped_together(launcher, "SIGUSR1")
    assert launcher.signals(0) == []
    assert launcher.signals(1) == ["SIGUSR1"]


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, dict[str, Any]]]:
    """The keyboard's side of a terminal, and the arguments of `start` for a launcher that has it as its own."""
    keyboard, screen = pty.openpty()

    def take() -> None:
        fcntl.ioctl(screen, termios.TIOCSCTTY, 0)

    try:
        yield keyboard, {"terminal": screen, "prepare": take}
    finally:
        os.close(keyboard)
        os.close(screen)


def test_ctrl_c_in_a_terminal_reaches_each_rank_once(
    start: Callable[..., Launcher], wait_until: Callable[..., None], needs: Callable[..., None]
) -> None:
    needs("pseudo-terminals")
    with terminal() as (keyboard, options):
        # The launcher is there until it has seen both.
        launcher = start("held_save", **options)
        launcher.working()
        name = Path(f"/proc/{launcher.process.pid}/fd/2").readlink()
        os.write(keyboard, b"\x03")
        wait_until(lambda: bool(launcher.signals(0)))
        os.write(keyboard, b"\x03")
        shown = ""
        while "already stopping; press Ctrl-C once more to end the run without saving" not in shown:
            shown += os.read(keyboard, 1 << 16).decode()
        (launcher.run / "go").touch()
        assert_stopped_together(launcher, "SIGINT")
    assert launcher.signals(0) == launcher.signals(1) == ["SIGINT"]
    assert f"LIGHTSCALE_TERMINAL={name}" in (launcher.run / "environment-0").read_text().splitlines()


def test_the_third_ctrl_c_ends_the_run_without_a_save(
    start: Callable[..., Launcher], wait_until: Callable[..., None]
) -> None:
    launcher = start("slow_save")
    launcher.working()
    launcher.process.send_signal(signal.SIGINT)
    wait_until(lambda: launcher.signals(0) == launcher.signals(1) == ["SIGINT"])
    launcher.process.send_signal(signal.SIGINT)
    # Two signals that wait for the launcher would be one.
    wait_until(lambda: "press Ctrl-C once more" in launcher.said())
    launcher.process.send_signal(signal.SIGINT)
    ended = launcher.wait()
    assert ended.code == 75, ended.output
    assert not (ended.run / "saved-0").exists()
    assert ended.status["status"] == "resumable"
    assert "SIGINT, and rank" in ended.status["reason"]


@pytest.mark.parametrize(
    ("signum", "to_one_rank"),
    [
        (signal.SIGTERM, False),
        (signal.SIGTERM, True),
        (signal.SIGUSR1, True),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.long),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.long),
        pytest.param(signal.SIGUSR1, False, marks=pytest.mark.long),
    ],
)
def test_a_signal_before_the_training_loop_ends_the_ranks_at_once(
    start: Callable[..., Launcher], wait_until: Callable[..., None], signum: signal.Signals, to_one_rank: bool
) -> None:
    launcher = start("starting", {"again": True})
    wait_until(lambda: all((launcher.run / f"pid-{rank}").exists() for rank in (0, 1)))
    target = int((launcher.run / "pid-1").read_text()) if to_one_rank else launcher.process.pid
    os.kill(target, signum)
    ended = launcher.wait()
    assert ended.code == 75, ended.output
    assert ended.status["status"] == "resumable"
    assert ended.status["reason"].startswith(f"{signum.name}, and rank {1 if to_one_rank else ''}")
    assert len(list((ended.run / "logs").iterdir())) == 1, "it was started again"


def test_ranks_do_not_outlive_a_killed_launcher(
    start: Callable[..., Launcher], wait_until: Callable[..., None]
) -> None:
    launcher = start("train")
    pids = launcher.working()
    launcher.process.kill()
    launcher.process.wait()
    wait_until(lambda: not any(map(is_running, pids)))
    assert not (launcher.run / "status.json").exists(), "a run without a status was killed, and is resumable"


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
