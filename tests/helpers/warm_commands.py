"""`lightscale` commands whose processes need not import torch and Megatron again; loaded by path.

Those imports take 4 to 6 CPU seconds of each process. A command is forked from a server that has done them and nothing
else, the one of `run_ranks.py`. It has its own folder, environment, streams and process id: signals, exit codes and
children are those of a command from a shell. What an import reads from the environment must be as in this process.
`tests/launch/launcher/test_fork.py`, `tests/test_cli.py` and the tutorials start commands from nothing.
"""

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightscale.cli import main

_CONTEXT = runpy.run_path(str(Path(__file__).with_name("run_ranks.py")))["CONTEXT"]
_POLL_S = 0.01
_COMMAND = "a command"  # the module's name in the processes


class Command:
    """`lightscale WORDS…` under way, with the part of `subprocess.Popen` that tests use; what it prints is kept."""

    def __init__(self, words: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None) -> None:
        """`env`: what is added to this process's environment, without what makes it a rank."""
        ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TRITON_INTERPRET")
        environment = {name: value for name, value in os.environ.items() if name not in ranks}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1", **(env or {})}
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(2)]
        job = (list(words), str(cwd), environment, [write for _, write in pipes])
        self._process = _CONTEXT.Process(target=runpy.run_path, args=(__file__, {"JOB": job}, _COMMAND))
        self._process.start()
        for _, write in pipes:
            write.close()
        self._texts = ["", ""]
        ends = [os.dup(read.fileno()) for read, _ in pipes]
        self._readers = [threading.Thread(target=self._read, args=one, daemon=True) for one in enumerate(ends)]
        for reader in self._readers:
            reader.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, -n after signal n; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """See `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired."""
        deadline_s = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("lightscale", timeout)
            time.sleep(_POLL_S)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; stdout and stderr."""
        self.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
        return self.stdout, self.stderr

    @property
    def stdout(self) -> str:
        """Printed so far."""
        return self._texts[0]

    @property
    def stderr(self) -> str:
        """Printed so far."""
        return self._texts[1]

    def send_signal(self, signum: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self, number: int, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="replace") as file:
            for line in file:
                self._texts[number] += line


def run(words: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None, timeout_s: float = 200.0) -> Command:
    """`lightscale WORDS…` to its end."""
    command = Command(words, cwd=cwd, env=env)
    try:
        command.communicate(timeout_s)
    finally:
        command.kill()
    return command


def _command(words: list[str], cwd: str, environment: dict[str, str], ends: Any) -> None:
    """The command's process: first everything that a new program would not have from its parent."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    descriptors = [os.open(os.devnull, os.O_RDONLY), *(end.fileno() for end in ends)]
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process lives
        for number, mode in enumerate("rww")
    )
    for end in ends:
        end.close()
    sys.argv = ["lightscale", *words]
    sys.exit(main(words))


if __name__ == _COMMAND:
    _command(*globals()["JOB"])
