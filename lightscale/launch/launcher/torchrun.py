"""Start the ranks of one node once, with torch's elastic launcher, and report their end.

The elastic agent runs in this process: the launcher for a run on one machine, or the program of
`launch/launcher/agent.py` on several nodes. Three of its defaults are changed by its own settings:

- Stop signals. torchrun signals every process of every rank and ends them after 30 s, and forwards a second
  signal too. Here the first stop signal goes once to each rank, not to its children, and the agent waits for the
  ranks to end. That needs no shutdown timeout, which torch has only from 2.12 on;
  TORCH_ELASTIC_SHUTDOWN_TIMEOUT is set for the cases in which torch itself ends the ranks.
- Rendezvous (`agents.py`). The agent of one node has a store in its memory, and the ranks serve their own. The agents
  of several nodes meet at a given address in a given order, so that ranks keep their places; each start has its own
  agents and store. When a user starts every host, agents are not connected, and the ranks themselves meet at the given
  address: torch's own meeting waits for a name without address, and prints a stack for a port in use.
- Output. All ranks write to files under the run's logs/; rank 0's output is shown. After a failure the traceback
  of the first failed rank is printed, not those of the ranks that lost their peer.

Users of torchrun (`torchrun … -m lightscale train CONFIG`) should set TORCH_ELASTIC_SHUTDOWN_TIMEOUT and
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (the shared store keeps the addresses of dead ranks, and restarts fail), and add
`--signals-to-handle SIGTERM,SIGINT,SIGUSR1`.
"""

import contextlib
import io
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightscale.launch.launcher.agents import BACKEND
from lightscale.launch.launcher.failures import RankFailure, first_failure, located, out_of_memory, read_failure
from lightscale.launch.launcher.fork import Program, forked_ranks
from lightscale.launch.launcher.rank import ERROR_FILE_VARIABLE, LAUNCHER_VARIABLE, LOGS_VARIABLE
from lightscale.launch.launcher.rendezvous import Rendezvous
from lightscale.launch.launcher.watchdog import Hang, Watchdog
from lightscale.output.progress import TERMINAL_VARIABLE
from lightscale.output.streams import obeyed
from lightscale.parallel.device.settings import device_settings
from lightscale.training.health.control_group import memory_kills
from lightscale.training.health.heartbeat import HEARTBEATS_VARIABLE, Beat, read_heartbeats, shared_heartbeats
from lightscale.training.health.limits import THREADS_VARIABLE, computing_threads
from lightscale.training.signals import DEADLINE_VARIABLE

# Longer than the save of a large model. torch before 2.12 does not read it and takes 30.
_SHUTDOWN_TIMEOUT_S = 600
# For the agents of all nodes to come.
_RENDEZVOUS_TIMEOUT_S = 300
_POLL_S = 0.1
AGENT_LOGS = "launcher-*.log"
"""Files, one per node, that `run_node` starts before any rank; only for several nodes."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The end of the ranks of one launch."""

    logs: Path
    failure: RankFailure | None
    """The first failure; None: all ranks exited with code 0."""
    beats: dict[int, Beat]
    """The last heartbeat of each rank."""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """The end of the ranks of one node."""

    failures: Sequence[RankFailure]
    hang: Hang | None
    beats: Mapping[int, Beat]


class ThisMachine:
    """The single node of a run without a scheduler: the ranks are children of this process."""

    num_nodes = 1
    translation: Mapping[signal.Signals, signal.Signals] = MappingProxyType({})

    def __init__(self, program: Program | None = None) -> None:
        """``program``: see `run_node`."""
        self._program = program

    @property
    def forks(self) -> bool:
        """Whether ranks are forks of this process."""
        return self._program is not None

    def launch_ranks(
        self, command: Sequence[str], *, processes: int, logs: Path, hang_timeout_s: float, deadline_s: float | None
    ) -> Launch:
        """See `run_node`."""
        report = run_node(
            command,
            processes=processes,
            logs=logs,
            hang_timeout_s=hang_timeout_s,
            deadline_s=deadline_s,
            program=self._program,
        )
        return conclude([report], logs)


def run_node(
    command: Sequence[str],
    *,
    processes: int,
    logs: Path,
    hang_timeout_s: float,
    deadline_s: float | None,
    rendezvous: Rendezvous | None = None,
    program: Program | None = None,
    patience_s: float = 0.0,
) -> NodeReport:
    """Run `command` as `processes` ranks until they end; their output goes to the new directory `logs`.

    Hanging ranks are ended. `deadline_s`: time at which ranks stop, in seconds since the epoch. `rendezvous`: None for
    a single node. `program`: does `command` in forks of this process, which has imported its modules; None: every rank
    is a new process. `patience_s`: silence that is always allowed.
    """
    name, node, num_nodes = "", 0, 1
    if rendezvous is not None:
        node, num_nodes = rendezvous.node, rendezvous.num_nodes
        # Each node has its own: mapped memory is not shared between machines, whatever the file system, nor are clocks.
        name = f"-{node}"
    variables = {**_rank_variables(processes), LOGS_VARIABLE: str(logs.absolute())}
    if deadline_s is not None:
        variables[DEADLINE_VARIABLE] = str(deadline_s)
    ranks = range(node * processes, (node + 1) * processes)
    with (
        # For all ranks of the run, not of this node: a rank writes at the offset of its number in the run.
        shared_heartbeats(logs / f"heartbeats{name}", processes * num_nodes) as heartbeats,
        _changed_environment({**variables, HEARTBEATS_VARIABLE: str(heartbeats)}),
        contextlib.nullcontext() if program is None else forked_ranks(program),
        _agent_log(logs / f"launcher{name}.log"),
        Watchdog(heartbeats, logs=logs, ranks=ranks, hang_timeout_s=hang_timeout_s, patience_s=patience_s) as watchdog,
    ):
        kills = memory_kills()
        failures = _launch(command, processes, logs, rendezvous)
        if memory_kills() != kills:
            failures = [out_of_memory(failure) for failure in failures]
        beats = read_heartbeats(heartbeats)
    for failure in failures:
        # Ranks do not print their traceback, as only the first may be shown; this is where the others can be read.
        if failure.traceback is not None:
            with contextlib.suppress(OSError), (logs / f"rank-{failure.rank}.err").open("a", encoding="utf-8") as file:
                file.write(failure.traceback)
    if sys.stderr.isatty():
        # A rank that was killed while it drew its line has not given the cursor back.
        print("\x1b[?25h", end="\n" if failures else "", file=obeyed(sys.stderr))
    return NodeReport(failures=failures, hang=watchdog.hang, beats=beats)


def conclude(reports: Sequence[NodeReport], logs: Path) -> Launch:
    """Combine the reports of all nodes."""
    failures = [failure for report in reports for failure in report.failures]
    beats = {rank: beat for report in reports for rank, beat in report.beats.items()}
    # Where ranks wait for one that hangs on another node, they are found too, but were silent only after it.
    hangs = [report.hang for report in reports if report.hang is not None]
    if hangs:
        # Those without a record were killed for it, and others lost them; a rank that failed before is the cause.
        found_s = min(hang.time_s for hang in hangs)
        failures = [failure for failure in failures if failure.is_recorded and failure.time_s < found_s]
    first = first_failure(failures)
    if first is not None:
        first = located(first, beats)
    elif hangs:
        # A rank that is stopped by a signal does not wait for another; of the rest, the first to be silent counts.
        hang = min(hangs, key=lambda hang: (not hang.are_stopped, hang.since_s))
        summary = f"{hang.reason}; the stacks of all ranks are in {logs}/rank-*.stacks"
        first = RankFailure(rank=hang.ranks[0], summary=summary, time_s=hang.time_s)
    return Launch(logs=logs, failure=first, beats=beats)


def _launch(command: Sequence[str], processes: int, logs: Path, rendezvous: Rendezvous | None) -> list[RankFailure]:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Else what rank 0 says waits for 8 kB where stdout is a file or a pipe.
        sys.stdout.reconfigure(line_buffering=True)
    first = 0 if rendezvous is None else rendezvous.node * processes
    agents_meet = rendezvous is not None and rendezvous.of_agents
    # Agents of hosts that a user started are not connected: only their ranks meet.
    endpoint, node, num_nodes = "", 0, 1
    if rendezvous is not None and agents_meet:
        endpoint, node, num_nodes = rendezvous.place, rendezvous.node, rendezvous.num_nodes
    config = LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=processes,
        # The same on all nodes, and another one for each start: agents of an earlier start cannot join.
        run_id=str(logs),
        # The prefix of the lines shown; an empty role makes an empty one.
        role="",
        log_line_prefix_template="${role_name}",
        # Restarts are for the launcher, which first looks for progress and at the nodes that are left.
        max_restarts=0,
        # How soon the end of a rank is noticed. Its peers in a NCCL collective may not notice it before the time-out of
        # that collective, ten minutes by default (restart.collective_timeout_s).
        monitor_interval=_POLL_S,
        logs_specs=_RankLogs(logs, None if agents_meet else rendezvous),
        # Not the stop signals: those are the relay's.
        signals_to_handle="SIGQUIT",
        rdzv_backend=BACKEND,
        rdzv_endpoint=endpoint,
        rdzv_configs={"node": node, "timeout": _RENDEZVOUS_TIMEOUT_S},
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        # Of all ranks of this node that failed, also those that torch ended; `first_failure` finds the cause.
        return [
            read_failure(rank if agents_meet else first + rank, failure) for rank, failure in error.failures.items()
        ]
    except SignalException as error:
        # SIGQUIT: torch has ended the ranks by then, and none of them can say more.
        killed = RankFailure(rank=first, summary=str(error), time_s=time.time(), killer=error.sigval)
        return [killed]
    return []


def _rank_variables(processes: int) -> dict[str, str]:
    """What the ranks find in their environment beside torchrun's variables; the user's own settings stay."""
    defaults = {
        # Equal shares of the cores: if every rank used all of them, the ranks' threads would displace one another.
        THREADS_VARIABLE: str(computing_threads(processes)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_SHUTDOWN_TIMEOUT_S),
        # Here too: ranks that are forks have imported torch before they begin.
        **device_settings(os.environ),
    }
    variables = {
        LAUNCHER_VARIABLE: str(os.getpid()),
        # Otherwise folders of the current directory could be imported in place of packages.
        "PYTHONSAFEPATH": "1",
        # What a rank printed last must be in its file when it is killed.
        "PYTHONUNBUFFERED": "1",
    }
    # The ranks' stderr is a file: rank 0 draws its progress line on the launcher's terminal, if there is one.
    variables[TERMINAL_VARIABLE] = ""
    if sys.stderr.isatty():
        with contextlib.suppress(OSError):
            variables[TERMINAL_VARIABLE] = os.ttyname(sys.stderr.fileno())
    return {**{name: os.environ.get(name) or value for name, value in defaults.items()}, **variables}


@contextlib.contextmanager
def _changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set `variables` for the ranks, which inherit this process's environment; the agent takes no other."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        # The whole environment, whatever else was set meanwhile: the next start must not inherit anything from this
        # one.
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _agent_log(path: Path) -> Iterator[None]:
    """Keep what the agent says about its work out of the user's way, in `path`."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()


class _LogFile(logging.FileHandler):
    """On a disk that may be full or gone: no message about the agent's work is worth a stack on the user's terminal."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class _RankLogs(LogsSpecs):
    """Files rank-N.out and rank-N.err in one directory; rank 0's are shown as they grow.

    `meeting`: where the ranks meet those of other nodes, of which the agent, which numbers its ranks from 0, knows
    nothing. This is the last that is asked before they start, and what it leaves in their environment counts.
    """

    def __init__(self, directory: Path, meeting: Rendezvous | None) -> None:
        super().__init__(log_dir=str(directory))
        self._directory, self._meeting = directory, meeting

    @property
    def root_log_dir(self) -> str:
        return str(self._directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destination = LogsDest()
        for local_rank, variables in envs.items():
            if self._meeting is not None:
                variables.update(_among_all(local_rank, len(envs), self._meeting))
            stem = str(self._directory / f"rank-{variables['RANK']}")
            destination.stdouts[local_rank] = f"{stem}.out"
            destination.stderrs[local_rank] = f"{stem}.err"
            # Both: the agent looks where `error_files` says, the rank writes where its variable says (`rank.py`).
            destination.error_files[local_rank] = variables[ERROR_FILE_VARIABLE] = f"{stem}.error.json"
            if variables["RANK"] == "0":
                destination.tee_stdouts[local_rank] = f"{stem}.out"
                destination.tee_stderrs[local_rank] = f"{stem}.err"
        return destination


def _among_all(local_rank: int, processes: int, meeting: Rendezvous) -> dict[str, str]:
    """torchrun's variables of a rank of one node of several."""
    return {
        "RANK": str(meeting.node * processes + local_rank),
        "GROUP_RANK": str(meeting.node),
        "WORLD_SIZE": str(meeting.num_nodes * processes),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
    }
