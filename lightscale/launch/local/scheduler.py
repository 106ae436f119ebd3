"""The queue of this machine as a `Scheduler` of `launch/scheduler.py`."""

import importlib
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightscale.errors import UserError
from lightscale.launch.local.queue import Job, Queue
from lightscale.launch.scheduler import JobRequest, JobState, Scheduler
from lightscale.launch.settings import LaunchSettings
from lightscale.runs.job_environment import job_id
from lightscale.runs.run_directory import RunDirectory

if TYPE_CHECKING:
    from lightscale.launch.launcher.restart import Nodes

_SMI_TIMEOUT_S = 60.0
# Of a cluster.
_NOT_USED = ("partition", "account", "min_nodes", "options")


class Local(Scheduler):
    """Jobs of one machine that wait for its GPUs; each has its own process that waits for its turn."""

    title = "queue of this machine"

    def require(self, action: Literal["submit", "cancel"]) -> None:
        """See `Scheduler`. Works on every machine."""

    def check_settings(self, settings: LaunchSettings) -> None:
        """See `Scheduler`. The script lists settings that apply only to clusters and are ignored here."""
        if settings.nodes > 1:
            raise UserError(
                f"launch.nodes = {settings.nodes}: --scheduler local runs jobs on this machine only; use --nodes 1, or "
                "a cluster's scheduler"
            )

    def script(self, job: JobRequest) -> str:
        """See `Scheduler`."""
        settings, path = job.settings, job.run.path.absolute()
        gpus = _num_gpus(settings, visible_gpus())
        unused = [f"launch.{name}" for name in _NOT_USED if getattr(settings, name)]
        limit = "no time limit" if settings.time is None else f"time limit {settings.time}"
        lines = [
            "#!/bin/bash",
            f"# One job of the run {path}, created by `lightscale submit --scheduler local`.",
            f"# GPUs: {gpus}; {limit}; output: {path}/logs/local-N.out",
            *([f"# Not used on one machine: {', '.join(unused)}"] if unused else []),
            *settings.setup,
            "export PYTHONSAFEPATH=1",
            *job.exports(),
            # In place of the shell: the runner's signals are for the launcher.
            f"exec {shlex.join(job.command('local'))}",
        ]
        return "".join(f"{line}\n" for line in lines)

    def check(self, job: JobRequest) -> None:
        """See `Scheduler`."""
        gpus, wanted = visible_gpus(), job.settings.gpus_per_node
        if wanted is not None and wanted > len(gpus):
            raise UserError(f"launch.gpus_per_node = {wanted}: this machine has {len(gpus)} GPUs for jobs")

    def submit(self, job: JobRequest, *, after: int | None = None) -> int:
        """See `Scheduler`."""
        settings, queue, gpus = job.settings, Queue(), visible_gpus()
        with queue.locked():
            queue.resume()
            queue.forget_ended()
            number = queue.newest_number() + 1
            queue.start_runner(
                Job(
                    number=number,
                    host=socket.gethostname(),
                    order=1 + max((one.order for one in queue.jobs().values()), default=0),
                    run=job.run.path.absolute(),
                    directory=Path.cwd(),
                    gpus=gpus,
                    num_gpus=_num_gpus(settings, gpus),
                    at_once=settings.jobs_at_once,
                    time_s=settings.time_s,
                    signal_s=settings.signal_s,
                    is_chain=job.is_chain,
                    after=after,
                )
            )
        return number

    def cancel(self, job: JobState, *, now: bool) -> None:
        """See `Scheduler`."""
        queue = Queue()
        with queue.locked():
            found = queue.job(job.number)
            if found is None:
                return
            if found.phase == "waiting":
                # Also one that ran when it was looked at, and was queued again meanwhile.
                queue.write(found.model_copy(update={"phase": "ended"}))
            elif found.phase == "running" and job.phase == "running":
                # One that has begun meanwhile is left alone: only those that wait were meant.
                queue.write(found.model_copy(update={"stop": "now" if now else "save"}))

    def state(self, numbers: Sequence[int]) -> dict[int, JobState]:
        """See `Scheduler`. Also resumes jobs that lost their processes, because no service watches the queue."""
        queue, jobs, newest = Queue(), dict[int, Job](), 0
        if numbers and queue.path.is_dir():
            try:
                with queue.locked():
                    queue.resume()
                    jobs, newest = queue.jobs(), queue.newest_number()
            except OSError as error:
                return {number: JobState(number=number, phase="unknown", text=str(error)) for number in numbers}
        return {number: _state(queue, jobs.get(number), number, newest) for number in numbers}

    def allocation(self, environ: Mapping[str, str], *, min_nodes: int | None, fits: Callable[[int], bool]) -> "Nodes":
        """See `Scheduler`."""
        if job_id(environ) is None:
            raise UserError("--scheduler local: not inside a job of the queue; use `lightscale submit`")
        # Imported here, because it needs torch, which the commands about jobs do not wait for.
        nodes: Nodes = importlib.import_module("lightscale.launch.launcher.torchrun").ThisMachine()
        return nodes

    def logs(self, run: RunDirectory) -> list[Path]:
        """See `Scheduler`."""
        return sorted(run.logs.glob("local-*.out"), key=lambda path: int(path.stem.partition("-")[2]))


def visible_gpus() -> list[str]:
    """GPUs for jobs: those of CUDA_VISIBLE_DEVICES if it is set, else all of this machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False)
    return done.stdout.split() if done.returncode == 0 else []


def _num_gpus(settings: LaunchSettings, gpus: Sequence[str]) -> int:
    """How many a job gets: what it asks for, or one for each rank."""
    return min(settings.gpus_per_node or settings.ranks_per_node, len(gpus))


def _state(queue: Queue, job: Job | None, number: int, newest: int) -> JobState:
    if job is None:
        aside = queue.damaged(number)
        if aside is not None:
            return JobState(number=number, phase="unknown", text=f"its file is damaged: {aside}")
        # One that this queue never gave may be of another machine's.
        return JobState(number=number, phase="ended" if number <= newest else "unknown")
    if job.phase == "ended":
        return JobState(number=number, phase="ended")
    if not job.is_of_this_machine:
        return JobState(number=number, phase="unknown", text=f"on {job.host}")
    if job.phase == "waiting":
        return JobState(number=number, phase="waiting", text="WAITING")
    if not job.has_runner:
        return JobState(number=number, phase="ending", text="ENDING")
    where = f"GPU {','.join(job.booked)}" if job.gpus else ""
    stops = {"save": "saves and exits", "now": "cancelled"}.get(job.stop or "")
    more = ", ".join(filter(None, (where, stops)))
    return JobState(number=number, phase="running", text=f"RUNNING ({more})" if more else "RUNNING")
