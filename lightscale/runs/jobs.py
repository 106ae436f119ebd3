"""The SLURM jobs of a run: RUN/jobs.jsonl, one line for each, and what SLURM says of them."""

import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from lightscale.runs.run_directory import LineWriter, RunDirectory, read_lines, timestamp

# A controller that is busy answers late; nobody should wait longer for a column of a table.
_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that SLURM has not forgotten, and that has not ended."""

    number: int
    state: str
    """In SLURM's words, like PENDING or RUNNING."""
    reason: str
    """Why it waits; "None" otherwise."""

    @property
    def is_waiting(self) -> bool:
        """Whether it has not started yet."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")

    def __str__(self) -> str:
        more = f" ({self.reason})" if self.is_waiting and self.reason != "None" else ""
        return f"{self.number} {self.state}{more}"


def record_job(run: RunDirectory, number: int) -> None:
    """Note that job `number` was submitted for `run`."""
    with LineWriter(run.jobs) as writer:
        writer.write({"time": timestamp(), "job": number})
        writer.sync()


def recorded_jobs(run: RunDirectory) -> list[int]:
    """All jobs of `run`, in the order in which they were submitted."""
    return [line["job"] for line in read_lines(run.jobs)]


def live_jobs(numbers: Iterable[int]) -> dict[int, Job]:
    """Those of `numbers` that wait or run, in the same order; none where there is no SLURM, or it does not answer."""
    numbers = list(numbers)
    program = shutil.which("squeue")
    if not numbers or program is None:
        return {}
    words = [program, "--noheader", f"--jobs={','.join(map(str, numbers))}", "--format=%A|%T|%r"]
    try:
        # A job that SLURM has forgotten is an error beside its answer about the others.
        done = subprocess.run(
            words, env=plain_environment(), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}
    found = {}
    for line in done.stdout.splitlines():
        number, state, reason = line.split("|", 2)
        found[int(number)] = Job(number=int(number), state=state, reason=reason)
    return {number: found[number] for number in numbers if number in found}


def plain_environment() -> dict[str, str]:
    """Without a user's own formats and filters, which change what SLURM's commands print."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SINFO_"))}
