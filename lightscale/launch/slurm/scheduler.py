"""SLURM as a `Scheduler` of `launch/scheduler.py`."""

import contextlib
import importlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightscale.errors import UserError
from lightscale.launch.scheduler import JobRequest, JobState, Scheduler
from lightscale.launch.settings import LaunchSettings
from lightscale.launch.slurm import client, ranks, script
from lightscale.runs.run_directory import RunDirectory

if TYPE_CHECKING:
    from lightscale.launch.launcher.restart import Nodes

_COMMANDS = {"submit": ("sbatch", "squeue"), "cancel": ("scancel", "squeue", "scontrol")}


class Slurm(Scheduler):
    """Starts jobs with sbatch and ranks with srun."""

    title = "SLURM"
    variables_prefix = "SLURM_"

    def require(self, action: Literal["submit", "cancel"]) -> None:
        """See `Scheduler`."""
        client.require(*_COMMANDS[action])

    def check_settings(self, settings: LaunchSettings) -> None:
        """See `Scheduler`. A job without a time limit gets the partition's, before which the run cannot save."""
        if settings.time is None:
            raise UserError("launch.time is not set; use --time HOURS:MINUTES:SECONDS, or launch.time in a file")

    def script(self, job: JobRequest) -> str:
        """See `Scheduler`."""
        return script.render(job)

    def check(self, job: JobRequest) -> None:
        """See `Scheduler`."""
        partition = job.settings.partition
        # sbatch's own message does not say which there are.
        if partition is not None and partition not in (known := client.partitions()):
            raise UserError(f'partition "{partition}": unknown on this cluster; use {", ".join(known) or "none"}')
        with tempfile.NamedTemporaryFile("w", suffix=".sh", encoding="utf-8") as file:
            file.write(self.script(job))
            file.flush()
            client.ask("sbatch", "--test-only", file.name)

    def submit(self, job: JobRequest, *, after: int | None = None) -> int:
        """See `Scheduler`."""
        dependency = [] if after is None else [f"--dependency=afterany:{after}"]
        # "number;cluster" where there are several clusters.
        return int(client.ask("sbatch", "--parsable", *dependency, str(job.script)).split(";")[0])

    def cancel(self, job: JobState, *, now: bool) -> None:
        """See `Scheduler`."""
        number = str(job.number)
        if job.phase == "waiting":
            # It may have begun, or ended, meanwhile: then it is left alone.
            with contextlib.suppress(UserError):
                client.ask("scancel", "--state=PENDING", number)
        elif now:
            client.ask("scancel", number)
        elif job.phase == "running":
            # Otherwise the script has it queued again after the save.
            client.ask("scontrol", "update", f"JobId={number}", "Requeue=0")
            client.ask("scancel", "--batch", "--signal=USR1", number)

    def state(self, numbers: Sequence[int]) -> dict[int, JobState]:
        """See `Scheduler`."""
        return client.job_states(numbers)

    def allocation(self, environ: Mapping[str, str], *, min_nodes: int | None, fits: Callable[[int], bool]) -> "Nodes":
        """See `Scheduler`."""
        # Imported here, because it needs torch, which the commands about jobs do not wait for.
        allocation = importlib.import_module("lightscale.launch.slurm.allocation").Allocation
        nodes: Nodes = allocation.read(environ, min_nodes, fits)
        return nodes

    def logs(self, run: RunDirectory) -> list[Path]:
        """See `Scheduler`."""
        return sorted(run.logs.glob("slurm-*.out"), key=lambda path: int(path.stem.partition("-")[2]))

    def job_variables(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """See `Scheduler`."""
        return ranks.job_variables(environ)

    def rank_variables(self, environ: Mapping[str, str]) -> Mapping[str, str] | None:
        """See `Scheduler`."""
        return ranks.rank_variables(environ)
