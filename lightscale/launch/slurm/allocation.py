"""The nodes of this process's SLURM job, on which the launcher starts a run's ranks.

    batch script ──▶ launcher (`train --scheduler slurm`, first node) ── srun ──▶ an agent on every node ──▶ ranks

The launcher works as on one machine: it holds the run's lock, restarts the ranks after a failure, and reports the run's
end by its exit code. Each start is a separate job step, on the job's current nodes: SLURM removes a failed node from
the job (submitted with `sbatch --no-kill`). The run continues on the others if its batch divides over them; otherwise
it exits, to be requeued with other nodes.

srun forwards SIGUSR1 to all agents, but ends the step at once on SIGTERM and SIGINT, so every stop signal becomes
SIGUSR1.
"""

import contextlib
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

from lightscale.errors import UserError
from lightscale.launch.environment import job_port
from lightscale.launch.launcher.agent import Order
from lightscale.launch.launcher.failures import RankFailure
from lightscale.launch.launcher.reports import read_reports
from lightscale.launch.launcher.restart import NodesLost
from lightscale.launch.launcher.torchrun import AGENT_LOGS, Launch, conclude
from lightscale.launch.slurm.client import Node, nodes_of, require
from lightscale.parallel.rendezvous.sockets import KEY_VARIABLE

# Of a shell that reports the death of a child by a signal.
_SIGNALLED = 128
# A controller that is started again, as for an update, is away for a minute or two, and jobs continue meanwhile.
_PATIENCE_S, _PAUSE_S = 300.0, 10.0
_POLL_S = 1.0
# A controller that was started again may take the memory of a step that ended meanwhile for used, for good: SLURM 22.05
# then refuses all further steps of the job, and only another start of the job helps.
_REFUSED_S = 60.0
# A failed agent waits ten seconds for the reports of the others. Who has none long after that will have none.
_END_S, _ABORT_S = 30.0, 10.0
# How srun would otherwise cut the step: by what the batch script was given.
_OF_THE_BATCH = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NO_KILL")


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes of a job."""

    job: int
    num_nodes: int
    """Start of the job."""
    least_nodes: int
    """Minimum number of nodes; with fewer the run exits, to be requeued."""
    fits: Callable[[int], bool]
    """Whether the run divides over a number of nodes."""

    translation = MappingProxyType(
        {
            signal.SIGTERM: signal.SIGUSR1,
            signal.SIGINT: signal.SIGUSR1,
            # Killing srun itself would leave its step behind; on SIGTERM srun kills the step, then ends.
            signal.SIGKILL: signal.SIGTERM,
        }
    )

    @classmethod
    def read(cls, environ: Mapping[str, str], least_nodes: int | None, fits: Callable[[int], bool]) -> Self:
        """Read the job from `environ`. `least_nodes`: None for half of its nodes."""
        require("srun", "squeue", "sinfo", "scontrol")
        numbers = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES")]
        if not all(re.fullmatch(r"[1-9][0-9]*", number) for number in numbers):
            raise UserError(
                "--scheduler slurm: not inside a SLURM job (SLURM_JOB_ID and SLURM_JOB_NUM_NODES are not set to "
                "numbers); use `lightscale submit`"
            )
        job, num_nodes = map(int, numbers)
        least = max(1, num_nodes // 2) if least_nodes is None else least_nodes
        if not 1 <= least <= num_nodes:
            raise UserError(f"--min-nodes {least}: must be at least 1 and at most the {num_nodes} nodes of the job")
        return cls(job=job, num_nodes=num_nodes, least_nodes=least, fits=fits)

    def launch_ranks(
        self, command: Sequence[str], *, processes: int, logs: Path, hang_timeout_s: float, deadline_s: float | None
    ) -> Launch:
        """Start an agent on each available node, as many as the run can use, and wait for all."""
        nodes = self._usable()
        order = Order(
            command=list(command),
            processes=processes,
            logs=str(logs.absolute()),
            hang_timeout_s=hang_timeout_s,
            deadline_s=deadline_s,
            address=os.environ.get("MASTER_ADDR") or nodes[0].address,
            # Another one for each start: processes of the last one may still be there, and hold its port.
            port=job_port(self.job, int(logs.name.rpartition("-")[2])),
            num_nodes=len(nodes),
            node_variable="SLURM_NODEID",
        )
        environment = step_environment(os.environ)
        # A session of its own: by that the relay tells it from other children. A Ctrl-C in a terminal then reaches it
        # only through the relay.
        refused_s = time.monotonic() + _REFUSED_S
        while True:
            step = subprocess.Popen(_srun(nodes, order), env=environment, start_new_session=True)
            code = _wait(step, logs, len(nodes))
            if code == 0 or _has_begun(logs) or not set(nodes) <= set(self._up()):
                return self._conclude(nodes, order, logs, code)
            if time.monotonic() > refused_s:
                raise NodesLost(
                    f"srun started no agent on the nodes of job {self.job} (exit code {code}, {logs}); the run must be "
                    "requeued"
                )
            print("srun started no agent; retrying", file=sys.stderr, flush=True)
            time.sleep(_PAUSE_S)

    def _usable(self) -> list[Node]:
        up = self._up()
        # As many as the batch can be split over. The rest stays idle, in case one of these fails next.
        count = next((count for count in range(len(up), self.least_nodes - 1, -1) if self.fits(count)), 0)
        if not count:
            raise NodesLost(
                f"{len(up)} of the {self.num_nodes} nodes of job {self.job} are up; the run needs at least "
                f"{self.least_nodes}, in a number that its layout divides over, and must be requeued"
            )
        return up[:count]

    def _up(self) -> list[Node]:
        """The nodes that can be used; waits for a controller that is being started again."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return [node for node in nodes_of(self.job) if node.is_up]
            except UserError as error:
                if time.monotonic() > deadline_s:
                    raise
                print(f"{error}; retrying", file=sys.stderr, flush=True)
                time.sleep(_PAUSE_S)

    def _conclude(self, nodes: Sequence[Node], order: Order, logs: Path, code: int) -> Launch:
        reports = read_reports(logs)
        launch = conclude(list(reports.values()), logs)
        # The step's own exit code says little: srun ends all other agents because of the first that failed.
        silent = [number for number in range(len(nodes)) if number not in reports]
        if not silent or code == 0:
            return launch
        left = {node.name for node in self._up()}
        lost = [number for number in silent if nodes[number].name not in left]
        # A lost node is the cause, whatever the other ranks said about their connections to it.
        if launch.failure is None or lost:
            # SLURM ends the other agents because of the first that failed, some before they have reported.
            which = lost or silent
            gone = [nodes[number].name for number in which]
            return replace(launch, failure=_unreported(gone, which[0] * order.processes, bool(lost), code))
        names = ", ".join(nodes[number].name for number in silent)
        return replace(
            launch, failure=replace(launch.failure, summary=f"{launch.failure.summary}; no report from {names}")
        )


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of agents and ranks, with a key of their rendezvous that no other step has."""
    kept = {name: value for name, value in environ.items() if name not in _OF_THE_BATCH}
    # As for the ranks: folders of the current directory must not be imported as packages.
    return kept | {"PYTHONSAFEPATH": "1", KEY_VARIABLE: environ.get(KEY_VARIABLE) or secrets.token_hex(32)}


def _srun(nodes: Sequence[Node], order: Order) -> list[str]:
    return [
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        f"--nodelist={','.join(node.name for node in nodes)}",
        "--job-name=ranks",
        # The step has all that the job has on its nodes, also while the end of the step before is being dealt with.
        "--overlap",
        "--cpu-bind=none",
        "--export=ALL",
        "--input=none",
        "--unbuffered",
        # Agents that only wait for one that failed are ended; who is done waits for the others.
        "--kill-on-bad-exit=1",
        "--wait=0",
        sys.executable,
        "-m",
        "lightscale.launch.launcher.agent",
        order.text(),
    ]


def _wait(step: subprocess.Popen[bytes], logs: Path, num_nodes: int) -> int:
    """Wait for srun; returns its exit code. Ends it where it would wait for ever, for a node whose slurmstepd died."""
    last_s = math.inf
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return step.wait(_POLL_S)
        # By the agents' reports, which come over the file system, not by srun.
        if last_s == math.inf and _is_over(logs, num_nodes):
            last_s = time.monotonic() + _END_S
        if time.monotonic() > last_s:
            # Has SLURM kill what is left of the step.
            step.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return step.wait(_ABORT_S)
            os.killpg(step.pid, signal.SIGKILL)
            return step.wait()


def _has_begun(logs: Path) -> bool:
    """Whether an agent has started its ranks on any node; without that nothing is known to be wrong with them."""
    return any(logs.glob(AGENT_LOGS)) or bool(read_reports(logs))


def _is_over(logs: Path, num_nodes: int) -> bool:
    """Whether all agents have ended, or one of them by a failure, because of which SLURM ends the others."""
    reports = read_reports(logs)
    return len(reports) == num_nodes or any(report.failures for report in reports.values())


def _unreported(nodes: Sequence[str], rank: int, is_lost: bool, code: int) -> RankFailure:
    """The failure of nodes whose agents left no report."""
    number = code - _SIGNALLED if code > _SIGNALLED else -code
    killer = signal.Signals(number) if number in {signum.value for signum in signal.Signals} else None
    what = "failed" if is_lost else "ended without a report"
    how = f"exit code {code}" if killer is None else killer.name
    return RankFailure(
        rank=rank,
        summary=f"node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)} {what} (srun: {how})",
        time_s=time.time(),
        killer=None if is_lost else killer,
        # Another node may not be lost.
        exit_code=os.EX_TEMPFAIL if is_lost else None,
    )
