"""The schedulers that accept jobs, and the modules that implement them.

Import strings, because planning prints the commands that start a run in a job and must not import launching.
"""

SCHEDULERS: dict[str, str] = {
    "slurm": "lightscale.launch.slurm.scheduler:Slurm",
    "local": "lightscale.launch.local.scheduler:Local",
}
"""Name to "module:class". The first is the default, also for records in jobs.jsonl without a scheduler."""


def default_scheduler() -> str:
    """Name of the default scheduler of `lightscale submit`."""
    return next(iter(SCHEDULERS))
