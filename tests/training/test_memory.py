"""The peak of memory is the process's own; blocks that a step frees are there for the next."""

import os
import subprocess
import sys

import pytest

from lightscale.training.health.memory import keep_freed_memory

CHILD = """
import resource
from lightscale.training.health.memory import peak_memory_bytes
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


STEPS = """
import resource
from lightscale.training.health.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    # Larger than the largest block that glibc keeps by itself, and one that is the end of its heap.
    for _ in range(4):
        blocks = [b"x" * (40 << 20), b"x" * (4 << 20)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
assert keep_freed_memory()
faults()
print(first, faults())
"""


def test_freed_blocks_are_kept_for_the_next_step() -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, env=own)
    before, after = map(int, done.stdout.split())
    # A page of 2 MiB, if the system has such, is one fault.
    assert before > 4 * 40 // 2 // 2
    assert after < before // 10


@pytest.mark.parametrize("variables", [{"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}])
def test_an_allocator_that_the_user_sets_stays_as_it_is(variables: dict[str, str]) -> None:
    assert not keep_freed_memory(variables)
