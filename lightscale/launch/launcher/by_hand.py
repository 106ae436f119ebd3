"""The ranks of one of several hosts, on each of which a user has started the launcher.

    host 0: launcher ──▶ ranks 0, 1, …     ┐
                                           ├ meet at --master-addr, --master-port, of host 0
    host 1: launcher ──▶ the next ranks    ┘

The launchers are not connected: only ranks meet (`meeting.py`). Rank 0 holds the run, and its status is the result for
all hosts. So no launcher can restart the ranks of all hosts: after a failure every launcher ends with its ranks and
tells the others why (`other_hosts.py`), and the same commands resume the run. Output of ranks stays on their host until
they succeed: before all ranks have met, nothing may be written into the run.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lightscale.errors import UserError
from lightscale.launch.launcher.fork import Program
from lightscale.launch.launcher.other_hosts import OtherHosts, has_trained
from lightscale.launch.launcher.rank import EXIT_CRASHED, SEVERAL_LAUNCHERS_VARIABLE
from lightscale.launch.launcher.relay import StopRelay
from lightscale.launch.launcher.rendezvous import Rendezvous
from lightscale.launch.launcher.restart import (
    EXIT_CODES,
    RankMistake,
    RestartPolicy,
    missing_status,
    print_failure,
    say_end,
    since_the_epoch,
    stop_reason,
    write_status,
)
from lightscale.launch.launcher.torchrun import run_node
from lightscale.runs.run_directory import RunDirectory

# After `restart.collective_timeout_s`, when a rank gives up waiting for another host by itself.
_MARGIN_S = 60.0


def run_host(
    run: RunDirectory,
    command: Sequence[str],
    *,
    processes: int,
    rendezvous: Rendezvous,
    resume: str,
    policy: RestartPolicy,
    program: Program | None,
) -> int:
    """Run `command` once as the `processes` ranks of this host until they end; returns this host's exit code.

    `resume` is the command line that resumes the run here; `program` is passed to `torchrun.run_node`. Raises UserError
    if a rank refuses, and `CannotStart` (exit code 75) if ranks did not come.
    """
    logs = Path(tempfile.mkdtemp(prefix="lightscale-train-"))
    os.environ[SEVERAL_LAUNCHERS_VARIABLE] = "1"
    with StopRelay() as relay, OtherHosts(run, rendezvous.node) as others:
        report = run_node(
            command,
            processes=processes,
            logs=logs,
            hang_timeout_s=policy.config.hang_timeout_s,
            deadline_s=since_the_epoch(policy.deadline_s),
            rendezvous=rendezvous,
            program=program,
            # A rank that waits for another host, as while the network is away, is no rank that hangs.
            patience_s=policy.config.collective_timeout_s + _MARGIN_S,
        )
    failure = others.conclude(report, logs).failure or missing_status(run)
    if failure is None:
        shutil.rmtree(logs, ignore_errors=True)
        return say_end(run, resume)
    host = failure.rank // processes
    is_here = host == rendezvous.node
    if failure.exit_code is not None:
        shutil.rmtree(logs, ignore_errors=True)
        if rendezvous.node == 0 and has_trained(report) and failure.mistake_code is not None:
            # Rank 0 has said no more than that it lost a rank, if anything. Where that cannot be written it stays so.
            with contextlib.suppress(OSError, UserError):
                write_status(run, "stopped", f"rank {failure.rank}: {failure.summary}")
        where = "" if is_here else f"rank {failure.rank}, on host {host}: "
        raise RankMistake(f"{where}{failure.summary}", failure.exit_code)
    stop = stop_reason(relay.received, failure, policy.deadline_s)
    if stop is None:
        if is_here and failure.traceback is None:
            print_failure(failure, logs)
        else:
            # Most often another host is gone, of which a stack says nothing; where it may help the line says where.
            where = "" if is_here else f", on host {host},"
            text = f"rank {failure.rank}{where} failed: {failure.summary} (output of this host's ranks: {logs})"
            print(text, file=sys.stderr)
        code = EXIT_CRASHED
    else:
        text = f"{stop}, and rank {failure.rank} did not save: {failure.summary} (output of its host's ranks: {logs})"
        print(text, file=sys.stderr)
        code = EXIT_CODES["resumable"]
    print(f"resume on all {rendezvous.num_nodes} hosts with: {resume}", file=sys.stderr)
    return code
