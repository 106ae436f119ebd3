"""SLURM's own commands, whose complaints become ours."""

import shutil
import subprocess
from dataclasses import dataclass

from lightscale.errors import UserError
from lightscale.runs.jobs import plain_environment

_TIMEOUT_S = 120.0
# States in which a node runs nothing any more. A "*" behind one of them: it does not answer.
_BROKEN = {"down", "fail", "failing", "error", "powered_down", "powering_down", "unknown"}


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of a job."""

    name: str
    address: str
    """Under which SLURM itself reaches it."""
    is_up: bool


def require(*programs: str) -> None:
    """Raise UserError where there is no SLURM."""
    for program in programs:
        if shutil.which(program) is None:
            raise UserError(
                f"there is no SLURM here: {program} is not in the PATH; run this on a login node of the cluster, or "
                "start the run on this machine with `lightscale train`"
            )


def ask(*words: str) -> str:
    """What SLURM's command `words` prints; its complaint is a UserError."""
    require(words[0])
    try:
        done = subprocess.run(
            words, env=plain_environment(), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{words[0]} has not answered for {_TIMEOUT_S:.0f} s; is the controller up? (`sinfo`)"
        ) from None
    if done.returncode != 0:
        said = [line.removeprefix(f"{words[0]}: ").removeprefix("error: ") for line in done.stderr.splitlines() if line]
        raise UserError(f"{words[0]}: {'; '.join(said) or f'exit code {done.returncode}'}")
    return done.stdout


def partitions() -> list[str]:
    """The names of all that this user may see."""
    return sorted(set(ask("sinfo", "--noheader", "--format=%R").split()))


def nodes_of(job: int) -> list[Node]:
    """Those that `job` has now, in SLURM's order; failed ones that it lost are missing."""
    names = ask("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()
    if not names:
        return []
    in_order = ask("scontrol", "show", "hostnames", names).split()
    lines = ask("sinfo", "--noheader", "--Node", f"--nodes={names}", "--format=%N|%o|%T").split()
    found = {}
    for name, address, state in (line.split("|") for line in lines):
        is_up = not state.endswith("*") and state.rstrip("~#!%$@^-+") not in _BROKEN
        found[name] = Node(name=name, address=address, is_up=is_up)
    return [found[name] for name in in_order if name in found]
