"""The peak of memory is the process's own."""

import subprocess
import sys

CHILD = """
import resource
from lightscale.training.memory import peak_memory_bytes
held = bytearray(100 << 20)
del held
print(peak_memory_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
PARENT = """
import subprocess, sys
held = bytearray(b"x") * (400 << 20)
del held
print(subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, text=True, check=True).stdout)
"""


def test_a_process_does_not_count_the_one_that_started_it() -> None:
    """The parent has held 400 MiB, the child 100: getrusage gives the child its parent's peak."""
    command = [sys.executable, "-c", PARENT, CHILD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    peak_bytes, of_getrusage = map(int, done.stdout.split())
    assert 100 << 20 < peak_bytes < 200 << 20
    assert of_getrusage > 400 << 20
