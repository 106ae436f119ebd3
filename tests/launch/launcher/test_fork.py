"""A rank that is a fork of its launcher has nothing of it but what it imported."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from lightscale.launch.launcher.fork import ForkedRank, forked_ranks

Start = Callable[..., ForkedRank]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(program, *words)``: a rank of the agent, whose output is in the files out and err."""
    started: list[ForkedRank] = []

    def start(program: Callable[[Sequence[str]], int], *words: str) -> ForkedRank:
        outputs = (str(tmp_path / "out"), str(tmp_path / "err"))
        with forked_ranks(program):
            handler = SubprocessHandler("command", words, {"OMP_NUM_THREADS": "3", "RANK": "5"}, *outputs, 0, None)
        assert isinstance(handler.proc, ForkedRank)
        started.append(handler.proc)
        return handler.proc

    yield start
    for rank in started:
        if rank.poll() is None:
            os.kill(rank.pid, signal.SIGKILL)
        rank.wait()


def test_a_rank_has_its_own_command_environment_threads_session_and_output(start: Start, tmp_path: Path) -> None:
    def program(command: Sequence[str]) -> int:
        print(*command, os.environ["RANK"], torch.get_num_threads(), os.getsid(0) == os.getpid())
        print("known to be wrong", file=sys.stderr)
        subprocess.run(["echo", "of a child"], check=True)
        return 7

    rank = start(program, "train", "--run")
    assert rank.wait(60) == 7
    assert (tmp_path / "out").read_text() == "command train --run 5 3 True\nof a child\n"
    assert (tmp_path / "err").read_text() == "known to be wrong\n"
    assert torch.get_num_threads() != 3


def test_a_rank_does_not_hold_the_launchers_files_open(start: Start, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with (tmp_path / "launcher").open("w") as file:

        def program(command: Sequence[str]) -> int:
            # A descriptor that was closed would be this one, and the launcher's object would write here.
            with (tmp_path / "rank").open("w"):
                file.write("of the launcher")
                file.flush()
            print("ready", flush=True)
            signal.pause()
            return 0

        rank = start(program)
        os.close(writer)
        # Ends only when nobody has the other end.
        assert os.read(reader, 1) == b""
        os.close(reader)
        while rank.poll() is None and "ready" not in (tmp_path / "out").read_text():
            pass
    assert (tmp_path / "rank").read_text() == (tmp_path / "launcher").read_text() == ""
    assert rank.poll() is None


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_the_launchers_handlers_are_not_the_ranks(start: Start, tmp_path: Path, signum: signal.Signals) -> None:
    before = signal.signal(signum, lambda *_: None)
    try:
        rank = start(lambda command: threading.Event().wait() and 0)
        # At any moment, the first included.
        os.kill(rank.pid, signum)
        assert rank.wait(60) == -signum
    finally:
        signal.signal(signum, before)


def test_an_error_is_shown_and_fails(start: Start, tmp_path: Path) -> None:
    rank = start(lambda command: 1 // 0)
    assert rank.wait(60) == 1
    assert "ZeroDivisionError" in (tmp_path / "err").read_text()


def test_a_rank_that_does_not_end_in_time(start: Start) -> None:
    rank = start(lambda command: threading.Event().wait() and 0)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(0.1)


def test_outside_the_agent_starts_programs_again(start: Start, tmp_path: Path) -> None:
    start(lambda command: 0).wait(60)
    handler = SubprocessHandler("true", (), {}, str(tmp_path / "out"), str(tmp_path / "err"), 0, None)
    assert isinstance(handler.proc, subprocess.Popen)
    assert handler.proc.wait() == 0
