"""The frame of a rank's process, which ends with its launcher and records its error for it."""

import contextlib
import faulthandler
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from lightscale.errors import UserError, remedy_of_limit, summary
from lightscale.output.streams import take_over_output
from lightscale.training.health.heartbeat import HEARTBEATS_VARIABLE, read_heartbeats
from lightscale.training.signals import STOP_SIGNALS, die_with_parent

EXIT_CRASHED = 1

# Process id of the launcher, for its ranks.
LAUNCHER_VARIABLE = "LIGHTSCALE_LAUNCHER"
# Set where every host has a launcher of its own: none of them holds the run.
SEVERAL_LAUNCHERS_VARIABLE = "LIGHTSCALE_SEVERAL_LAUNCHERS"
# The directory of the launch's logs, for its ranks.
LOGS_VARIABLE = "LIGHTSCALE_LOGS"
# Where torchrun's agent looks for the error of a rank.
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
# In the errors of torch and gloo after a collective that some rank did not join.
TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
# What the launcher redirects a rank's stdout to.
_OUTPUT_FILE = re.compile(r"rank-([0-9]+)\.out")
# At most this many peers are named in a message.
_MOST_PEERS = 8
# The signal on which a rank writes the stacks of its threads, whatever it is doing.
STACKS_SIGNAL = signal.SIGUSR2


def run_rank(work: Callable[[], int]) -> int:
    """Do `work`, whose result is the exit code. Exceptions are recorded for the launcher, which shows the first.

    Stop signals end the process until `work` handles them. The end of the launcher always ends it.
    """
    # Crashes of native code (SIGSEGV, SIGABRT) raise no exception: their stacks go to the rank's stderr, or nowhere.
    faulthandler.enable()
    # Their logs may be on the disk that the run fills, or, with torchrun or srun, be a pipe that nobody reads.
    take_over_output()
    # By their default action signals leave no record. Then the launcher could not tell the rank that was signalled
    # first from those that torch ended because of it.
    for signum in STOP_SIGNALS:
        signal.signal(signum, _end)
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is not None:
        die_with_parent(int(launcher))
    _leave_stacks_on_request()
    try:
        return work()
    except Exception as error:
        exit_code = error.EXIT_CODE if isinstance(error, UserError) else None
        # Our own launcher knows from the heartbeats where each rank was, torchrun only from what ranks report.
        message = summary(error) if launcher is not None else summary_and_notes(error)
        if TIMED_OUT.search(message):
            message += _what_peers_do()
        # With our launcher the traceback is in the record, and shown once. With torchrun or srun nobody else would show
        # it.
        stack, limit = traceback.format_exc(), remedy_of_limit(error)
        if not _record(message, py_callstack=stack, exit_code=exit_code, limit=limit) or launcher is None:
            raise
        return EXIT_CRASHED if exit_code is None else exit_code


def summary_and_notes(error: Exception) -> str:
    """Summary of an error with its notes about the position."""
    return " ".join([summary(error), *(f"({note})" for note in getattr(error, "__notes__", []))])


def stacks_file(logs: Path, rank: int) -> Path:
    """File for the stacks of `rank` in the launch directory `logs`."""
    return logs / f"rank-{rank}.stacks"


def rank_of(process: psutil.Process) -> int | None:
    """The rank of a process, or None. Read from its environment or, for a fork, whose environment the kernel shows as
    before the fork, from its output file. Raises psutil.Error.
    """
    if (number := process.environ().get("RANK")) is not None:
        return int(number)
    for file in process.open_files():
        if file.fd == 1 and (match := _OUTPUT_FILE.fullmatch(Path(file.path).name)):
            return int(match[1])
    return None


def _what_peers_do() -> str:
    """What the other ranks of this launcher are doing, one of which did not join a collective, for the error message.

    Those that can write their stacks now: when this rank has ended, the others are ended too.
    """
    heartbeats, own = os.environ.get(HEARTBEATS_VARIABLE), int(os.environ.get("RANK", "0"))
    if not heartbeats:
        return ""
    peers = {beat.rank: beat for beat in read_heartbeats(Path(heartbeats)).values() if beat.rank != own}
    peers_do = []
    for rank, beat in peers.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(beat.process_id)
            # Process ids are used again; a peer is a child of the same launcher, and nothing else may be signalled.
            if process.ppid() != os.getppid():
                continue
            if process.status() == psutil.STATUS_STOPPED:
                peers_do.append(f"rank {rank} is stopped by a signal, at {beat.where}")
            elif process.status() != psutil.STATUS_ZOMBIE:
                process.send_signal(STACKS_SIGNAL)
                peers_do.append(f"rank {rank} is at {beat.where}, rank-{rank}.stacks")
    return "".join(f"; {one}" for one in peers_do[:_MOST_PEERS])


def _leave_stacks_on_request() -> None:
    logs = os.environ.get(LOGS_VARIABLE)
    if logs:
        # Open for as long as the process lives: the handler itself can only write.
        file = os.open(stacks_file(Path(logs), int(os.environ["RANK"])), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)


def _end(signum: int, frame: FrameType | None) -> None:
    """Die of the signal, but say when: the others are ended by the same signal because of this one."""
    _record(f"ended by {signal.Signals(signum).name} before training began", signal=signum)
    # By the signal's own action, so that whoever waits for this process sees a death by that signal, not an exit code.
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _record(
    text: str,
    *,
    py_callstack: str = "",
    exit_code: int | None = None,
    signal: int | None = None,
    limit: str | None = None,
) -> bool:
    """Write what ends this rank where the agent looks for it, in torchrun's form with more fields; if it could."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return False
    now = time.time()
    extra: dict[str, Any] = {
        "py_callstack": py_callstack,
        "timestamp": str(int(now)),
        # Whole seconds do not tell the rank that failed from those that lost it.
        "time_s": now,
        "exit_code": exit_code,
        "signal": signal,
        "limit": limit,
    }
    draft = Path(f"{path}.tmp")
    try:
        # At once: the agent, which reads it when this process is gone, fails over half a record.
        draft.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), "utf-8")
        draft.rename(path)
    except OSError:
        return False
    return True
