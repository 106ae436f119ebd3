"""What a scheduler tells the processes of a job, by environment variables; nothing outside of a job.

One table for all who ask: the lock of a run names the holder's job, the doctor names hosts as the scheduler does, the
monitor prints how a compute node is reached. A scheduler is added by adding its variables.
"""

import os
from collections.abc import Mapping

_JOB_ID = ("SLURM_JOB_ID",)
_NODE_NAME = ("SLURMD_NODENAME",)
_SUBMIT_HOST = ("SLURM_SUBMIT_HOST",)


def job_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """The job that this process belongs to, as its scheduler numbers it; None outside of a job."""
    return _first(environ, _JOB_ID)


def node_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """The scheduler's name of this host, which may differ from the host's own; None outside of a job."""
    return _first(environ, _NODE_NAME)


def submit_host(environ: Mapping[str, str] = os.environ) -> str | None:
    """The host that the job was submitted from, usually a login node; None where it is not known."""
    return _first(environ, _SUBMIT_HOST)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)
