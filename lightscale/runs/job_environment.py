"""A process's job, for any scheduler; None outside a job.

The lock of a run names the holder's job, the doctor uses the scheduler's names of hosts, and the monitor prints the way
to a compute node. Commands set these variables from the scheduler's own (``launch.scheduler.adopt_job``).
"""

import os
from collections.abc import Mapping

JOB_ID = "LIGHTSCALE_JOB_ID"
NODE_NAME = "LIGHTSCALE_NODE_NAME"
SUBMIT_HOST = "LIGHTSCALE_SUBMIT_HOST"


def job_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """The scheduler's id of this process's job; None outside a job."""
    return environ.get(JOB_ID)


def node_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """The scheduler's name of this host, which may differ from the host's own; None outside a job."""
    return environ.get(NODE_NAME)


def submit_host(environ: Mapping[str, str] = os.environ) -> str | None:
    """The host that submitted the job, usually a login node; None: unknown."""
    return environ.get(SUBMIT_HOST)
