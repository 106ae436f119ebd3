import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import psutil
import pytest

from lightscale.training.signals import DEADLINE_VARIABLE, STOP_SIGNALS, StopSignal


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    with StopSignal(announce=True) as stop:
        yield stop


def alone(value: int) -> int:
    """An all-reduce over one rank."""
    return value


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_the_first_signal_is_remembered_and_announced_once(
    signum: signal.Signals, stop: StopSignal, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not stop.should_stop(alone)
    assert stop.reason is None
    os.kill(os.getpid(), signum)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.received is signum
    assert stop.should_stop(alone)
    assert stop.reason == signum.name
    assert capfd.readouterr().err == f"{signum.name}: finishing this step, then saving and exiting\n"


def test_only_one_rank_announces(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignal(announce=False) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received is signal.SIGTERM
    assert capfd.readouterr().err == ""


def test_a_rank_without_a_signal_stops_with_the_others(stop: StopSignal) -> None:
    assert stop.should_stop(lambda value: max(value, signal.SIGUSR1))
    assert stop.received is None
    assert stop.reason == "SIGUSR1"


def test_ranks_reduce_once_a_step_and_not_after_they_agreed(stop: StopSignal) -> None:
    values: list[int] = []

    def all_reduce_max(value: int) -> int:
        values.append(value)
        return value

    assert not stop.should_stop(all_reduce_max)
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.should_stop(all_reduce_max)
    assert stop.should_stop(all_reduce_max)
    assert values == [0, signal.SIGINT]


def test_the_deadline_stops_all_ranks_like_a_signal(capfd: pytest.CaptureFixture[str]) -> None:
    reduced: list[int] = []

    def all_reduce_max(value: int) -> int:
        reduced.append(value)
        return max(reduced)

    early = StopSignal(announce=True, environ={DEADLINE_VARIABLE: str(time.time() + 100)})
    assert not early.should_stop(all_reduce_max)
    # The clock of another rank, or its machine's, may be ahead.
    late = StopSignal(announce=False, environ={DEADLINE_VARIABLE: str(time.time())})
    assert late.should_stop(all_reduce_max)
    assert early.should_stop(all_reduce_max)
    assert early.reason == late.reason == "deadline"
    assert early.received is None
    assert capfd.readouterr().err == "deadline: saving and exiting\n"


@pytest.mark.parametrize("step_s", [-86400.0, 86400.0])
def test_the_clock_is_set_before_the_deadline(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    early = StopSignal(announce=False, environ={DEADLINE_VARIABLE: str(time.time() + 100)})
    late = StopSignal(announce=False, environ={DEADLINE_VARIABLE: str(time.time())})
    before = time.time
    monkeypatch.setattr(time, "time", lambda: before() + step_s)
    assert not early.should_stop(lambda value: value)
    assert late.should_stop(lambda value: value)


def test_signals_go_back_to_their_owners() -> None:
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    with StopSignal(announce=False):
        assert {signum: signal.getsignal(signum) for signum in STOP_SIGNALS} != before
    assert {signum: signal.getsignal(signum) for signum in STOP_SIGNALS} == before


PARENT = """
    import os, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
    child.wait()
"""
CHILD = """
    import sys, time
    from lightscale.training.signals import die_with_parent
    die_with_parent(int(sys.argv[1]))
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_child_dies_with_its_parent() -> None:
    command = [sys.executable, "-c", textwrap.dedent(PARENT), textwrap.dedent(CHILD)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.01)


def test_a_process_whose_parent_is_gone_already_ends() -> None:
    code = "from lightscale.training.signals import die_with_parent; die_with_parent(1); print('alive')"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (child.returncode, child.stdout) == (-signal.SIGKILL, "")


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_living_parent_is_no_reason_to_end() -> None:
    code = "import os; from lightscale.training.signals import die_with_parent; die_with_parent(os.getppid())"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
