"""Limits of processes: raised where that is allowed, refused by name and number before a run's directory exists."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.training.health import limits
from lightscale.training.health.limits import THREADS_VARIABLE, Needs, check_limits, require_limits

NEEDS = Needs(local_ranks=2, num_ranks=2, on_gpu=False)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """(soft, hard) by resource; others are unlimited, control groups too, and what is set is written here."""
    monkeypatch.setattr(limits, "_CGROUP", Path("/nonexistent"))
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


def test_all_limits_that_are_too_low_are_named_together(limited: dict[int, tuple[int, int]]) -> None:
    limited |= {resource.RLIMIT_NOFILE: (64, 100), resource.RLIMIT_AS: (1 << 30, 1 << 30)}
    with pytest.raises(UserError) as refused:
        require_limits(NEEDS)
    first, second = str(refused.value).splitlines()
    assert first == "limit: open files: 64; expected at least 184, by `ulimit -n 184`"
    assert second.startswith("limit: address space of a process: 1.07 GB; expected at least 2.83 GB, by `ulimit -v ")
    assert limited[resource.RLIMIT_NOFILE] == (64, 100)


def test_threads_of_an_ordinary_user_are_counted(
    limited: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", os.getuid if os.getuid() else lambda: 54321)
    limited[resource.RLIMIT_NPROC] = (20, 20)
    (failed,) = [one for one in check_limits(NEEDS) if one.result == "failed"]
    assert failed.check == "limit: threads of the user" and "by `ulimit -u " in failed.right


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


def test_large_models_need_larger_files_and_more_ranks_smaller_ones() -> None:
    config = load("tnl-1b")
    alone, eight = (Needs.of(config, local_ranks=1, num_ranks=ranks, on_gpu=False) for ranks in (1, 8))
    assert alone.file_bytes == pytest.approx(1.0726e9 * 12, rel=1e-3)
    assert eight.file_bytes == alone.file_bytes // 8 and eight.rank_bytes == eight.file_bytes // 12 * 16
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
    [("max", "max", []), ("20000000000", "400", []), ("500000000", "max", ["memory"]), ("max", "100", ["threads"])],
)
def test_limits_of_control_groups_are_those_of_all_around(
    limited: dict[int, tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    memory: str,
    threads: str,
    failed: list[str],
) -> None:
    """The outer group has the lower limit."""
    inner = tmp_path / "groups" / "job" / "step"
    inner.mkdir(parents=True)
    (tmp_path / "own").write_text("3:cpu:/elsewhere\n0::/job/step\n")
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text(f"{memory}\n")
    (inner / "pids.max").write_text("4000\n")
    (inner.parent / "pids.max").write_text(f"{threads}\n")
    monkeypatch.setattr(limits, "_CGROUP", tmp_path / "own")
    monkeypatch.setattr(limits, "_CGROUPS", tmp_path / "groups")
    found = [one for one in check_limits(NEEDS) if one.result == "failed"]
    assert [one.check for one in found] == [f"limit: {name} of the control group" for name in failed]
    assert all(str(inner.parent) in one.found and one.blames_host for one in found)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_little_shared_memory_is_a_warning_with_gpus(
    limited: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    needs = Needs(local_ranks=8, num_ranks=8, on_gpu=on_gpu)
    warned = [one for one in check_limits(needs) if one.result == "warning"]
    assert [one.check for one in warned] == (["shared memory"] if on_gpu else [])
    require_limits(needs)
