"""Output that nobody takes neither fails nor stops a process."""

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightscale.output import streams
from lightscale.output.streams import LogStream, lasting_output, offer

PIPE_BYTES = 1 << 16
PATIENCE_S = 0.2


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Its two ends; nobody reads."""
    monkeypatch.setattr(streams, "_PATIENCE_S", PATIENCE_S)
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield read, write
    for end in (read, write):
        with contextlib.suppress(OSError):
            os.close(end)


def test_a_pipe_that_nobody_reads_is_waited_for_once(pipe: tuple[int, int]) -> None:
    read, write = pipe
    with os.fdopen(os.dup(write), "w") as file:
        stream, line = LogStream(file), "x" * 999 + "\n"
        began = time.monotonic()
        for _ in range(100):
            assert stream.write(line) == len(line)
        stream.flush()
        passed_s = time.monotonic() - began
        assert PATIENCE_S <= passed_s < 20 * PATIENCE_S
        taken = os.read(read, 2 * PIPE_BYTES).decode()
        whole = taken.count("\n")
        stream.write("after\n")
        gap = f"\n[{100 - whole} lines dropped here: the output accepted no more]\n"
        assert os.read(read, PIPE_BYTES).decode() == f"{gap}after\n"
        stream.write("more\n")
        assert os.read(read, PIPE_BYTES) == b"more\n"


def test_a_reader_that_has_ended_and_a_disk_that_is_full(pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.close(read)
    assert not offer(write, b"text")
    with os.fdopen(os.dup(write), "w") as closed, Path("/dev/full").open("w") as full:
        for file in (closed, full):
            stream = LogStream(file)
            print("text", file=stream, flush=True)
            assert not stream.isatty()


def test_a_signal_handler_never_waits(pipe: tuple[int, int]) -> None:
    _, write = pipe
    began = time.monotonic()
    while offer(write, b"x" * 1000):
        pass
    assert time.monotonic() - began < 10


def test_streams_without_a_descriptor_and_those_of_before(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with lasting_output():
        print("out")
        print("error", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("out\n", "error\n")


MISSING = """
import sys
from lightscale.output.streams import open_missing_streams
open_missing_streams()
print("nobody reads this")
print("nor this", file=sys.stderr)
assert sys.stdin.read() == ""
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2
    file.write("whole")
"""


def test_a_process_without_streams(tmp_path: Path) -> None:
    path = tmp_path / "record"
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    subprocess.run([*shell, sys.executable, "-c", MISSING, str(path)], check=True, timeout=60)
    assert path.read_text() == "whole"


def test_the_exit_code_counts_whoever_reads(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-P", "-m", "lightscale", "config", f"{tmp_path}/none.toml"]
    done = subprocess.run(command, stdout=write, stderr=write, check=False, timeout=60)
    os.close(write)
    assert done.returncode == 78
