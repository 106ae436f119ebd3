"""Faults of what is around a running job: it goes on, or starts its ranks again, with the losses of an undisturbed run.

The tables in docs/reference/faults.md say what happens at each of them.
"""

import contextlib
import fcntl
import os
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from lightscale.launch.launcher.rank import rank_of
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics
from lightscale.training.health.fault_injection import fault_file

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "drawing.py")))
pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 400.0
STEPS = 24
# Between the checkpoints of steps 8 and 16.
STEP = 10
HANG_TIMEOUT_S = 8.0
CONFIG = f"""
extends = ["{ROOT}/tests/helpers/small-run.toml"]
[train]
steps = {STEPS}
[parallel]
sequence = 2
[checkpoint]
every = 8
[restart]
hang_timeout_s = {HANG_TIMEOUT_S}
"""
# Moves the wall clock by the seconds in a file, for all that is preloaded with it, and leaves the monotonic one alone,
# as a correction of the clock does. (libfaketime's sleeps fail when its clock goes back.)
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile long *offset;
__attribute__((constructor)) static void begin(void) {
  int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
  void *memory = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
  if (memory != MAP_FAILED) offset = memory;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*next)(clockid_t, struct timespec *);
  if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
  int code = next(clock, now);
  if (!code && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
  return code;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  int code = clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return code;
}
time_t time(time_t *now) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (now) *now = exact.tv_sec;
  return exact.tv_sec;
}
"""


class Job:
    """`lightscale train` with two ranks; after the step `STEP` each takes seconds, until `end`."""

    def __init__(self, folder: Path, path: str | Path, *words: str, is_held: bool = True, **how: Any) -> None:
        self.run = RunDirectory(folder / path)
        self._faults = folder / f"{self.run.path.name}.faults"
        self._faults.mkdir()
        self.log = folder / f"{self.run.path.name}.log"
        if is_held:
            fault_file(self._faults, 0).write_text(f"slow=3@step:begin#{STEP + 1}")
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "LIGHTSCALE_FAULT": f"@{self._faults}",
            "XDG_CONFIG_HOME": str(folder / "no-settings"),
            **how.pop("variables", {}),
        }
        command = [sys.executable, "-P", "-m", "lightscale", "train", "run.toml", *words, "--run", str(self.run.path)]
        with self.log.open("wb") as log:
            outputs = {"stdout": log, "stderr": log, **how}
            self.process = subprocess.Popen([*command, "--processes", "2"], cwd=folder, env=environment, **outputs)

    def reach(self, step: int = STEP) -> None:
        self.wait(lambda: self.run.progress()[0] >= step)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()[-6000:]
            time.sleep(0.05)

    def rank(self, number: int) -> psutil.Process:
        ranks = psutil.Process(self.process.pid).children()
        (found,) = [rank for rank in ranks if rank_of(rank) == number]
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.run.events) if event["event"] == name]

    def end(self) -> int:
        """The exit code, once steps are fast again."""
        fault_file(self._faults, 0).unlink(missing_ok=True)
        return self.process.wait(TIMEOUT_S)

    def trajectory(self) -> dict[int, tuple[Any, ...]]:
        lines = read_metrics(self.run.metrics)
        return {line["step"]: tuple(line[key] for key in ("tokens", "loss", "grad_norm", "lr")) for line in lines}


StartJob = Callable[..., Job]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_store: Callable[..., None]) -> Path:
    """With run.toml and its store."""
    folder = tmp_path_factory.mktemp("faults")
    write_store(folder / "store", 300, text=np.random.default_rng(0).integers(1, 300, 20000))
    (folder / "run.toml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[int, tuple[Any, ...]]:
    job = Job(folder, "undisturbed", is_held=False)
    assert job.end() == 0, job.log.read_text()
    assert len(job.trajectory()) == STEPS
    return job.trajectory()


@pytest.fixture
def start(folder: Path, request: pytest.FixtureRequest) -> Iterator[StartJob]:
    jobs = []

    def start(*words: str, path: str | Path | None = None, **how: Any) -> Job:
        jobs.append(Job(folder, path or request.node.name, *words, **how))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.kill()
        job.process.wait()


@pytest.mark.long
def test_nobody_reads(start: StartJob, undisturbed: dict[int, tuple[Any, ...]]) -> None:
    """stdout is a pipe that is full, stderr one whose reader has ended."""
    (unread, full), (ended, closed) = os.pipe(), os.pipe()
    # What it has room for is less than a run says.
    fcntl.fcntl(full, fcntl.F_SETPIPE_SZ, 4096)
    os.write(full, bytes(4096))
    job = start("--json", stdout=full, stderr=closed)
    os.close(full)
    os.close(closed)
    job.reach()
    os.close(ended)
    assert job.end() == 0
    assert job.trajectory() == undisturbed
    os.close(unread)


@contextlib.contextmanager
def unwritable(run: RunDirectory) -> Iterator[None]:
    """Nothing in the directory can be written, made or removed, not even by root."""

    def change(sign: str) -> None:
        # Links and what ends meanwhile cannot be changed.
        subprocess.run(["chattr", "-R", f"{sign}i", str(run.path)], capture_output=True, check=False)

    change("+")
    try:
        # Where the file system has no such flag, or a newer kernel's rules do not hold.
        with contextlib.suppress(OSError):
            (run.path / "probe").touch()
        if (run.path / "probe").exists():
            pytest.skip("this file system cannot make a directory unwritable for root")
        yield
    finally:
        change("-")


@pytest.mark.long
def test_the_run_cannot_be_written_for_a_while_and_a_rank_dies(
    start: StartJob, undisturbed: dict[int, tuple[Any, ...]], needs: Callable[..., None]
) -> None:
    """As with lost permissions, or a disk that is read-only: records wait, and so does the launcher."""
    needs("chattr", "root")  # for whom permissions do not hold
    job = start("checkpoint.every=8")
    job.reach()
    with unwritable(job.run):
        # Some steps, of which nothing can be seen: the ranks' output is there too.
        time.sleep(5)
        job.rank(1).kill()
        job.wait(lambda: "waiting until the disk accepts writes" in job.log.read_text())
        assert job.run.progress()[0] <= STEP + 1
    assert job.end() == 0, job.log.read_text()
    assert job.trajectory() == undisturbed
    (restart,) = job.events("restart")
    assert restart["checkpoint"] == 8
    assert "Traceback" not in job.log.read_text()
    assert "Logging error" not in job.log.read_text()


@pytest.mark.long
@pytest.mark.parametrize("step_s", drawing.some("clock", [-86400, 86400], 1))
def test_the_clock_is_set_and_a_rank_dies(
    start: StartJob, undisturbed: dict[int, tuple[Any, ...]], tmp_path: Path, needs: Callable[..., None], step_s: int
) -> None:
    needs("cc")
    source, library, offset = (tmp_path / name for name in ("clock.c", "clock.so", "offset"))
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    offset.write_bytes(struct.pack("l", 0))
    # The deadline is in an hour, whatever the clock says then.
    variables = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset)}
    job = start("--stop-after", "1h", variables=variables)
    job.reach()
    with offset.open("r+b") as file:
        file.write(struct.pack("l", step_s))
    job.reach(STEP + 2)
    job.rank(1).kill()
    assert job.end() == 0, job.log.read_text()
    assert job.trajectory() == undisturbed
    times = [event["time"][:10] for event in job.events("start")]
    assert times[0] != times[1], "the clock was not set"


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [HANG_TIMEOUT_S / 2, None])
def test_a_rank_is_stopped(start: StartJob, undisturbed: dict[int, tuple[Any, ...]], seconds: float | None) -> None:
    """For a while; for ever."""
    job = start()
    job.reach()
    rank = job.rank(1)
    rank.send_signal(signal.SIGSTOP)
    if seconds is None:
        job.wait(lambda: bool(job.events("restart")))
    else:
        time.sleep(seconds)
        rank.send_signal(signal.SIGCONT)
    assert job.end() == 0, job.log.read_text()
    assert job.trajectory() == undisturbed
    assert len(job.events("restart")) == (seconds is None)


@pytest.mark.soak
def test_all_are_stopped_for_longer_than_a_rank_may_be_silent(
    start: StartJob, undisturbed: dict[int, tuple[Any, ...]]
) -> None:
    """As by a laptop's lid, or a suspended job."""
    job = start()
    job.reach()
    processes = [psutil.Process(job.process.pid), job.rank(0), job.rank(1)]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(2 * HANG_TIMEOUT_S)
    for process in processes:
        process.send_signal(signal.SIGCONT)
    assert job.end() == 0, job.log.read_text()
    assert job.trajectory() == undisturbed
    assert job.events("restart") == []


@pytest.mark.soak
def test_the_store_is_away_for_a_while(
    start: StartJob, undisturbed: dict[int, tuple[Any, ...]], folder: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(folder / "store", store)
    job = start(f"data.store={store}")
    job.reach()
    store.rename(tmp_path / "elsewhere")
    job.reach(STEP + 2)
    (tmp_path / "elsewhere").rename(store)
    assert job.end() == 0, job.log.read_text()
    assert job.trajectory() == undisturbed


@pytest.mark.soak
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_disk_is_full_for_a_while(
    start: StartJob, undisturbed: dict[int, tuple[Any, ...]], small_disk: Path, is_killed: bool
) -> None:
    job = start("checkpoint.keep=2", path=small_disk / f"full-{is_killed}")
    job.reach()
    ballast = small_disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    if is_killed:
        job.rank(1).kill()
        job.wait(lambda: "waiting until the disk accepts writes" in job.log.read_text())
    else:
        job.wait(lambda: "training continues, records are kept in memory" in job.log.read_text())
    ballast.unlink()
    assert job.end() == 0, job.log.read_text()
    assert job.trajectory() == undisturbed
    assert len(job.events("restart")) == is_killed


@pytest.mark.soak
def test_a_limit_of_memory(
    start: StartJob, undisturbed: dict[int, tuple[Any, ...]], needs: Callable[..., None]
) -> None:
    """No byte more for one rank: an error where it asks for some, or a hang where a thread cannot begin."""
    needs("prlimit")
    job = start()
    job.reach()
    rank = job.rank(1)
    subprocess.run(["prlimit", f"--pid={rank.pid}", f"--as={rank.memory_info().vms}"], check=True)
    job.wait(lambda: bool(job.events("restart")))
    assert job.end() == 0, job.log.read_text()
    assert job.trajectory() == undisturbed


@pytest.mark.soak
def test_the_disk_does_not_answer_for_a_while(
    start: StartJob, undisturbed: dict[int, tuple[Any, ...]], tmp_path: Path, needs: Callable[..., None]
) -> None:
    """A frozen file system: writes wait. Longer than a rank may be silent, it is a hang, and the ranks start again."""
    needs("root that may mount", "mkfs.ext4", "fsfreeze")
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    make = f"truncate -s 200M {image} && mkfs.ext4 -q -F {image} && mount -o loop {image} {disk}"
    if subprocess.run(["sh", "-c", make], capture_output=True, check=False).returncode != 0:
        pytest.skip("no file systems in files here (loop devices)")
    try:
        job = start(path=disk / "frozen")
        job.reach()
        subprocess.run(["fsfreeze", "--freeze", str(disk)], check=True)
        try:
            time.sleep(2 * HANG_TIMEOUT_S)
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=True)
        assert job.end() == 0, job.log.read_text()
        assert job.trajectory() == undisturbed
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)
