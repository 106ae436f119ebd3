"""Limits of processes: raised where that is allowed, refused by name and number before a run's directory exists."""

import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.parallel.rendezvous.gate import MOST_PENDING
from lightscale.training.health import control_group, limits
from lightscale.training.health.limits import (
    THREADS_VARIABLE,
    Needs,
    check_limits,
    require_file_size,
    require_limits,
)
from lightscale.training.preflight import check_machine

NEEDS = Needs(local_ranks=2, num_ranks=2, on_gpu=False)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """(soft, hard) by resource; others are unlimited, control groups too, and what is set is written here."""
    monkeypatch.setattr(control_group, "_OWN", Path("/nonexistent"))
    for name in ("_KERNEL", "_INFINIBAND"):
        monkeypatch.setattr(limits, name, Path("/nonexistent"))
    monkeypatch.setenv(THREADS_VARIABLE, "1")
    found: dict[int, tuple[int, int]] = {}
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: found.get(which, infinite))
    monkeypatch.setattr(resource, "setrlimit", found.__setitem__)
    return found


def test_unlimited_processes_pass(limited: dict[int, tuple[int, int]]) -> None:
    require_limits(NEEDS)
    assert {one.result for one in check_limits(NEEDS)} == {"ok"} and limited == {}


def test_a_soft_limit_is_raised_and_a_sufficient_one_stays(limited: dict[int, tuple[int, int]]) -> None:
    limited[resource.RLIMIT_NOFILE] = (64, 4096)
    limited[resource.RLIMIT_FSIZE] = (1 << 30, 1 << 40)
    require_limits(NEEDS)
    assert limited == {resource.RLIMIT_NOFILE: (184, 4096), resource.RLIMIT_FSIZE: (1 << 30, 1 << 40)}


def test_cpu_time_is_raised_as_far_as_it_may_be(limited: dict[int, tuple[int, int]]) -> None:
    """No number is enough for a run: what is left is a warning."""
    limited[resource.RLIMIT_CPU] = (60, 3600)
    (warned,) = [one for one in check_limits(NEEDS) if one.result != "ok"]
    assert (warned.check, warned.result, warned.found) == ("limit: CPU time of a process", "warning", "3,600 s")
    assert limited[resource.RLIMIT_CPU] == (3600, 3600)
    limited[resource.RLIMIT_CPU] = (60, resource.RLIM_INFINITY)
    assert {one.result for one in check_limits(NEEDS)} == {"ok"}


@pytest.mark.parametrize(
    ("changed", "is_warned"),
    [({}, True), ({"num_ranks": 2}, False), ({"on_gpu": False}, False), ({"devices": 0}, False), ({"user": 0}, False)],
)
def test_locked_memory_is_for_hosts_with_infiniband(
    limited: dict[int, tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    changed: dict[str, int],
    is_warned: bool,
) -> None:
    given = {"num_ranks": 4, "on_gpu": True, "devices": 1, "user": 1000} | changed
    for number in range(given["devices"]):
        (tmp_path / f"mlx5_{number}").mkdir()
    monkeypatch.setattr(limits, "_INFINIBAND", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: given["user"])
    limited[resource.RLIMIT_MEMLOCK] = (1 << 16, 1 << 23)
    needs = Needs(local_ranks=2, num_ranks=given["num_ranks"], on_gpu=bool(given["on_gpu"]))
    warned = [one for one in check_limits(needs) if one.result == "warning" and one.check == "limit: locked memory"]
    assert [one.found for one in warned] == ["8.39 MB"] * is_warned


def test_all_limits_that_are_too_low_are_named_together(limited: dict[int, tuple[int, int]]) -> None:
    limited |= {resource.RLIMIT_NOFILE: (64, 100), resource.RLIMIT_AS: (1 << 30, 1 << 30)}
    with pytest.raises(UserError) as refused:
        require_limits(NEEDS)
    first, second = str(refused.value).splitlines()
    assert first == "limit: open files: 64; expected at least 184, by `ulimit -n 184`"
    assert second.startswith("limit: address space of a process: 1.07 GB; expected at least 2.83 GB, by `ulimit -v ")
    assert limited[resource.RLIMIT_NOFILE] == (64, 100)


def test_the_gate_of_several_hosts_has_sockets_too(limited: dict[int, tuple[int, int]]) -> None:
    """Three for each rank, and those that strangers may hold."""
    limited[resource.RLIMIT_NOFILE] = (1024, 1024)
    require_limits(Needs(local_ranks=8, num_ranks=8, on_gpu=True))
    with pytest.raises(UserError, match=rf"expected at least {160 + 3 * 512 + MOST_PENDING}, by"):
        require_limits(Needs(local_ranks=8, num_ranks=512, on_gpu=True))


def test_threads_of_an_ordinary_user_are_counted(
    limited: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", os.getuid if os.getuid() else lambda: 54321)
    limited[resource.RLIMIT_NPROC] = (20, 20)
    (failed,) = [one for one in check_limits(NEEDS) if one.result == "failed"]
    assert failed.check == "limit: threads of the user" and "by `ulimit -u " in failed.right


def test_the_ranks_themselves_are_no_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the threads already that they need."""
    own, parent, user = os.getpid(), os.getppid(), os.geteuid()

    def process(ppid: int, threads: int, uid: int = user) -> SimpleNamespace:
        uids = SimpleNamespace(real=uid)
        return SimpleNamespace(info={"ppid": ppid, "uids": uids, "num_threads": threads})

    processes = [
        process(parent, 60),
        process(parent, 62),
        process(1, 7),
        process(own, 5),
        process(1, 900, uid=user + 1),
    ]
    monkeypatch.setattr(limits.psutil, "process_iter", lambda names: processes)
    assert limits._other_threads(NEEDS) == 60 + 62 + 7 + 5
    assert limits._other_threads(replace(NEEDS, are_running=True)) == 7 + 5


def test_threads_of_pools_are_counted(limited: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal shares of the cores, unless the user chooses; more than the kernel has is refused with the number."""
    assert NEEDS.num_threads == 2 * (80 + 2)
    monkeypatch.delenv(THREADS_VARIABLE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(48)), raising=False)
    assert NEEDS.num_threads == 2 * (80 + 2 * 24)
    monkeypatch.setenv(THREADS_VARIABLE, "100000,2")
    assert NEEDS.num_threads == 2 * (80 + 2 * 100_000)


@pytest.mark.parametrize("threads", [1, 10_000])
def test_threads_of_the_machine(
    limited: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, threads: int
) -> None:
    for name, content in (
        ("threads-max", "192730\n"),
        ("pid_max", "32768\n"),
        ("loadavg", "11.36 18.40 23.11 5/374 9\n"),
    ):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(limits, "_KERNEL", tmp_path)
    monkeypatch.setattr(limits, "_LOAD", tmp_path / "loadavg")
    monkeypatch.setenv(THREADS_VARIABLE, str(threads))
    if threads == 1:
        require_limits(NEEDS)
        return
    with pytest.raises(UserError) as refused:
        require_limits(NEEDS)
    found = "limit: threads of the machine: 32,768 (kernel.pid_max), 374 in use"
    assert str(refused.value) == f"{found}; expected at least 40,534, or a smaller OMP_NUM_THREADS"


@pytest.mark.parametrize(
    ("value", "is_taken"), [("4", True), ("4,2", True), ("abc", False), ("0", False), ("-1", False)]
)
def test_numbers_of_threads(
    limited: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch, value: str, is_taken: bool
) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, value)
    if is_taken:
        require_limits(NEEDS)
        return
    with pytest.raises(UserError, match=f"variable {THREADS_VARIABLE} = {value}: expected a number of threads"):
        require_limits(NEEDS)


@pytest.mark.parametrize(("overrides", "files"), [([], 172), (["parallel.sequence=4", "parallel.tensor=2"], 256)])
def test_a_machine_alone_is_checked_for_one_replica(
    limited: dict[int, tuple[int, int]], tmp_path: Path, overrides: list[str], files: int
) -> None:
    limited[resource.RLIMIT_NOFILE] = (64, 100)
    found = check_machine(load("tnl-tiny", [*overrides, "train.device=cpu"]), tmp_path)
    (failed,) = [one for one in found if one.check == "limit: open files"]
    assert failed.right == f"at least {files}, by `ulimit -n {files}`"


def test_a_file_that_may_not_be_so_large(limited: dict[int, tuple[int, int]]) -> None:
    limited[resource.RLIMIT_FSIZE] = (1 << 10, 1 << 20)
    require_file_size(1 << 20, "…")
    assert limited[resource.RLIMIT_FSIZE] == (1 << 20, 1 << 20)
    with pytest.raises(UserError, match=r"1\.05 MB; expected at least 2\.1 MB, by `ulimit -f 2048`; or use less"):
        require_file_size(2 << 20, "use less")


def test_large_models_need_larger_files_and_more_ranks_smaller_ones() -> None:
    config = load("tnl-1b")
    alone, eight = (Needs.of(config, local_ranks=1, num_ranks=ranks, on_gpu=False) for ranks in (1, 8))
    assert alone.file_bytes == pytest.approx(1.0726e9 * 12, rel=1e-3)
    assert eight.file_bytes == alone.file_bytes // 8 and eight.rank_bytes == eight.file_bytes // 12 * 16
    exported = load("tnl-1b", ["checkpoint.export_every=1000"])
    assert Needs.of(exported, local_ranks=8, num_ranks=8, on_gpu=False).file_bytes == pytest.approx(2.145e9, rel=1e-3)
    lion = Needs.of(load("tnl-1b", ["optimizer.name=lion"]), local_ranks=1, num_ranks=1, on_gpu=False)
    assert (lion.file_bytes * 12, lion.rank_bytes * 16) == (alone.file_bytes * 8, alone.rank_bytes * 12)
    # Weights and moments on GPUs take no memory of the host.
    assert Needs.of(config, local_ranks=1, num_ranks=1, on_gpu=True).rank_bytes == 0


@pytest.mark.parametrize("limit", ["-n 40", "-v 2000000", "-f 300"])
def test_a_start_below_a_limit_leaves_nothing_behind(tmp_path: Path, tiny_run: Path, limit: str) -> None:
    """A real limit, of the shell that starts the command."""
    (tmp_path / "a.txt").write_text("some words\n" * 400)
    words = ["--out", str(tmp_path / "store"), "--tokenizer", "ascii", "--validation", "0"]
    assert main(["data", "prepare", str(tmp_path / "a.txt"), *words]) == 0
    command = f"ulimit {limit}; exec '{sys.executable}' -m lightscale train '{tiny_run}' --run run --processes 2"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 78, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: limit: ") and f"by `ulimit {limit.split()[0]} " in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("memory", "threads", "failed"),
    [(None, None, []), (20 * 10**9, 400, []), (500_000_000, None, ["memory"]), (None, 100, ["threads"])],
)
def test_limits_of_control_groups(
    limited: dict[int, tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    memory: int | None,
    threads: int | None,
    failed: list[str],
) -> None:
    lowest = {"memory": memory, "pids": threads}
    monkeypatch.setattr(limits, "lowest_limit", lambda name: lowest[name] and (Path("/groups/job"), lowest[name]))
    found = [one for one in check_limits(NEEDS) if one.result == "failed"]
    assert [one.check for one in found] == [f"limit: {name} of the control group" for name in failed]
    assert all("(/groups/job)" in one.found and one.blames_host for one in found)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_little_shared_memory_is_a_warning_with_gpus(
    limited: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    needs = Needs(local_ranks=8, num_ranks=8, on_gpu=on_gpu)
    warned = [one for one in check_limits(needs) if one.result == "warning"]
    assert [one.check for one in warned] == (["shared memory"] if on_gpu else [])
    require_limits(needs)
