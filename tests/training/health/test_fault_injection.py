"""Faults on demand: when they happen, that they happen once, and what is refused."""

import errno
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightscale.errors import UserError
from lightscale.training.health import fault_injection
from lightscale.training.health.fault_injection import POINTS, VARIABLE, InjectedFault, fault_file, fault_point

# Reaches each point named on its command line in turn, and prints it.
PROGRAM = """
import sys
from lightscale.training.health.fault_injection import fault_point
for point in sys.argv[1:]:
    fault_point(point)
    print(point, flush=True)
"""


@pytest.fixture(autouse=True)
def nothing_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_injection, "_armed", fault_injection._Armed())
    monkeypatch.delenv("RANK", raising=False)


def test_without_the_variable_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for point in POINTS:
        fault_point(point)


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_an_error_is_raised_at_its_time_only(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    monkeypatch.setenv(VARIABLE, f"raise={error}@save:sync#3")
    for _ in range(2):
        fault_point("save:sync")
        fault_point("save:rename")
    with pytest.raises(OSError, match="injected by LIGHTSCALE_FAULT") as caught:
        fault_point("save:sync")
    assert (caught.value.errno, caught.value.filename) == (getattr(errno, error), "save:sync")
    fault_point("save:sync")


def test_only_the_named_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "raise=EIO@step:begin rank=1")
    monkeypatch.setenv("RANK", "0")
    fault_point("step:begin")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(OSError, match="step:begin"):
        fault_point("step:begin")


def test_a_slow_disk_stays_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "slow=0.03@save:write#2")
    took = []
    for _ in range(3):
        began = time.monotonic()
        fault_point("save:write")
        took.append(time.monotonic() - began >= 0.03)
    assert took == [False, True, True]


def test_a_file_makes_a_running_process_fail_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, f"@{tmp_path}")
    monkeypatch.setenv("RANK", "1")
    mine, other = fault_file(tmp_path, 1), fault_file(tmp_path, 0)
    fault_point("save:open")
    other.write_text("raise=EIO@save:open")
    fault_point("save:open")
    for _ in range(2):
        # Counting begins with the file.
        mine.write_text("raise=EIO@save:open#2")
        fault_point("save:open")
        assert mine.exists()
        with pytest.raises(OSError, match="save:open"):
            fault_point("save:open")
        assert not mine.exists(), "whoever is started next must not meet it again"
    assert other.exists()


@pytest.mark.parametrize(("words", "code"), [("kill@save:rename#2", -9), ("kill=0.1@save:rename#2", -9)])
def test_a_kill(words: str, code: int) -> None:
    points = ["save:rename", "save:rename", "save:retention"]
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, *points], env={VARIABLE: words}, capture_output=True, text=True, check=False
    )
    said = points if "=" in words else points[:1]
    assert (process.returncode, process.stdout.split(), process.stderr) == (code, said, "")


def test_a_stopped_process_goes_on_when_it_may() -> None:
    command = [sys.executable, "-c", PROGRAM, "load:read", "load:read"]
    with subprocess.Popen(command, env={VARIABLE: "stop@load:read#2"}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "load:read\n"
        status = Path(f"/proc/{process.pid}/status")
        deadline = time.monotonic() + 20
        while "T (stopped)" not in status.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(18)
        assert process.stdout.read() == "load:read\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    "fault",
    [
        InjectedFault(action="kill", point="save:begin"),
        InjectedFault(action="kill", value="0.25", point="load:verify", rank=3),
        InjectedFault(action="raise", value="EIO", point="save:write", count=17),
    ],
)
def test_words_and_back(fault: InjectedFault) -> None:
    assert InjectedFault.parse(str(fault), VARIABLE) == fault


@pytest.mark.parametrize(
    "words",
    [
        "kill",
        "kill@save:nowhere",
        "kill@save:begin#0",
        "kill=EIO@save:begin",
        "stop=1@save:begin",
        "raise@save:begin",
        "raise=EPERM@save:begin",
        "slow@save:begin",
        "explode@save:begin",
        "kill@save:begin rank=one",
    ],
)
def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str) -> None:
    monkeypatch.setenv(VARIABLE, words)
    with pytest.raises(UserError) as caught:
        fault_point("save:begin")
    assert str(caught.value).startswith(f'LIGHTSCALE_FAULT = "{words}": must be ACTION@POINT[#N] [rank=R]')
    assert all(point in str(caught.value) for point in POINTS)
    monkeypatch.setenv(VARIABLE, f"@{tmp_path}")
    fault_file(tmp_path, 0).write_text(words)
    with pytest.raises(UserError, match="rank-0 = "):
        fault_point("save:begin")
