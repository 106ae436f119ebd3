"""Limits of the operating system on processes, and the needs of the ranks of one host.

A limit that is met within a run looks like another fault: an abort, a connection that closes, a file that ends. So the
needs are compared at every start and by ``lightscale doctor``. A soft limit is raised as far as the hard one allows.

Needs of a rank of a small model on CPUs: 123 open files and 11 for each other rank, 70 threads, 2.5 GB of address
space, 0.9 GB of it data, and 200 MB of memory; of its launcher: 21 open files and 4 for each rank, 410 MB. Most are
rounded up. (Measured on 28 November 2026, torch 2.13, a 2-core x86-64 machine: peaks in /proc of ``lightscale train``
on 1 to 8 ranks; of data on 2.)
"""

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypedDict

import psutil

from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.files import size_text
from lightscale.models.adapters import trained_shapes
from lightscale.parallel.rendezvous.gate import MOST_PENDING
from lightscale.training.health.check_result import CheckResult
from lightscale.training.health.control_group import lowest_limit
from lightscale.training.optimizer.registry import full_checkpoint_bytes, held_bytes

_FILES, _FILES_PER_RANK = 160, 12
_LAUNCHER_FILES, _LAUNCHER_FILES_PER_RANK = 64, 8
_GATE_FILES_PER_RANK = 3
# Two threads compute with OpenMP, forward and backward, each with its own pool.
_THREADS, _POOLS = 80, 2
_ADDRESSES_BYTES, _DATA_BYTES = 2_700 << 20, 1_000 << 20
_LEAST_FILE_BYTES = 2 << 20
_RANK_BYTES, _LAUNCHER_BYTES = 200 << 20, 400 << 20
_SHARED_BYTES = 64 << 20
_SHARED_MEMORY, _INFINIBAND = Path("/dev/shm"), Path("/sys/class/infiniband")
_KERNEL, _LOAD = Path("/proc/sys/kernel"), Path("/proc/loadavg")
# In fp32, beside the weights and the optimizer's state.
_GRADIENT_BYTES = 4
# Of an export in bf16, whose files have at most as many bytes.
_EXPORTED_BYTES, _EXPORT_FILE_BYTES = 2, 5_000_000_000
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
    """Of the weights, gradients and optimizer state of one rank, in memory of the host."""
    are_running: bool = False
    """Whether this process is one of the ranks."""

    @property
    def num_threads(self) -> int:
        """Threads of all ranks of the host."""
        return self.local_ranks * (_THREADS + _POOLS * computing_threads(self.local_ranks))

    @classmethod
    def of(
        cls, config: RunConfig | None, *, local_ranks: int, num_ranks: int, on_gpu: bool, are_running: bool = False
    ) -> "Needs":
        """Needs of training ``config``; None: of any command, so those of the processes themselves."""
        shapes = {} if config is None else trained_shapes(config)
        parameters = sum(prod(shape) for shape in shapes.values())
        saved = 0 if config is None else full_checkpoint_bytes(config)
        held = 0 if config is None else held_bytes(config) + parameters * _GRADIENT_BYTES
        has_exports = config is not None and config.checkpoint.export_every is not None
        exported = min(parameters * _EXPORTED_BYTES, _EXPORT_FILE_BYTES) if has_exports else 0
        return cls(
            local_ranks=local_ranks,
            num_ranks=num_ranks,
            on_gpu=on_gpu,
            file_bytes=max(saved // num_ranks, exported),
            rank_bytes=0 if on_gpu else held // num_ranks,
            are_running=are_running,
        )


class _OfBytes(TypedDict):
    text: Callable[[int], str]
    unit: int


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


_IN_KIB: _OfBytes = {"text": size_text, "unit": 1024}


def check_limits(needs: Needs) -> list[CheckResult]:
    """A result for each limit, after raising soft limits that are too low."""
    return [
        *(_check(limit) for limit in _limits(needs)),
        *_check_endless(needs),
        *_check_machine(needs),
        *_check_cgroup(needs),
        *_check_shared_memory(needs),
    ]


def require_limits(needs: Needs) -> None:
    """Raise ``UserError`` with every limit that is too low, and check the number of threads of each rank."""
    if (threads := os.environ.get(THREADS_VARIABLE)) and not _is_count(threads):
        raise UserError(
            f"environment variable {THREADS_VARIABLE} = {threads}: expected a number of threads; unset it, or use 1"
        )
    if failed := [one for one in check_limits(needs) if one.result == "failed"]:
        raise UserError("\n".join(f"{one.check}: {one.found}; expected {one.right}" for one in failed))


def require_file_size(num_bytes: int, remedy: str) -> None:
    """Raise ``UserError`` with `remedy` if this process may not write a file of `num_bytes`."""
    limit = _Limit(name="size of a file", resource=resource.RLIMIT_FSIZE, option="-f", needed=num_bytes, **_IN_KIB)
    if (found := _check(limit)).result == "failed":
        raise UserError(f"{found.check}: {found.found}; expected {found.right}; or {remedy}")


def computing_threads(local_ranks: int) -> int:
    """Threads of a rank's pool for tensors on CPUs: of the user's choice, else an equal share of the cores."""
    if chosen := os.environ.get(THREADS_VARIABLE):
        # A number for each nested level, of which there is one.
        return int(chosen.partition(",")[0]) if _is_count(chosen) else 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_ranks)


def _limits(needs: Needs) -> Iterator[_Limit]:
    # Connections of NCCL are fewer: each rank has neighbours, not all others.
    peers = 0 if needs.on_gpu else needs.num_ranks
    files = max(_FILES + _FILES_PER_RANK * peers, _LAUNCHER_FILES + _LAUNCHER_FILES_PER_RANK * needs.local_ranks)
    if needs.num_ranks > needs.local_ranks:
        # Of the host that has the store: the store's sockets, and the gate's before it, also for strangers.
        files += _GATE_FILES_PER_RANK * needs.num_ranks + MOST_PENDING
    yield _Limit(name="open files", resource=resource.RLIMIT_NOFILE, option="-n", needed=files)
    if os.geteuid() != 0:
        # Root is exempt. All threads of the user count.
        threads = _other_threads(needs) + needs.num_threads
        yield _Limit(name="threads of the user", resource=resource.RLIMIT_NPROC, option="-u", needed=threads)
    yield _Limit(
        name="size of a file",
        resource=resource.RLIMIT_FSIZE,
        option="-f",
        needed=max(needs.file_bytes, _LEAST_FILE_BYTES),
        **_IN_KIB,
    )
    if not needs.on_gpu:
        yield _Limit(
            name="address space of a process",
            resource=resource.RLIMIT_AS,
            option="-v",
            needed=_ADDRESSES_BYTES + needs.rank_bytes,
            **_IN_KIB,
        )
        yield _Limit(
            name="data of a process",
            resource=resource.RLIMIT_DATA,
            option="-d",
            needed=_DATA_BYTES + needs.rank_bytes,
            **_IN_KIB,
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


def _check_endless(needs: Needs) -> Iterator[CheckResult]:
    """Limits below which no number is enough: a warning, after raising them to the hard ones."""
    endless: list[tuple[str, int, str, Callable[[int], str], str]] = [
        ("CPU time of a process", resource.RLIMIT_CPU, "-t", lambda seconds: f"{seconds:,} s", "ranks are killed at it")
    ]
    # Root is exempt.
    if needs.on_gpu and needs.num_ranks > needs.local_ranks and os.geteuid() != 0 and _has_infiniband():
        reason = "NCCL registers its buffers with InfiniBand"
        endless.append(("locked memory", resource.RLIMIT_MEMLOCK, "-l", size_text, reason))
    for name, which, option, text, reason in endless:
        soft, hard = resource.getrlimit(which)
        if soft != hard:
            resource.setrlimit(which, (hard, hard))
        is_enough = hard == resource.RLIM_INFINITY
        yield CheckResult(
            check=f"limit: {name}",
            result="ok" if is_enough else "warning",
            found="unlimited" if is_enough else text(hard),
            right="" if is_enough else f"unlimited, by `ulimit {option} unlimited`: {reason}",
        )


def _has_infiniband() -> bool:
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


def _check_machine(needs: Needs) -> Iterator[CheckResult]:
    """The threads of all users: a large OMP_NUM_THREADS may ask for more than a kernel has."""
    try:
        most, name = min((int((_KERNEL / name).read_text()), name) for name in ("threads-max", "pid_max"))
        used = int(_LOAD.read_text().split()[3].partition("/")[2])
    except (OSError, ValueError, LookupError):
        return
    needed = used + needs.num_threads
    yield CheckResult(
        check="limit: threads of the machine",
        result="ok" if most >= needed else "failed",
        found=f"{most:,} (kernel.{name}), {used:,} in use",
        right="" if most >= needed else f"at least {needed:,}, or a smaller {THREADS_VARIABLE}",
        blames_host=most < needed,
    )


def _check_cgroup(needs: Needs) -> Iterator[CheckResult]:
    """Limits of the control group, as of a container or a job: of all its processes together."""
    for name, controller, needed, text in (
        ("memory", "memory", _LAUNCHER_BYTES + needs.local_ranks * (_RANK_BYTES + needs.rank_bytes), size_text),
        ("threads", "pids", needs.num_threads, str),
    ):
        if (lowest := lowest_limit(controller)) is None:
            continue
        path, value = lowest
        is_enough = value >= needed
        yield CheckResult(
            check=f"limit: {name} of the control group",
            result="ok" if is_enough else "failed",
            found=f"{text(value)} ({path})",
            right="" if is_enough else f"at least {text(needed)}, by the settings of the job or container",
            blames_host=not is_enough,
        )


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


def _other_threads(needs: Needs) -> int:
    """Threads of the user's processes besides the ranks."""
    user, count = os.geteuid(), 0
    # Ranks of one host have one parent.
    parent = os.getppid() if needs.are_running else None
    for process in psutil.process_iter(["ppid", "uids", "num_threads"]):
        uids = process.info["uids"]
        if uids is not None and uids.real == user and process.info["ppid"] != parent:
            count += process.info["num_threads"] or 0
    return count


def _is_count(text: str) -> bool:
    # OpenMP takes a number for each nested level.
    return all(part.strip().isdecimal() and int(part) > 0 for part in text.split(","))
