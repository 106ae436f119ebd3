"""Fault injection, to test recovery: a process kills, stops or delays itself where it enters a named phase.

`fault_point(POINT)` stands at the beginning of each phase and does nothing, unless the environment variable
LIGHTSCALE_FAULT holds one of

    ACTION@POINT[#N] [rank=R]   when this process (if it is rank R) reaches POINT for the Nth time (default: the first)
    @FOLDER                     the file FOLDER/rank-R of this rank holds such a specification. The file may come and
                                go while the process runs; counting restarts with each file. It is removed just before
                                its fault happens, which thus happens once, however often ranks are restarted.

with the actions

    kill, kill=SECONDS          SIGKILL to itself, at once or so long after
    stop                        SIGSTOP to itself
    raise=ENOSPC, raise=EIO     that OSError
    slow=SECONDS                a pause, now and each later time (its file stays); it ends when the file goes

The chaos harness (`lightscale chaos`) and the tests use it; nothing sets the variable in an ordinary run.
"""

import errno
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lightscale.errors import UserError

VARIABLE = "LIGHTSCALE_FAULT"

SAVE_POINTS = (
    "save:begin",
    "save:open",
    "save:write",
    "save:sync",
    "save:manifest",
    "save:rename",
    "save:retention",
)
LOAD_POINTS = ("load:verify", "load:read")
STEP_POINTS = ("step:begin", "step:optimizer")
POINTS = (*SAVE_POINTS, *LOAD_POINTS, *STEP_POINTS)

_SPECIFICATION = re.compile(
    r"(?P<action>kill|stop|raise|slow)(=(?P<value>[A-Z]+|\d+(\.\d+)?))?"
    r"@(?P<point>[a-z]+:[a-z]+)(#(?P<count>[1-9]\d*))?( +rank=(?P<rank>\d+))?"
)
# Between two looks whether a pause was withdrawn.
_LOOK_S = 0.05
_ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO}


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """An action and its place. `str` gives the specification that `parse` reads."""

    action: str
    """kill, stop, raise or slow."""
    value: str | None = None
    """Name of the error to raise; seconds of a pause or until the kill."""
    point: str
    count: int = 1
    """At which pass through `point`, from 1."""
    rank: int | None = None
    """None: any rank."""

    @classmethod
    def parse(cls, specification: str, origin: str) -> Self:
        """The fault of `specification`; `origin` names its source in a UserError."""
        match = _SPECIFICATION.fullmatch(specification.strip())
        if match is None or match["point"] not in POINTS or not _fits(match["action"], match["value"]):
            raise UserError(
                f'{origin} = "{specification.strip()}": must be ACTION@POINT[#N] [rank=R] with ACTION of kill, '
                "kill=SECONDS, stop, raise=ENOSPC, raise=EIO, slow=SECONDS and POINT of "
                f"{', '.join(POINTS)}; or @FOLDER"
            )
        rank = None if match["rank"] is None else int(match["rank"])
        count = int(match["count"] or 1)
        return cls(action=match["action"], value=match["value"], point=match["point"], count=count, rank=rank)

    def __str__(self) -> str:
        value = "" if self.value is None else f"={self.value}"
        rank = "" if self.rank is None else f" rank={self.rank}"
        return f"{self.action}{value}@{self.point}#{self.count}{rank}"

    def happen(self, file: Path | None = None) -> None:
        """Do it to this process. A pause ends early where `file`, that of the fault, is withdrawn."""
        if self.action == "raise":
            assert self.value is not None
            code = _ERRORS[self.value]
            raise OSError(code, f"{os.strerror(code)} (injected by {VARIABLE})", self.point)
        if self.action == "slow":
            deadline_s = time.monotonic() + float(self.value or 0)
            while (left_s := deadline_s - time.monotonic()) > 0 and (file is None or file.exists()):
                time.sleep(left_s if file is None else min(left_s, _LOOK_S))
        elif self.action == "kill" and self.value is not None:
            # From another thread: the process goes on, and dies somewhere in the middle of its next work.
            threading.Timer(float(self.value), os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            # Both act on all threads at once, and no handler can delay them: no buffer is flushed, no `finally` runs.
            os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)


def fault_point(point: str) -> None:
    """This process enters the phase `point`, one of `POINTS`: the fault that is armed for it happens here."""
    # Asked at every point: in an ordinary run this is all that fault injection costs.
    setting = os.environ.get(VARIABLE)
    if setting:
        assert point in POINTS, point
        _armed.enter(point, setting)


def fault_file(folder: Path, rank: int) -> Path:
    """The file with the fault of `rank`, for LIGHTSCALE_FAULT = @`folder`."""
    return folder / f"rank-{rank}"


class _Armed:
    """The fault that is set, and how often its point was entered since."""

    def __init__(self) -> None:
        # The thread that writes checkpoints enters its points while the training loop enters others.
        self._lock = threading.Lock()
        self._specification = ""
        self._fault: InjectedFault | None = None
        self._entered = 0

    def enter(self, point: str, setting: str) -> None:
        rank = int(os.environ.get("RANK", "0"))
        file = fault_file(Path(setting[1:]), rank) if setting.startswith("@") else None
        with self._lock:
            self._read(setting, file)
            fault = self._fault
            if fault is None or fault.point != point or fault.rank not in (None, rank) or not self._is_due(fault):
                return
            if file is not None and fault.action != "slow":
                # The same specification may come again, in a new file, before the next fault point.
                self._specification, self._fault = "", None
                if not _claim(file):
                    return
        # Outside the lock: a pause must not keep the other thread from its own points.
        fault.happen(file)

    def _read(self, setting: str, file: Path | None) -> None:
        try:
            specification = setting if file is None else file.read_text(encoding="utf-8")
        except FileNotFoundError:
            specification = ""
        # The harness may arm and withdraw faults while the process runs. The count begins anew only with another text.
        if specification != self._specification:
            origin = VARIABLE if file is None else str(file)
            self._fault = InjectedFault.parse(specification, origin) if specification else None
            self._specification, self._entered = specification, 0

    def _is_due(self, fault: InjectedFault) -> bool:
        self._entered += 1
        # A slow disk stays slow; all else happens once, also where no file is there to be removed.
        return self._entered >= fault.count if fault.action == "slow" else self._entered == fault.count


_armed = _Armed()


def _claim(file: Path) -> bool:
    """Remove `file`; False: it was withdrawn meanwhile."""
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True


def _fits(action: str, value: str | None) -> bool:
    if action == "raise":
        return value in _ERRORS
    is_number = value is not None and not value.isalpha()
    return {"kill": value is None or is_number, "stop": value is None, "slow": is_number}[action]
