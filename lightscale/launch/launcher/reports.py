"""Reports of the end of ranks, which nodes leave for others in a folder that all see."""

import dataclasses
import json
import signal
import time
from pathlib import Path
from typing import Any

from lightscale.errors import UserError
from lightscale.files import read_regular
from lightscale.launch.launcher.failures import RankFailure
from lightscale.launch.launcher.torchrun import NodeReport
from lightscale.launch.launcher.watchdog import Hang
from lightscale.runs.run_directory import write_atomically
from lightscale.training.health.heartbeat import Beat

_MOST_BYTES = 1 << 28


def write_report(folder: Path, node: int, report: NodeReport) -> None:
    """Write `report` of `node`, with wall-clock times, because monotonic clocks differ between machines."""
    offset_s = time.time() - time.monotonic()
    record = {
        "failures": [dataclasses.asdict(failure) for failure in report.failures],
        "hang": None if report.hang is None else dataclasses.asdict(report.hang),
        "beats": [
            dataclasses.asdict(dataclasses.replace(beat, time_s=beat.time_s + offset_s))
            for beat in report.beats.values()
        ],
    }
    write_atomically(folder / f"node-{node}.json", json.dumps(record))


def read_reports(folder: Path) -> dict[int, NodeReport]:
    """The reports so far, by node; one without a report at the end was killed, or lost."""
    files = report_files(folder)
    return {node: read_report(files[node], node) for node in sorted(files)}


def report_files(folder: Path) -> dict[int, Path]:
    """The files of the reports so far, by node."""
    # By listing the directory: network file systems cache that a name is missing, so that asking for each by name would
    # not find a report that was written since.
    names = ((path, path.stem.partition("-")[2]) for path in folder.glob("node-*.json"))
    return {int(number): path for path, number in names if number.isdecimal()}


def read_report(path: Path, node: int) -> NodeReport:
    """The report of `node`. One that cannot be read is that of a failure: what happened on the node is unknown."""
    try:
        return _parsed(read_regular(path, what="the report of a node", most_bytes=_MOST_BYTES))
    except (OSError, UserError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        failure = RankFailure(rank=0, summary=f"node {node}: {path} is unreadable: {error}", time_s=time.time())
        return NodeReport(failures=[failure], hang=None, beats={})


def _parsed(content: bytes) -> NodeReport:
    record: dict[str, Any] = json.loads(content.decode("utf-8"))
    offset_s = time.monotonic() - time.time()
    beats = [Beat(**{**beat, "time_s": beat["time_s"] + offset_s}) for beat in record["beats"]]
    hang = record["hang"]
    return NodeReport(
        failures=[
            RankFailure(**{**one, "killer": signal.Signals(one["killer"]) if one["killer"] else None})
            for one in record["failures"]
        ],
        hang=Hang(**{**hang, "ranks": tuple(hang["ranks"])}) if hang else None,
        beats={beat.rank: beat for beat in beats},
    )
