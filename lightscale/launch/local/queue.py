"""The queue: a folder with one file for each job, which processes change one at a time.

    ~/.local/state/lightscale/queue/     or below XDG_STATE_HOME; one for each user
        000012.json                      a job: what it asks for, its phase, its processes
        HOST-gpu-0, HOST-slot-0          locked (flock) by the job that has this GPU, or this slot of a machine without
        lock                             held for moments: by whoever reads several files to change one
        runners.log                      what runners print that is of no job

A home directory may be shared by several machines: then numbers are too, but each machine starts its own jobs only.

GPUs are booked by locks, not by what the files say: the kernel keeps such a lock for as long as a process of the job
lives, whatever happened to its runner or to the files.
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
    """A process of this machine, told from later ones with the same id."""

    id: int
    started: float
    """Seconds from the boot."""
    boot: str

    @classmethod
    def of(cls, process_id: int) -> Self | None:
        """None: it has ended."""
        try:
            return cls(id=process_id, started=started_s(process_id), boot=boot_id())
        except psutil.NoSuchProcess:
            return None

    def is_running(self) -> bool:
        """Whether it still is. One that ended and was not waited for is not."""
        try:
            process = psutil.Process(self.id)
            is_same = abs(started_s(self.id) - self.started) < 1.0 and boot_id() == self.boot
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class Job(_Record):
    """One job, as its file has it."""

    number: int
    host: str
    """The machine whose job it is."""
    order: int
    """The lower one starts first. A job that is queued again gets a new one: it has had its turn."""
    run: Path
    directory: Path
    """Where it was submitted, and runs."""
    gpus: list[str]
    """Those that it may use, by index or UUID."""
    num_gpus: int
    at_once: int
    """Without GPUs: how many jobs may run, this one included."""
    time_s: int | None
    """Time limit."""
    signal_s: int
    is_chain: bool
    after: int | None
    phase: Literal["waiting", "running", "ended"] = "waiting"
    stop: Literal["save", "now"] | None = None
    """It was cancelled."""
    before: int = 0
    """The newest checkpoint when it started."""
    booked: list[str] = []
    """GPUs that it runs on."""
    runner: Process | None = None
    launcher: Process | None = None

    @property
    def is_of_this_machine(self) -> bool:
        """Only then can its processes be looked at."""
        return self.host == socket.gethostname()

    @property
    def has_runner(self) -> bool:
        """Whether somebody waits for its turn, or for its end."""
        return self.runner is not None and self.runner.is_running()

    @property
    def has_launcher(self) -> bool:
        """Whether it is at work, with a runner or not."""
        return self.launcher is not None and self.launcher.is_running()

    def has_progressed(self) -> bool:
        """Whether it brought a checkpoint."""
        return RunDirectory(self.run).newest_checkpoint() > self.before


class Queue:
    """The queue in the folder `path`. What changes it is called within `locked`."""

    def __init__(self, path: Path | None = None) -> None:
        state = os.environ.get("XDG_STATE_HOME")
        self.path = path or Path(state or Path.home() / ".local" / "state").absolute() / "lightscale" / "queue"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else changes the queue meanwhile."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.path / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def jobs(self) -> dict[int, Job]:
        """All jobs by number. A file that is none is set aside and named: it must not stop the others."""
        found = {}
        for path in sorted(self.path.glob("*.json")):
            try:
                job = Job.model_validate_json(path.read_bytes())
                if path != self._path(job.number):
                    raise ValueError(f"it is of job {job.number}")
                found[job.number] = job
            except (ValidationError, ValueError) as error:
                aside = path.with_name(f"{path.name}.damaged")
                path.replace(aside)
                reason = str(error).splitlines()[0]
                print(f"{path}: not a job of the queue ({reason}); set aside as {aside.name}", file=sys.stderr)
        return found

    def job(self, number: int) -> Job | None:
        """One job; None: it has no file, or a damaged one."""
        try:
            return Job.model_validate_json(self._path(number).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, job: Job) -> None:
        """Add or replace `job`."""
        write_atomically(self._path(job.number), job.model_dump_json(indent=1) + "\n")

    def newest_number(self) -> int:
        """The highest that was ever given: its file is kept, also when the job has ended or the file was damaged."""
        names = (path.name.partition(".")[0] for path in self.path.glob("*.json*"))
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def forget_ended(self) -> None:
        """Remove the files of jobs that have ended, but for the newest number."""
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
        """`job` as the last one that waits."""
        order = 1 + max((one.order for one in self.jobs().values()), default=0)
        again = {"phase": "waiting", "order": order, "booked": [], "runner": None, "launcher": None}
        return job.model_copy(update=again)

    def resume(self) -> None:
        """Give a runner to all jobs of this machine that lost theirs: it was killed, or the machine was restarted."""
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
        """Start the process that waits for the turn of `job`; it outlives this one, and the terminal."""
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
        """Whether no job of this machine is before `job`: first in, first out, so that large ones get their turn."""
        jobs = self.jobs()

        def may_start(one: Job) -> bool:
            return one.phase == "waiting" and (one.after not in jobs or jobs[one.after].phase == "ended")

        others = (one for one in jobs.values() if one.host == job.host and one.order < job.order)
        return may_start(job) and not any(map(may_start, others))

    def book(self, job: Job) -> dict[str, int] | None:
        """GPUs for `job`, or a slot, to descriptors of their locks; None: there are not enough now.

        They are free again when each process that has the descriptors has ended or closed them.
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
        """The file of a job that was set aside; None: there is none."""
        path = self._path(number)
        aside = path.with_name(f"{path.name}.damaged")
        return aside if aside.exists() else None

    def _path(self, number: int) -> Path:
        return self.path / f"{number:06d}.json"
