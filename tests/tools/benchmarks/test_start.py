"""``tools/bench.py start``: CPU time of a command with everything it starts."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from lightscale.errors import UserError

BUSY = "import time\nwhile time.process_time() < 0.5: pass"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"


@pytest.fixture(scope="module")
def start(tools_path: Path) -> ModuleType:
    from benchmarks import start

    return start


def test_the_processes_of_a_process_count(start: ModuleType) -> None:
    assert start._cpu_s([sys.executable, "-c", PARENT]) > 0.5


def test_time_that_passes_does_not_count(start: ModuleType) -> None:
    assert start._cpu_s(["sleep", "0.5"]) < 0.4


def test_a_command_that_fails_is_named(start: ModuleType) -> None:
    with pytest.raises(UserError, match="`false` failed with exit code 1"):
        start._cpu_s(["false"])
