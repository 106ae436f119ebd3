"""The jobs submitted for a run: RUN/jobs.jsonl, one line each. The scheduler reports their state."""

from dataclasses import dataclass

from lightscale.runs.run_directory import LineWriter, RunDirectory, read_lines, timestamp


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """One job."""

    number: int
    scheduler: str | None = None
    """Name of the scheduler of this job; None: the default."""


def record_job(run: RunDirectory, job: JobRecord) -> None:
    """Record that `job` was submitted for `run`."""
    name = {} if job.scheduler is None else {"scheduler": job.scheduler}
    with LineWriter(run.jobs) as writer:
        writer.write({"time": timestamp(), "job": job.number, **name})
        # Whoever submits next, from whatever machine, must see it.
        writer.sync()


def recorded_jobs(run: RunDirectory) -> list[JobRecord]:
    """All jobs of `run`, in the order of submission."""
    return [JobRecord(number=line["job"], scheduler=line.get("scheduler")) for line in read_lines(run.jobs)]
