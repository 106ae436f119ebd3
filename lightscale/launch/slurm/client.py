"""SLURM's commands as functions; their error messages become UserErrors."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from lightscale.errors import UserError
from lightscale.launch.scheduler import JobState, Phase

_TIMEOUT_S = 120.0
# A controller that is busy answers late; a column of a table is not worth a longer wait.
_STATE_TIMEOUT_S = 20.0
_WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
# Of squeue's error where SLURM has forgotten all jobs that it was asked for.
_FORGOTTEN = "Invalid job id"
# States in which a node runs nothing any more. A "*" behind one of them: it does not answer.
_BROKEN = {"down", "fail", "failing", "error", "powered_down", "powering_down", "unknown"}


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of a job."""

    name: str
    address: str
    """Address by which SLURM reaches it."""
    is_up: bool


def require(*programs: str) -> None:
    """Raise UserError without SLURM."""
    for program in programs:
        if shutil.which(program) is None:
            raise UserError(
                f"no SLURM on this machine: {program} is not in PATH; run this on a login node of the cluster, or "
                "start the run here with `lightscale train`"
            )


def ask(*command: str) -> str:
    """Output of SLURM's command `command`. Raises UserError with its message if it fails."""
    require(command[0])
    try:
        done = subprocess.run(
            command, env=_plain_environment(), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{command[0]} did not answer within {_TIMEOUT_S:.0f} s; check the controller with `sinfo`"
        ) from None
    if done.returncode != 0:
        lines = filter(None, done.stderr.splitlines())
        errors = [line.removeprefix(f"{command[0]}: ").removeprefix("error: ") for line in lines]
        raise UserError(f"{command[0]}: {'; '.join(errors) or f'exit code {done.returncode}'}")
    return done.stdout


def job_states(numbers: Sequence[int]) -> dict[int, JobState]:
    """States of the jobs `numbers` from squeue; "unknown", not an error, if it does not answer or is missing."""
    program = shutil.which("squeue")
    if not numbers or program is None:
        return {number: JobState(number=number, phase="unknown") for number in numbers}
    command = [program, "--noheader", f"--jobs={','.join(map(str, numbers))}", "--format=%A|%T|%r"]
    try:
        done = subprocess.run(
            command, env=_plain_environment(), capture_output=True, text=True, timeout=_STATE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {number: JobState(number=number, phase="unknown") for number in numbers}
    # A job that SLURM has forgotten may be an error beside its answer about the others. After any other error
    # nothing is known of those that are not listed.
    is_answer = done.returncode == 0 or _FORGOTTEN in done.stderr
    unlisted: Phase = "ended" if is_answer else "unknown"
    found = {number: JobState(number=number, phase=unlisted) for number in numbers}
    for line in done.stdout.splitlines():
        number, state, reason = line.split("|", 2)
        found[int(number)] = _job_state(int(number), state, reason)
    return {number: found[number] for number in numbers}


def _job_state(number: int, state: str, reason: str) -> JobState:
    """Of one line of squeue. Its `reason` is why a job waits, "None" otherwise."""
    phase: Phase = "waiting" if state in _WAITING else "ending" if state == "COMPLETING" else "running"
    more = f" ({reason})" if phase == "waiting" and reason != "None" else ""
    return JobState(number=number, phase=phase, text=f"{state}{more}")


def _plain_environment() -> dict[str, str]:
    """Without a user's own formats and filters, which change what SLURM's commands print."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SINFO_"))}


def partitions() -> list[str]:
    """Names of all partitions visible to this user."""
    return sorted(set(ask("sinfo", "--noheader", "--format=%R").split()))


def nodes_of(job: int) -> list[Node]:
    """Current nodes of `job`, in SLURM's order, without failed ones that SLURM removed from it."""
    names = ask("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()
    if not names:
        return []
    # sinfo sorts by name, but ranks are to be where srun puts its tasks: in the order of the job's list.
    in_order = ask("scontrol", "show", "hostnames", names).split()
    lines = ask("sinfo", "--noheader", "--Node", f"--nodes={names}", "--format=%N|%o|%T").split()
    found = {}
    for name, address, state in (line.split("|") for line in lines):
        # Letters behind a state are flags, such as "~" for a node that is powered down to save energy.
        is_up = not state.endswith("*") and state.rstrip("~#!%$@^-+") not in _BROKEN
        found[name] = Node(name=name, address=address, is_up=is_up)
    return [found[name] for name in in_order if name in found]
