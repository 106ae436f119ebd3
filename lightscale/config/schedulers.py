"""The schedulers that jobs can be submitted to, and where each is implemented.

Here, as import strings, because planning prints the commands that start a run in a job, and knows nothing of launching.
"""

SCHEDULERS: dict[str, str] = {
    "slurm": "lightscale.launch.slurm.scheduler:Slurm",
    "local": "lightscale.launch.local.scheduler:Local",
}
"""Name to "module:class". The first is the default, and the one of records in jobs.jsonl that name none."""


def default_scheduler() -> str:
    """The name of the one that `lightscale submit` takes unless another is named."""
    return next(iter(SCHEDULERS))
