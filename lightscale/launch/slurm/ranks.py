"""SLURM's variables for the processes of a job, and for the ranks started by srun (``srun … lightscale train``)."""

import re
from collections.abc import Mapping

from lightscale.errors import UserError
from lightscale.launch.environment import job_port, number_reader
from lightscale.runs.job_environment import JOB_ID, NODE_NAME, SUBMIT_HOST

_JOB_VARIABLES = {"SLURM_JOB_ID": JOB_ID, "SLURMD_NODENAME": NODE_NAME, "SLURM_SUBMIT_HOST": SUBMIT_HOST}


def job_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The job's variables in `environ`, under lightscale's names."""
    return {name: environ[variable] for variable, name in _JOB_VARIABLES.items() if environ.get(variable)}


def rank_variables(environ: Mapping[str, str]) -> dict[str, str] | None:
    """torchrun's variables for the task described by `environ`; None: it is no task, or alone in its step."""
    # A batch script has SLURM_PROCID too, but only the tasks of srun have a step.
    if "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ:
        return None
    number = number_reader("SLURM", environ)
    world_size = number("SLURM_STEP_NUM_TASKS")
    if world_size == 1:
        return None
    spread = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    tasks = _tasks_per_node(spread)
    node = number("SLURM_NODEID")
    # A process that sets some of them itself, as a wrapper does, would otherwise get a wrong local rank.
    if node >= len(tasks) or sum(tasks) != world_size:
        raise UserError(
            f"SLURM: SLURM_STEP_TASKS_PER_NODE = {spread!r} does not fit "
            f"{world_size} tasks with this one on node {node}"
        )
    host = _first_host(environ.get("SLURM_STEP_NODELIST", ""))
    port = job_port(number("SLURM_JOB_ID"), number("SLURM_STEP_ID"))
    return {
        "RANK": str(number("SLURM_PROCID")),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(number("SLURM_LOCALID")),
        "LOCAL_WORLD_SIZE": str(tasks[node]),
        # Names of nodes are not always names of hosts: then the user says where rank 0 is.
        "MASTER_ADDR": environ.get("MASTER_ADDR") or host,
        "MASTER_PORT": environ.get("MASTER_PORT", str(port)),
    }


def _tasks_per_node(text: str) -> list[int]:
    """SLURM's "2(x3),1" -> [2, 2, 2, 1]."""
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        return []
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in parts for _ in range(int(nodes or 1))]


def _first_host(nodes: str) -> str:
    """SLURM's "gpu[03-05,9],login" -> "gpu03"."""
    match = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    if match is None:
        raise UserError(f"SLURM: SLURM_STEP_NODELIST = {nodes!r} names no host")
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", match[0])
