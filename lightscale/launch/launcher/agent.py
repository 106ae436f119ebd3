"""The program of one node: it starts and supervises the node's ranks, and writes a report of their end.

    launcher ── scheduler ──▶ agent of node 0 ──▶ ranks 0, 1, …
                         └──▶ agent of node 1 ──▶ the next ranks, …

The launcher, or the scheduler itself (preemption), sends stop signals to an agent, which relays them. It ends with the
process that started it, and its ranks end with it. Launcher and agents share only the order (the command line) and the
files of the run's logs, without a connection that could break.
"""

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lightscale.errors import remedy_of_limit, summary
from lightscale.launch.launcher.failures import RankFailure
from lightscale.launch.launcher.relay import StopRelay
from lightscale.launch.launcher.rendezvous import Rendezvous
from lightscale.launch.launcher.reports import write_report
from lightscale.launch.launcher.torchrun import NodeReport, run_node
from lightscale.output.streams import take_over_output
from lightscale.training.signals import die_with_parent

# After a failure, for the other nodes to say what they met, before the scheduler ends them because of this one.
_OTHERS_S = 10.0
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Order:
    """The one argument of all agents of a launch, as JSON.

    It holds all differences between starts, but none between nodes, because a scheduler starts the same command line on
    all of them.
    """

    command: list[str]
    processes: int
    """Ranks per node."""
    logs: str
    hang_timeout_s: float
    deadline_s: float | None
    address: str
    """Address of the first node."""
    port: int
    num_nodes: int
    node_variable: str
    """Variable in which the scheduler gives each agent the number of its node, from 0."""

    def text(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """The inverse."""
        return cls(**json.loads(text))


def main(arguments: Sequence[str]) -> int:
    """Run the agent; exit code 0: all ranks of this node exited with 0."""
    # The scheduler's daemon that started this process may be killed, and then nobody else would end this node's ranks.
    die_with_parent(os.getppid())
    order = Order.read(arguments[0])
    node = int(os.environ[order.node_variable])
    logs = Path(order.logs)
    # What it shows of its ranks goes through the scheduler's programs, which may be stopped or gone.
    take_over_output()
    # Ranks are in sessions of their own: no signal to this process, or to its group, reaches them.
    with StopRelay():
        report = _run(order, node, logs)
        # Before anything else: an agent without a report counts as lost with its node.
        write_report(logs, node, report)
        if not report.failures:
            return 0
        deadline_s = time.monotonic() + _OTHERS_S
        while time.monotonic() < deadline_s and len(list(logs.glob("node-*.json"))) < order.num_nodes:
            time.sleep(_POLL_S)
        # With which the scheduler ends the other agents.
        return 1


def _run(order: Order, node: int, logs: Path) -> NodeReport:
    rendezvous = Rendezvous(
        address=order.address, port=order.port, node=node, num_nodes=order.num_nodes, of_agents=True
    )
    try:
        return run_node(
            order.command,
            processes=order.processes,
            logs=logs,
            hang_timeout_s=order.hang_timeout_s,
            deadline_s=order.deadline_s,
            rendezvous=rendezvous,
        )
    except (RuntimeError, OSError) as error:
        # The agents did not meet, or the file system failed. Reported like the failure of a rank, so that the launcher
        # has one kind of failure to decide about.
        failure = RankFailure(
            rank=node * order.processes,
            summary=f"agent on {os.uname().nodename}: {summary(error)}",
            limit=remedy_of_limit(error),
            traceback=traceback.format_exc(),
            time_s=time.time(),
            is_recorded=True,
        )
        return NodeReport(failures=[failure], hang=None, beats={})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
