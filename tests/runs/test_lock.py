"""One run directory, one job; a dead holder is replaced, and by one only."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lightscale.errors import UserError
from lightscale.runs import lock
from lightscale.runs.lock import Holder, RunLock
from lightscale.runs.run_directory import RunDirectory, read_lines

pytestmark = pytest.mark.timeout(300)

# Takes the lock at a given time, says whether it could, and holds it until its input ends.
HOLD = """
    import sys, time
    from lightscale.errors import UserError
    from lightscale.runs import lock
    from lightscale.runs.run_directory import RunDirectory
    begin = sys.stdin.readline()
    try:
        with lock.RunLock(RunDirectory(sys.argv[1])):
            print("held", flush=True)
            sys.stdin.read()
    except UserError as error:
        print(error, flush=True)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "run").mkdir()
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def hold(run: RunDirectory) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`hold(LIGHTSCALE_JOB_ID="7")`: another process that takes the lock as soon as it reads a line."""
    processes: list[subprocess.Popen[str]] = []

    def hold(**environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(HOLD), str(run.path)]
        pipe = subprocess.PIPE
        processes.append(
            subprocess.Popen(command, env=os.environ | environment, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        )
        return processes[-1]

    yield hold
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def begin(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    return process.stdout.readline().strip()


def refusal(run: RunDirectory) -> str:
    with pytest.raises(UserError) as caught, RunLock(run):
        pass
    return str(caught.value)


def takeovers(run: RunDirectory) -> list[dict[str, Any]]:
    return [event for event in read_lines(run.events) if event["event"] == "lock_taken_over"]


def test_a_second_job_is_refused_with_the_name_of_the_first(run: RunDirectory, hold: Callable[..., Any]) -> None:
    first = hold(LIGHTSCALE_JOB_ID="4711")
    assert begin(first) == "held"
    message = refusal(run)
    assert f"{run.path} is in use by process {first.pid} on {os.uname().nodename} of job 4711, since 2" in message
    assert "start another run with --run" in message
    assert begin(hold()).startswith(f"{run.path} is in use by process {first.pid}")
    first.communicate()
    with RunLock(run):
        assert [path.name for path in (run.path / "lock").iterdir()] == ["000002"], "nothing is left of the others"
    assert takeovers(run) == []


def test_a_killed_holder_is_replaced_at_once(run: RunDirectory, hold: Callable[..., Any]) -> None:
    first = hold()
    assert begin(first) == "held"
    first.send_signal(signal.SIGKILL)
    first.wait()
    with RunLock(run):
        (event,) = takeovers(run)
        assert (event["from_process"], event["from_host"]) == (first.pid, os.uname().nodename)
        assert "in use by process" in refusal(run)


def write_holder(run: RunDirectory, age_s: float, **fields: Any) -> Path:
    """A lock that nobody has any more, `age_s` after it was last renewed."""
    holder = replace(Holder.this_process(), **fields)
    path = run.path / "lock" / "000007"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(holder)))
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


ELSEWHERE = {"host": "gpu17", "boot": "another", "process": 1234, "job": "99"}


def test_on_another_machine_signs_of_life_count(run: RunDirectory) -> None:
    write_holder(run, age_s=20, **ELSEWHERE)
    message = refusal(run)
    assert "in use by process 1234 on gpu17 of job 99" in message
    assert re.search(r"it renewed its lock 2\d s ago \(it counts as dead after 60 s\)", message)
    write_holder(run, age_s=61, **ELSEWHERE)
    with RunLock(run):
        assert [event["from_host"] for event in takeovers(run)] == ["gpu17"]


def test_the_holder_gives_signs_of_life(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightscale.runs.lock._RENEW_S", 0.05)
    with RunLock(run):
        (path,) = (run.path / "lock").iterdir()
        os.utime(path, (1, 1))
        deadline = time.monotonic() + 30
        while path.stat().st_mtime < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert abs(path.stat().st_mtime - time.time()) < 30


def test_without_flock_the_process_is_looked_for(
    run: RunDirectory, hold: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hold()
    assert begin(first) == "held"

    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert f"in use by process {first.pid}" in refusal(run)
    first.kill()
    first.wait()
    with RunLock(run):
        assert len(takeovers(run)) == 1
        assert f"in use by process {os.getpid()}" in refusal(run)
    # A process of the same number that began at another time is another process.
    write_holder(run, age_s=1, process_started=1.0)
    with RunLock(run):
        pass


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\0\0\0", b'{"host": 1}', b"\xff" * 100_000, b"[" * 100_000])
def test_a_damaged_lock_holds_as_long_as_somebody_renews_it(run: RunDirectory, content: bytes) -> None:
    path = write_holder(run, age_s=10)
    path.write_bytes(content)
    os.utime(path, (time.time() - 10,) * 2)
    assert "in use by process 0 on an unknown host" in refusal(run)
    assert re.search(r"renewed its lock 1\d s ago", refusal(run))
    os.utime(path, (time.time() - 100,) * 2)
    with RunLock(run):
        assert [one.name for one in path.parent.iterdir()] == ["000008"]
    (event,) = read_lines(run.events)
    assert (event["event"], event["from_host"]) == ("lock_taken_over", "an unknown host")


LOSE = """
    import json, os, sys, time
    from lightscale.runs import lock
    from lightscale.runs.run_directory import RunDirectory
    lock._RENEW_S = 0.05
    run = RunDirectory(sys.argv[1])
    with lock.RunLock(run):
        # As another job does after this machine slept for long.
        os.link(run.path / "lock" / "000001", run.path / "lock" / "000002")
        time.sleep(60)
"""


def test_whoever_lost_the_lock_ends_at_once(run: RunDirectory) -> None:
    command = [sys.executable, "-c", textwrap.dedent(LOSE), str(run.path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 78
    assert f"error: {run.path} was taken over by process" in ended.stderr


def race(run: RunDirectory, hold: Callable[..., Any], number: int) -> None:
    """Of `number` processes that find a dead holder at one time, one takes over."""
    write_holder(run, age_s=1000, **ELSEWHERE)
    processes = [hold() for _ in range(number)]
    time.sleep(1.0)
    for process in processes:
        process.stdin.write("\n")
    answers = [process.stdout.readline().strip() for process in processes]
    assert answers.count("held") == 1, answers
    assert all("is in use by" in answer for answer in answers if answer != "held")
    assert len(takeovers(run)) == 1
    for process in processes:
        process.kill()
        process.wait()
    assert len([path for path in (run.path / "lock").iterdir() if path.name.isdecimal()]) == 1


def test_of_several_that_take_over_one_does(run: RunDirectory, hold: Callable[..., Any]) -> None:
    race(run, hold, 4)


@pytest.mark.long
@pytest.mark.parametrize("_", range(5))
def test_of_many_that_take_over_one_does(run: RunDirectory, hold: Callable[..., Any], _: int) -> None:
    race(run, hold, 8)


def test_without_flock_too_only_one_takes_over(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow one that looked before a fast one took over, and links after."""
    write_holder(run, age_s=1000, **ELSEWHERE)
    link = os.link

    def late(draft: Path, path: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        # Two others come and go meanwhile: the number that this one is about to take is free again.
        with RunLock(run):
            pass
        fast.__enter__()
        link(draft, path)

    fast = RunLock(run)
    monkeypatch.setattr(os, "link", late)
    assert f"in use by process {os.getpid()}" in refusal(run)
    fast.__exit__(None, None, None)
    assert [path.name for path in (run.path / "lock").iterdir()] == ["000009"]


def test_one_that_takes_over_while_another_looks(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    write_holder(run, age_s=1000, **ELSEWHERE)
    read = lock._read
    fast = RunLock(run)

    def late(path: Path) -> Holder | None:
        monkeypatch.setattr(lock, "_read", read)
        holder = read(path)
        fast.__enter__()
        return holder

    monkeypatch.setattr(lock, "_read", late)
    assert f"in use by process {os.getpid()}" in refusal(run)
