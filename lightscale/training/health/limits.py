"""Limits of the operating system on processes, and the needs of the ranks of one host.

A limit that is met within a run looks like another fault: an abort, a connection that closes, a file that ends. So the
needs are compared at every start and by ``lightscale doctor``. A soft limit is raised as far as the hard one allows.

Needs of a rank of a small model on CPUs: 123 open files and 11 for each other rank, 70 threads, 2.5 GB of address space
and 200 MB of memory; of its launcher: 21 open files and 4 for each rank, 410 MB. Most are rounded up. (Measured on 28
November 2026, torch 2.13, a 2-core x86-64 machine: peaks in /proc of ``lightscale train`` on 1 to 8 ranks.)
"""

import contextlib
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import psutil

from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.files import size_text
from lightscale.models.accounting import parameter_shapes
from lightscale.training.health.check_result import CheckResult

_FILES, _FILES_PER_RANK = 160, 12
_LAUNCHER_FILES, _LAUNCHER_FILES_PER_RANK = 64, 8
_THREADS = 80
_ADDRESSES_BYTES = 2_700 << 20
_LEAST_FILE_BYTES = 2 << 20
_RANK_BYTES, _LAUNCHER_BYTES = 200 << 20, 400 << 20
_SHARED_BYTES = 64 << 20
_CGROUP, _CGROUPS, _SHARED_MEMORY = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), Path("/dev/shm")
# Of a parameter, in fp32: weight and two moments, and in memory the gradient too.
_SAVED_BYTES, _HELD_BYTES = 12, 16
THREADS_VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the processes of one host need."""

    local_ranks: int
    num_ranks: int
    on_gpu: bool
    file_bytes: int = 0
    """Of the largest file that one rank writes."""
    rank_bytes: int = 0
    """Of the weights, gradients and moments of one rank, in memory of the host."""

    @classmethod
    def of(cls, config: RunConfig | None, *, local_ranks: int, num_ranks: int, on_gpu: bool) -> "Needs":
        """Needs of training ``config``; None: of any command, so those of the processes themselves."""
        shapes = {} if config is None else parameter_shapes(config.model)
        share = sum(prod(shape) for shape in shapes.values()) // num_ranks
        return cls(
            local_ranks=local_ranks,
            num_ranks=num_ranks,
            on_gpu=on_gpu,
            file_bytes=share * _SAVED_BYTES,
            rank_bytes=0 if on_gpu else share * _HELD_BYTES,
        )


@dataclass(frozen=True, kw_only=True)
class _Limit:
    name: str
    resource: int
    option: str
    """Of the shell's ``ulimit``."""
    needed: int
    text: Callable[[int], str] = str
    unit: int = 1
    """Bytes in one of ``ulimit``'s units."""


def check_limits(needs: Needs) -> list[CheckResult]:
    """A result for each limit, after raising soft limits that are too low."""
    return [*(_check(limit) for limit in _limits(needs)), *_check_cgroup(needs), *_check_shared_memory(needs)]


def require_limits(needs: Needs) -> None:
    """Raise ``UserError`` with every limit that is too low, and check the number of threads of each rank."""
    if (threads := os.environ.get(THREADS_VARIABLE)) and not _is_count(threads):
        raise UserError(
            f"environment variable {THREADS_VARIABLE} = {threads}: expected a number of threads; unset it, or use 1"
        )
    if failed := [one for one in check_limits(needs) if one.result == "failed"]:
        raise UserError("\n".join(f"{one.check}: {one.found}; expected {one.right}" for one in failed))


def _limits(needs: Needs) -> Iterator[_Limit]:
    # Connections of NCCL are fewer: each rank has neighbours, not all others.
    peers = 0 if needs.on_gpu else needs.num_ranks
    files = max(_FILES + _FILES_PER_RANK * peers, _LAUNCHER_FILES + _LAUNCHER_FILES_PER_RANK * needs.local_ranks)
    yield _Limit(name="open files", resource=resource.RLIMIT_NOFILE, option="-n", needed=files)
    if os.geteuid() != 0:
        # Root is exempt. All threads of the user count.
        threads = _own_threads() + _THREADS * needs.local_ranks
        yield _Limit(name="threads of the user", resource=resource.RLIMIT_NPROC, option="-u", needed=threads)
    yield _Limit(
        name="size of a file",
        resource=resource.RLIMIT_FSIZE,
        option="-f",
        needed=max(needs.file_bytes, _LEAST_FILE_BYTES),
        text=size_text,
        unit=1024,
    )
    if not needs.on_gpu:
        yield _Limit(
            name="address space of a process",
            resource=resource.RLIMIT_AS,
            option="-v",
            needed=_ADDRESSES_BYTES + needs.rank_bytes,
            text=size_text,
            unit=1024,
        )


def _check(limit: _Limit) -> CheckResult:
    soft, hard = resource.getrlimit(limit.resource)
    if _is_below(soft, limit.needed) and not _is_below(hard, limit.needed):
        resource.setrlimit(limit.resource, (limit.needed, hard))
        soft = limit.needed
    check = f"limit: {limit.name}"
    found = "unlimited" if soft == resource.RLIM_INFINITY else limit.text(soft)
    if not _is_below(soft, limit.needed):
        return CheckResult(check=check, result="ok", found=found)
    right = f"at least {limit.text(limit.needed)}, by `ulimit {limit.option} {-(-limit.needed // limit.unit)}`"
    return CheckResult(check=check, result="failed", found=found, right=right, blames_host=True)


def _check_cgroup(needs: Needs) -> Iterator[CheckResult]:
    """Limits of the control group, as of a container or a job: of all its processes together."""
    for name, file, needed, text in (
        ("memory", "memory.max", _LAUNCHER_BYTES + needs.local_ranks * (_RANK_BYTES + needs.rank_bytes), size_text),
        ("threads", "pids.max", needs.local_ranks * _THREADS, str),
    ):
        if (least := _least_of_groups(file)) is None:
            continue
        path, value = least
        is_enough = value >= needed
        yield CheckResult(
            check=f"limit: {name} of the control group",
            result="ok" if is_enough else "failed",
            found=f"{text(value)} ({path})",
            right="" if is_enough else f"at least {text(needed)}, by the settings of the job or container",
            blames_host=not is_enough,
        )


def _least_of_groups(file: str) -> tuple[Path, int] | None:
    """The lowest limit of this process's control group and of those around it (cgroup v2); None: there is none."""
    try:
        own = next(line for line in _CGROUP.read_text().splitlines() if line.startswith("0::"))[3:]
    except (OSError, StopIteration):
        return None
    group, found = Path(own), []
    for one in (group, *group.parents):
        path = _CGROUPS / one.relative_to("/") / file
        with contextlib.suppress(OSError, ValueError):
            found.append((path, int(path.read_text())))
    return min(found, key=lambda pair: pair[1], default=None)


def _check_shared_memory(needs: Needs) -> Iterator[CheckResult]:
    """NCCL's ranks on one host exchange through /dev/shm, of which a container has 64 MB unless told otherwise."""
    if not needs.on_gpu or not _SHARED_MEMORY.is_dir():
        return
    free, needed = shutil.disk_usage(_SHARED_MEMORY).free, needs.local_ranks * _SHARED_BYTES
    yield CheckResult(
        check="shared memory",
        result="ok" if free >= needed else "warning",
        found=f"{size_text(free)} free in {_SHARED_MEMORY}",
        right="" if free >= needed else f"at least {size_text(needed)}, as by `docker run --shm-size`",
    )


def _is_below(value: int, needed: int) -> bool:
    return value != resource.RLIM_INFINITY and value < needed


def _own_threads() -> int:
    own, count = os.geteuid(), 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        if uids is not None and uids.real == own:
            count += process.info["num_threads"] or 0
    return count


def _is_count(text: str) -> bool:
    # OpenMP takes a number for each nested level.
    return all(part.strip().isdecimal() and int(part) > 0 for part in text.split(","))
