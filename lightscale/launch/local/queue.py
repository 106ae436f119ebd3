"""The queue: a folder with one file per job; processes change it one at a time.

    ~/.local/state/lightscale/queue/     or below XDG_STATE_HOME; one per user
        000012.json                      a job: its request, phase and processes
        HOST-gpu-0, HOST-slot-0          locked (flock) by the job with this GPU, or a slot of a machine without
        lock                             held for a moment while a process reads several files to change one
        runners.log                      output of runners outside of jobs

Several machines may share a home directory and then the numbers too, but each machine starts only its own jobs.

Locks book the GPUs, not the files: the kernel keeps a lock for as long as a process of the job lives, whatever
happens to its runner or to the files.
"""

import contextlib
import fcntl
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from lightscale.runs.processes import boot_id, started_s
from lightscale.runs.run_directory import RunDirectory, write_atomically


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Process(_Record):
    """A process of this machine, distinct from later ones with the same id."""

    id: int
    started: float
    """Start, in seconds from the boot."""
    boot: str

    @classmethod
    def of(cls, process_id: int) -> Self | None:
        """The process with this id; None: it has ended."""
        try:
            return cls(id=process_id, started=started_s(process_id), boot=boot_id())
        except psutil.NoSuchProcess:
            return None

    def is_running(self) -> bool:
        """Whether it still runs; a zombie does not."""
        try:
            process = psutil.Process(self.id)
            is_same = abs(started_s(self.id) - self.started) < 1.0 and boot_id() == self.boot
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class Job(_Record):
    """One job, as stored in its file."""

    number: int
    host: str
    """The machine of the job."""
    order: int
    """Position: the lowest starts first. A requeued job gets a new one."""
    run: Path
    directory: Path
    """Directory where it was submitted and runs."""
    gpus: list[str]
    """GPUs that it may use, by index or UUID."""
    num_gpus: int
    at_once: int
    """Without GPUs: number of concurrent jobs, including this one."""
    time_s: int | None
    """Time limit."""
    signal_s: int
    is_chain: bool
    after: int | None
    phase: Literal["waiting", "running", "ended"] = "waiting"
    stop: Literal["save", "now"] | None = None
    """Kind of its cancellation; None: not cancelled."""
    before: int = 0
    """Step of the newest checkpoint at its start."""
    booked: list[str] = []
    """GPUs that it holds."""
    runner: Process | None = None
    launcher: Process | None = None

    @property
    def is_of_this_machine(self) -> bool:
        """Whether it belongs to this machine, so that its processes are visible."""
        return self.host == socket.gethostname()

    @property
    def has_runner(self) -> bool:
        """Whether a runner waits for its turn or its end."""
        return self.runner is not None and self.runner.is_running()

    @property
    def has_launcher(self) -> bool:
        """Whether its launcher runs, with or without a runner."""
        return self.launcher is not None and self.launcher.is_running()

    def has_progressed(self) -> bool:
        """Whether it has written a checkpoint."""
        return RunDirectory(self.run).newest_checkpoint() > self.before


class Queue:
    """The queue in the folder `path`. Change it only within `locked`."""

    def __init__(self, path: Path | None = None) -> None:
        state = os.environ.get("XDG_STATE_HOME")
        self.path = path or Path(state or Path.home() / ".local" / "state").absolute() / "lightscale" / "queue"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the queue against other changes."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.path / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def jobs(self) -> dict[int, Job]:
        """All jobs by number. A damaged file is set aside and reported, so that it does not stop other jobs."""
        found = {}
        for path in sorted(self.path.glob("*.json")):
            try:
                job = Job.model_validate_json(path.read_bytes())
                if path != self._path(job.number):
                    raise ValueError(f"it belongs to job {job.number}")
                found[job.number] = job
            except (ValidationError, ValueError) as error:
                aside = path.with_name(f"{path.name}.damaged")
                path.replace(aside)
                reason = str(error).splitlines()[0]
                print(f"{path}: not a job of the queue ({reason}); set aside as {aside.name}", file=sys.stderr)
        return found

    def job(self, number: int) -> Job | None:
        """One job; None: its file is missing or damaged."""
        try:
            return Job.model_validate_json(self._path(number).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, job: Job) -> None:
        """Add or replace `job`."""
        write_atomically(self._path(job.number), job.model_dump_json(indent=1) + "\n")

    def newest_number(self) -> int:
        """The highest number ever assigned: its file is kept even when the job has ended or the file is damaged."""
        names = (path.name.partition(".")[0] for path in self.path.glob("*.json*"))
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def forget_ended(self) -> None:
        """Remove the files of ended jobs, except the one with the newest number."""
        newest = self.newest_number()
        for number, job in self.jobs().items():
            if job.phase == "ended" and number != newest:
                self._path(number).unlink()

    def end_waiting(self, run: Path) -> None:
        """Cancel the jobs of `run` that have not started."""
        for job in self.jobs().values():
            if job.run == run and job.phase == "waiting":
                self.write(job.model_copy(update={"phase": "ended"}))

    def queued_again(self, job: Job) -> Job:
        """Requeue `job` as the last waiting one."""
        order = 1 + max((one.order for one in self.jobs().values()), default=0)
        again = {"phase": "waiting", "order": order, "booked": [], "runner": None, "launcher": None}
        return job.model_copy(update=again)

    def resume(self) -> None:
        """Start runners for all jobs of this machine that lost theirs by a kill or a reboot."""
        for job in self.jobs().values():
            if job.phase == "ended" or not job.is_of_this_machine or job.has_runner:
                continue
            # Its launcher was told to save by the end of the runner. What is to be done next shows when it has.
            if job.phase == "running" and job.has_launcher:
                continue
            lost = job.phase == "running"
            is_again = job.run.is_dir() and not (lost and (job.is_chain or job.stop or not job.has_progressed()))
            if not is_again:
                self.write(job.model_copy(update={"phase": "ended"}))
                continue
            self.start_runner(self.queued_again(job) if lost else job)

    def start_runner(self, job: Job) -> None:
        """Start the runner of `job`, which outlives this process and the terminal."""
        errors = str(self.path / "runners.log")
        append, mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        # -P: a folder of the current directory must not be imported in place of a package.
        command = [sys.executable, "-P", "-m", "lightscale.launch.local.runner", str(self.path), str(job.number)]
        process_id = os.posix_spawn(
            sys.executable,
            command,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, errors, append, mode),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            # Of no terminal, whose end would be its own.
            setsid=True,
        )
        self.write(job.model_copy(update={"runner": Process.of(process_id)}))

    def is_turn(self, job: Job) -> bool:
        """Whether `job` is the first of this machine: first in, first out, so that large jobs get their turn."""
        jobs = self.jobs()

        def may_start(one: Job) -> bool:
            return one.phase == "waiting" and (one.after not in jobs or jobs[one.after].phase == "ended")

        others = (one for one in jobs.values() if one.host == job.host and one.order < job.order)
        return may_start(job) and not any(map(may_start, others))

    def book(self, job: Job) -> dict[str, int] | None:
        """Book GPUs, or a slot, for `job`; returns them with the descriptors of their locks. None: not enough free.

        They are free again when all processes with the descriptors have ended or closed them.
        """
        if job.gpus:
            wanted, names = job.num_gpus, {f"gpu-{gpu}": gpu for gpu in job.gpus}
        else:
            wanted, names = 1, {f"slot-{slot}": f"slot {slot}" for slot in range(job.at_once)}
        booked: dict[str, int] = {}
        for name, label in names.items():
            if len(booked) == wanted:
                break
            file = self.path / re.sub(r"[^\w.-]", "_", f"{job.host}-{name}")
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                booked[label] = descriptor
            except BlockingIOError:
                os.close(descriptor)
        if len(booked) == wanted:
            return booked
        for descriptor in booked.values():
            os.close(descriptor)
        return None

    def damaged(self, number: int) -> Path | None:
        """The file of a job that was set aside, or None."""
        path = self._path(number)
        aside = path.with_name(f"{path.name}.damaged")
        return aside if aside.exists() else None

    def _path(self, number: int) -> Path:
        return self.path / f"{number:06d}.json"
