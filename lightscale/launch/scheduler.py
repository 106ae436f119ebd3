"""The interface of a scheduler to runs: submit, cancel, state, allocation, logs.

A scheduler is a folder beside this file with a subclass of `Scheduler`, and one line of
`config/schedulers.py`. Commands and
launcher know only this interface:

    lightscale submit   check_settings, script, require, check, submit
    the batch script    lightscale train --scheduler NAME: allocation
    srun-like launchers rank_variables
    every command       job_variables
    lightscale runs     state
    lightscale cancel   state, require, cancel
    lightscale logs     logs, state

Implementations are imported by name when needed. Their modules must not import torch at the top, because `lightscale
runs` must answer within a second.
"""

import importlib
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from lightscale.config.schedulers import SCHEDULERS, default_scheduler
from lightscale.errors import UserError
from lightscale.launch.settings import LaunchSettings
from lightscale.runs.jobs import JobRecord
from lightscale.runs.run_directory import RunDirectory

if TYPE_CHECKING:
    # It imports torch.
    from lightscale.launch.launcher.restart import Nodes

_ENVIRONMENT = {
    "NCCL_DEBUG": "WARN",
    # A rank whose collective failed ends, instead of waiting for ever.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    # The store that torchrun shares between its starts keeps the addresses of dead ranks; ours is new each time.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}

Phase = Literal["waiting", "running", "ending", "ended", "unknown"]


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job, reported by its scheduler."""

    number: int
    phase: Phase
    """unknown: the scheduler does not answer; ended: the job has ended, or the scheduler has forgotten it."""
    text: str = ""
    """State in the scheduler's own terms, for messages."""

    @property
    def is_live(self) -> bool:
        """Whether the job is known to wait or run; False for an unknown state."""
        return self.phase in ("waiting", "running", "ending")

    def __str__(self) -> str:
        return f"{self.number} {self.text or self.phase}"


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job to submit: the launcher of one run, on the nodes of its settings."""

    run: RunDirectory
    settings: LaunchSettings
    is_chain: bool = False
    """Whether the next job of a chain does the remaining steps, not a requeue of this job."""
    allow: Collection[str] = ()
    """Keys that may differ from those of the resumed run; see ``lightscale train --allow-change``."""

    @property
    def script(self) -> Path:
        """The file with the text from `Scheduler.script`, written before `Scheduler.submit`."""
        return self.run.path / "job.sh"

    def command(self, scheduler: str) -> list[str]:
        """The command of the run's launcher in a job of `scheduler`."""
        path = self.run.path.absolute()
        command = [sys.executable, "-m", "lightscale", "train", str(path / self.run.config.name), "--run", str(path)]
        command += ["--scheduler", scheduler, "--processes", str(self.settings.ranks_per_node)]
        if self.settings.min_nodes is not None:
            command += ["--min-nodes", str(self.settings.min_nodes)]
        return command + [f"--allow-change={key}" for key in sorted(self.allow)]

    def exports(self) -> Iterator[str]:
        """Shell lines that set variables for the ranks; variables that are already set take precedence."""
        settings = self.settings
        values: dict[str, str | int] = dict(_ENVIRONMENT)
        if settings.cpus_per_node is not None:
            values["OMP_NUM_THREADS"] = str(max(1, settings.cpus_per_node // settings.ranks_per_node))
        values |= settings.environment
        for name, value in values.items():
            escaped = re.sub(r'(["\\$`}])', r"\\\1", str(value))
            yield f'export {name}="${{{name}:-{escaped}}}"'
        if "OMP_NUM_THREADS" not in values:
            yield "# OMP_NUM_THREADS, where it is not set: the cores of a node over its ranks."


class Scheduler(ABC):
    """One kind of scheduler, without state. All methods raise UserError for mistakes of the user."""

    title: ClassVar[str]
    """For messages."""
    variables_prefix: ClassVar[str | None] = None
    """Prefix of the variables that it sets for the processes of a job."""

    @abstractmethod
    def require(self, action: Literal["submit", "cancel"]) -> None:
        """Refuse `action` on a machine that cannot do it, such as one without the scheduler's commands."""

    @abstractmethod
    def check_settings(self, settings: LaunchSettings) -> None:
        """Refuse settings that this scheduler does not support, without asking the cluster."""

    @abstractmethod
    def script(self, job: JobRequest) -> str:
        """The text of a job's script, which starts ``lightscale train --scheduler NAME`` for the run."""

    @abstractmethod
    def check(self, job: JobRequest) -> None:
        """Ask the scheduler whether it accepts the job, without writing or submitting anything."""

    @abstractmethod
    def submit(self, job: JobRequest, *, after: int | None = None) -> int:
        """Submit `job.script`; returns the job's number. `after`: a job to wait for, whatever its result."""

    @abstractmethod
    def cancel(self, job: JobState, *, now: bool) -> None:
        """End a waiting job, or a running one after its save, or `now`. The job is not requeued."""

    @abstractmethod
    def state(self, numbers: Sequence[int]) -> dict[int, JobState]:
        """The states of the jobs, from one query; "unknown" if the scheduler does not answer."""

    @abstractmethod
    def allocation(self, environ: Mapping[str, str], *, min_nodes: int | None, fits: Callable[[int], bool]) -> "Nodes":
        """The nodes of the job described by `environ`, on which the launcher starts ranks.

        Args:
            min_nodes: with fewer the launcher exits; None: half of the job's first nodes.
            fits: whether the run divides over a number of nodes.
        """

    @abstractmethod
    def logs(self, run: RunDirectory) -> list[Path]:
        """Output files of the jobs of `run`, oldest first."""

    def job_variables(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """The job's variables in `environ`, by the names of ``runs.job_environment``; empty outside a job."""
        return {}

    def rank_variables(self, environ: Mapping[str, str]) -> Mapping[str, str] | None:
        """torchrun's variables (RANK, …) if this scheduler started the process as one of several ranks."""
        return None


def adopt_job(environ: MutableMapping[str, str]) -> None:
    """Set the variables of ``runs.job_environment`` from those of this process's scheduler.

    Every process does so, because it may have inherited those of another node.
    """
    for scheduler in map(get_scheduler, SCHEDULERS):
        environ.update(scheduler.job_variables(environ))


def get_scheduler(name: str | None = None) -> Scheduler:
    """The scheduler `name`; None: the default."""
    name = name or default_scheduler()
    if name not in SCHEDULERS:
        raise UserError(f"unknown scheduler {name}; use {', '.join(SCHEDULERS)}")
    module, _, attribute = SCHEDULERS[name].partition(":")
    return cast(Scheduler, getattr(importlib.import_module(module), attribute)())


def job_states(records: Iterable[JobRecord]) -> dict[JobRecord, JobState]:
    """The state of each recorded job, in the same order, with one query per scheduler."""
    records = list(records)
    found: dict[JobRecord, JobState] = {}
    for name in dict.fromkeys(record.scheduler for record in records):
        numbers = [record.number for record in records if record.scheduler == name]
        # A run may come from a machine that has other schedulers.
        states = get_scheduler(name).state(numbers) if name is None or name in SCHEDULERS else {}
        for number in numbers:
            unknown = JobState(number=number, phase="unknown")
            found[JobRecord(number=number, scheduler=name)] = states.get(number, unknown)
    return {record: found[record] for record in records}


def live_jobs(records: Iterable[JobRecord]) -> dict[JobRecord, JobState]:
    """The recorded jobs that are known to wait or run, in the same order."""
    return {record: state for record, state in job_states(records).items() if state.is_live}


def unanswered_jobs(records: Iterable[JobRecord]) -> dict[JobRecord, JobState]:
    """The recorded jobs of unknown state, which may wait or run."""
    return {record: state for record, state in job_states(records).items() if state.phase == "unknown"}


def newest_job_log(run: RunDirectory) -> Path | None:
    """Output file of the newest job of `run`; None: no job has started yet."""
    newest = [logs[-1] for name in SCHEDULERS if (logs := get_scheduler(name).logs(run))]
    return max(newest, key=lambda path: path.stat().st_mtime, default=None)
