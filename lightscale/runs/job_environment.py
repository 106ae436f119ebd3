"""What a process knows of the job that it runs in, whatever the scheduler; nothing outside of a job.

The lock of a run names the holder's job, the doctor names hosts as the scheduler does, the monitor prints how a compute
node is reached. Commands set these variables from the scheduler's own (``launch.scheduler.adopt_job``).
"""

import os
from collections.abc import Mapping

JOB_ID = "LIGHTSCALE_JOB_ID"
NODE_NAME = "LIGHTSCALE_NODE_NAME"
SUBMIT_HOST = "LIGHTSCALE_SUBMIT_HOST"


def job_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """The job that this process belongs to, as its scheduler numbers it; None outside of a job."""
    return environ.get(JOB_ID)


def node_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """The scheduler's name of this host, which may differ from the host's own; None outside of a job."""
    return environ.get(NODE_NAME)


def submit_host(environ: Mapping[str, str] = os.environ) -> str | None:
    """The host that the job was submitted from, usually a login node; None where it is not known."""
    return environ.get(SUBMIT_HOST)
