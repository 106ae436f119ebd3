"""Control groups of both versions, as files of the kernel's forms."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lightscale.training.health import control_group
from lightscale.training.health.control_group import lowest_limit, memory_kills

Write = Callable[[str, str, str], None]
LINES = {
    # Two controllers in one tree, as of some distributions, and the empty tree of version 2 beside them.
    1: "8:pids:/job/step\n4:memory,hugetlb:/job/step\n3:cpu:/elsewhere\n0::/\n",
    2: "0::/job/step\n",
}
FILES = {
    1: {"memory": "memory.limit_in_bytes", "pids": "pids.max", "kills": "memory.oom_control"},
    2: {"memory": "memory.max", "pids": "pids.max", "kills": "memory.events"},
}
NO_LIMIT = {1: str((1 << 63) - 4096), 2: "max"}


@pytest.fixture(params=[1, 2])
def version(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: int) -> Write:
    """``write(group, what, content)``: a file of `FILES`; this process is in the group job/step."""
    (tmp_path / "own").write_text(LINES[version])
    monkeypatch.setattr(control_group, "_OWN", tmp_path / "own")
    monkeypatch.setattr(control_group, "_TREES", tmp_path / "trees")

    def write(group: str, what: str, content: str) -> None:
        tree = "" if version == 2 else "pids" if what == "pids" else "memory"
        path = tmp_path / "trees" / tree / group / FILES[version][what]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")

    return write


@pytest.mark.parametrize("outer", [5_000_000_000, 50_000_000_000])
def test_the_lowest_limit_of_all_around(write: Write, version: int, outer: int) -> None:
    write("job/step", "memory", "20000000000")
    write("job", "memory", str(outer))
    write("", "memory", NO_LIMIT[version])
    write("job/step", "pids", "max")
    lowest = lowest_limit("memory")
    assert lowest is not None and lowest[1] == min(outer, 20_000_000_000)
    assert lowest[0].parent.name == ("job" if outer < 20_000_000_000 else "step")
    assert lowest_limit("pids") is None


def test_no_limit_anywhere(write: Write, version: int) -> None:
    assert lowest_limit("memory") is None
    write("job/step", "memory", NO_LIMIT[version])
    assert lowest_limit("memory") is None


def test_in_a_container_the_own_group_is_the_root(write: Write) -> None:
    """Its path is that of the host, which has no directory here."""
    write("", "memory", "7000000000")
    lowest = lowest_limit("memory")
    assert lowest is not None and lowest[1] == 7_000_000_000


def test_kills_are_those_of_the_own_group(write: Write, version: int) -> None:
    assert memory_kills() is None
    before = "oom_kill_disable 0\nunder_oom 0" if version == 1 else "low 0\nhigh 4\nmax 12\noom 3"
    write("job/step", "kills", f"{before}\noom_kill 2")
    write("job", "kills", f"{before}\noom_kill 9")
    assert memory_kills() == 2


def test_a_kernel_that_does_not_count_kills(write: Write) -> None:
    write("job/step", "kills", "oom_kill_disable 0\nunder_oom 0")
    assert memory_kills() is None


def test_a_system_without_control_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_group, "_OWN", Path("/nonexistent"))
    assert (lowest_limit("memory"), memory_kills()) == (None, None)
