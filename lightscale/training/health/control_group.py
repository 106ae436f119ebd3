"""Limits of the control groups of this process, as of a container or a job, and processes killed at that of memory.

The kernel has one tree of groups for all controllers (version 2), or one for each (version 1, on older systems).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

_OWN, _TREES = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# By controller: files of the limit, in versions 1 and 2.
_LIMIT_FILES = {"memory": ("memory.limit_in_bytes", "memory.max"), "pids": ("pids.max", "pids.max")}
_KILL_FILES = ("memory.oom_control", "memory.events")
# Where there is no limit, version 1 has the largest number of pages, in bytes.
_NO_LIMIT = 1 << 62


def lowest_limit(controller: str) -> tuple[Path, int] | None:
    """The lowest limit of this process's groups and of those around them, with its file; None: there is none."""
    found = []
    for path in _files(controller, *_LIMIT_FILES[controller]):
        # "max", in version 2, is no number.
        with contextlib.suppress(OSError, ValueError):
            found.append((path, int(path.read_text())))
    return min((pair for pair in found if pair[1] < _NO_LIMIT), key=lambda pair: pair[1], default=None)


def memory_kills() -> int | None:
    """Number of processes of this group that the kernel has killed for want of memory; None: it does not count them."""
    for path in _files("memory", *_KILL_FILES):
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split() for line in path.read_text().splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def _files(controller: str, version_1: str, version_2: str) -> Iterator[Path]:
    """The file of this process's group, then those of the groups around it; in a container some may not exist."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if not controllers:
            tree, file = _TREES, version_2
        elif controller in controllers.split(","):
            tree, file = _TREES / controller, version_1
        else:
            continue
        group = Path(own)
        for one in (group, *group.parents):
            yield tree / one.relative_to("/") / file
