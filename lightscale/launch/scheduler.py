"""What runs need of a scheduler: submit, cancel, state, allocation, logs.

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

Nothing here imports an implementation: they are resolved by name when they are needed. Their modules must not import
torch at the top, because `lightscale runs` is to answer within a second.
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
    """The state of a job, as its scheduler reports it."""

    number: int
    phase: Phase
    """unknown: the scheduler does not answer, and the job may run or not; ended: it has, or the scheduler forgot it."""
    text: str = ""
    """In the scheduler's own terms, for messages."""

    @property
    def is_live(self) -> bool:
        """Whether it is known to wait or run. A job of which nothing is known is not counted."""
        return self.phase in ("waiting", "running", "ending")

    def __str__(self) -> str:
        return f"{self.number} {self.text or self.phase}"


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """What `submit` is to run: the launcher of one run, on the nodes that its settings ask for."""

    run: RunDirectory
    settings: LaunchSettings
    is_chain: bool = False
    """What is left to do at the end of the job is for the next job, not for this one again."""
    allow: Collection[str] = ()
    """Keys that may differ from those of the run that is resumed, see ``lightscale train --allow-change``."""

    @property
    def script(self) -> Path:
        """The file with the text that `Scheduler.script` makes, written before `Scheduler.submit` is called."""
        return self.run.path / "job.sh"

    def command(self, scheduler: str) -> list[str]:
        """The launcher of the run, as a job of the scheduler called `scheduler` starts it."""
        path = self.run.path.absolute()
        command = [sys.executable, "-m", "lightscale", "train", str(path / self.run.config.name), "--run", str(path)]
        command += ["--scheduler", scheduler, "--processes", str(self.settings.ranks_per_node)]
        if self.settings.min_nodes is not None:
            command += ["--min-nodes", str(self.settings.min_nodes)]
        return command + [f"--allow-change={key}" for key in sorted(self.allow)]

    def exports(self) -> Iterator[str]:
        """Lines of a shell that set variables for the ranks. What is set already has precedence."""
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
    """One kind of scheduler; has no state of its own. All methods raise UserError for what the user must change."""

    title: ClassVar[str]
    """For messages."""
    variables_prefix: ClassVar[str | None] = None
    """With what the names of the variables begin that it sets for the processes of a job."""

    @abstractmethod
    def require(self, action: Literal["submit", "cancel"]) -> None:
        """Refuse where this machine cannot do `action`, as where the scheduler's commands are not installed."""

    @abstractmethod
    def check_settings(self, settings: LaunchSettings) -> None:
        """Refuse settings that this scheduler lacks or cannot follow, without asking the cluster."""

    @abstractmethod
    def script(self, job: JobRequest) -> str:
        """The text of the script that a job runs. It starts ``lightscale train --scheduler NAME`` for the run."""

    @abstractmethod
    def check(self, job: JobRequest) -> None:
        """Ask the scheduler whether it would take the job; nothing is written, nothing submitted."""

    @abstractmethod
    def submit(self, job: JobRequest, *, after: int | None = None) -> int:
        """Submit `job.script`; returns the job's number. `after`: a job whose end it waits for, however it ends."""

    @abstractmethod
    def cancel(self, job: JobState, *, now: bool) -> None:
        """End a job that waits, or one that runs: after it has saved, or `now`. It is not queued again."""

    @abstractmethod
    def state(self, numbers: Sequence[int]) -> dict[int, JobState]:
        """The state of each of the jobs, asked for at once; "unknown" where the scheduler does not answer."""

    @abstractmethod
    def allocation(self, environ: Mapping[str, str], *, min_nodes: int | None, fits: Callable[[int], bool]) -> "Nodes":
        """The nodes of the job that `environ` is of, on which the launcher starts ranks.

        Args:
            min_nodes: with fewer the launcher leaves; None for half of those that the job began with.
            fits: whether the run can be split over so many nodes.
        """

    @abstractmethod
    def logs(self, run: RunDirectory) -> list[Path]:
        """The files with what the jobs of `run` printed, oldest first."""

    def job_variables(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """What `environ` says of the job, by the names in ``runs.job_environment``; nothing outside of a job."""
        return {}

    def rank_variables(self, environ: Mapping[str, str]) -> Mapping[str, str] | None:
        """torchrun's variables (RANK, …) where this scheduler itself started the process as one of several ranks."""
        return None


def adopt_job(environ: MutableMapping[str, str]) -> None:
    """Set the variables of ``runs.job_environment`` from those of the scheduler whose job this process is in.

    Again in every process: those of another node may have been inherited.
    """
    for scheduler in map(get_scheduler, SCHEDULERS):
        environ.update(scheduler.job_variables(environ))


def get_scheduler(name: str | None = None) -> Scheduler:
    """The scheduler called `name`; None for the default."""
    name = name or default_scheduler()
    if name not in SCHEDULERS:
        raise UserError(f"scheduler {name}: unknown; use {', '.join(SCHEDULERS)}")
    module, _, attribute = SCHEDULERS[name].partition(":")
    return cast(Scheduler, getattr(importlib.import_module(module), attribute)())


def job_states(records: Iterable[JobRecord]) -> dict[JobRecord, JobState]:
    """The state of each recorded job, in the same order. Each scheduler is asked once, for all of its jobs."""
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
    """Those of the recorded jobs that are known to wait or run, in the same order."""
    return {record: state for record, state in job_states(records).items() if state.is_live}


def unanswered_jobs(records: Iterable[JobRecord]) -> dict[JobRecord, JobState]:
    """Those of which their scheduler does not say whether they wait or run: they may."""
    return {record: state for record, state in job_states(records).items() if state.phase == "unknown"}


def newest_job_log(run: RunDirectory) -> Path | None:
    """What the newest job of `run` printed; None: it has none, or none has started yet."""
    newest = [logs[-1] for name in SCHEDULERS if (logs := get_scheduler(name).logs(run))]
    return max(newest, key=lambda path: path.stat().st_mtime, default=None)
