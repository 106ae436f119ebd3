"""Failures on the other hosts of a run, on each of which a user started the launcher.

No connection joins these launchers, but all see the run's directory. Each leaves there why its ranks failed. Otherwise
ranks of other hosts wait for the lost ones as long as a collective may take, and then know only that somebody is lost.
"""

import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Self

from lightscale.errors import UserError
from lightscale.launch.launcher.reports import read_report, report_files, write_report
from lightscale.launch.launcher.torchrun import Launch, NodeReport, conclude
from lightscale.launch.launcher.watchdog import rank_processes
from lightscale.runs.repeated import Repeated
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.health.heartbeat import STARTING

_POLL_S = 0.5
# Ranks that notice a loss themselves leave where they were.
_GRACE_S = 5.0
# For the report of the host whose loss ranks of this one have noticed.
_PATIENCE_S = 3.0

_File = tuple[int, int]


def has_trained(report: NodeReport) -> bool:
    """Whether ranks came to a step: only then the run is theirs.

    Before, every rank says itself what is wrong, and the run may be that of another job, which goes on.
    """
    return any(beat.doing != STARTING for beat in report.beats.values())


class OtherHosts:
    """Watches the other hosts while the ranks of host `node` run; a context manager.

    After another host has reported a failure, ranks here that do not end within seconds are killed.
    """

    def __init__(self, run: RunDirectory, node: int) -> None:
        self._run, self._node = run, node
        self._folder = run.logs / "hosts"
        # Of earlier starts. Every host removes its own before its ranks can meet those of the others.
        self._old: dict[int, _File] = {}
        self._known_s: float | None = None
        self._has_killed = False
        self._watching = Repeated(self._watch, period_s=_POLL_S, name="other hosts")

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError):
            (self._folder / f"node-{self._node}.json").unlink(missing_ok=True)
        self._old = self._files()
        self._watching.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._watching.stop()

    def conclude(self, report: NodeReport, logs: Path) -> Launch:
        """The end of the ranks of all hosts, of which `report`, with the output in `logs`, is that of this one.

        What a rank refuses has precedence: the others only lost it.
        """
        own = conclude([report], logs)
        if own.failure is None or not has_trained(report):
            return own
        if not self._has_killed:
            # With its place already: of ranks of other hosts only these beats are known.
            self._leave(NodeReport(failures=[own.failure], hang=None, beats={}))
        if own.failure.exit_code is not None:
            return own
        deadline_s = time.monotonic() + _PATIENCE_S
        while not (others := self._reports()) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        refusals = [one for each in others for one in each.failures if one.exit_code is not None]
        found = conclude(others if others and self._has_killed else [report, *others], logs)
        return replace(found, failure=min(refusals, key=lambda one: one.time_s)) if refusals else found

    def _watch(self) -> None:
        # As soon as it is there: rank 0 makes it when the ranks have met.
        with contextlib.suppress(UserError):
            self._run.hold()
        if self._known_s is None:
            self._known_s = time.monotonic() if self._reports() else None
        elif time.monotonic() > self._known_s + _GRACE_S and not self._has_killed:
            self._has_killed = True
            for process in rank_processes():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _files(self) -> dict[int, _File]:
        """Of each other host with a report, what changes with every report."""
        found = {}
        for node, path in report_files(self._folder).items():
            with contextlib.suppress(OSError):
                status = path.stat()
                found[node] = (status.st_ino, status.st_mtime_ns)
        return {node: file for node, file in found.items() if node != self._node}

    def _reports(self) -> list[NodeReport]:
        new = {node for node, file in self._files().items() if file != self._old.get(node)}
        return [read_report(path, node) for node, path in report_files(self._folder).items() if node in new]

    def _leave(self, report: NodeReport) -> None:
        # On a disk that is full, or where the run's directory was replaced, the others find out by themselves.
        with contextlib.suppress(OSError, UserError):
            self._run.check_held()
            self._folder.mkdir(parents=True, exist_ok=True)
            write_report(self._folder, self._node, report)
