"""Jobs that follow a run and evaluate each new checkpoint; the run keeps checkpoints until its followers are done.

    RUN/evaluation/followers/HOST-PID.json      a follower: its tasks, the steps done, and the current step

A follower renews its file every few seconds, also while it computes. A file without renewal for a minute belongs to a
dead follower and keeps no checkpoint; the next follower removes it. Ages are compared with the age of a new file, so
that no machine's clock matters.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from lightscale.errors import UserError
from lightscale.files import read_regular
from lightscale.runs.repeated import Repeated
from lightscale.runs.run_directory import RunDirectory, write_atomically

RENEW_S = 5.0
STALE_S = 60.0
"""Twelve renewals: a file system that hangs for a while must not cost a living follower its checkpoints."""
_MOST_BYTES = 2**24


@dataclass(kw_only=True)
class _Record:
    """The content of a follower's file."""

    tasks: list[str]
    done: list[int] = field(default_factory=list)
    """Steps of checkpoints that it no longer needs; it needs all others."""
    at: int | None = None
    """The step in evaluation."""


class Follower:
    """This process as a follower of ``run``; a context manager."""

    def __init__(self, run: RunDirectory, tasks: Collection[str]) -> None:
        self._folder = _folder(run)
        self._path = self._folder / f"{socket.gethostname()}-{os.getpid()}.json"
        self._record = _Record(tasks=sorted(tasks))
        self._renewing = Repeated(self._renew, period_s=RENEW_S, name="follower")

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        for path, _ in _records(self._folder, alive=False):
            path.unlink(missing_ok=True)
        self._write()
        self._renewing.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._renewing.stop()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def set_done(self, steps: Collection[int]) -> None:
        """Record that the checkpoints of ``steps`` are no longer needed."""
        if sorted(steps) != self._record.done or self._record.at is not None:
            self._record.done, self._record.at = sorted(steps), None
            self._write()

    def take(self, step: int) -> bool:
        """Try to claim ``step``; False if another follower with one of the same tasks evaluates it."""
        self._record.at = step
        self._write()
        # Written before the others are read: of two that want one step at once, at least one sees the other.
        for path, record in _records(self._folder, alive=True):
            if path == self._path or record is None:
                continue
            if record.at == step and set(record.tasks) & set(self._record.tasks):
                self._record.at = None
                self._write()
                return False
        return True

    def _write(self) -> None:
        write_atomically(self._path, json.dumps(asdict(self._record)) + "\n")

    def _renew(self) -> None:
        # The file system may be out of reach for a while.
        with contextlib.suppress(OSError):
            os.utime(self._path)


def needed(run: RunDirectory, steps: Collection[int]) -> set[int]:
    """Those of ``steps`` whose checkpoints a living follower of ``run`` still needs."""
    found: set[int] = set()
    for _, record in _records(_folder(run), alive=True):
        # What is being written, or damaged, may need all.
        found |= set(steps) - set([] if record is None else record.done)
    return found


def _folder(run: RunDirectory) -> Path:
    return run.evaluation / "followers"


def _records(folder: Path, *, alive: bool) -> Iterator[tuple[Path, _Record | None]]:
    """The files of followers that are alive, or of those that are not; None for a content that cannot be read."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        return
    now = _now(folder)
    for path in paths:
        try:
            age_s = now - path.lstat().st_mtime
            record = _read(path)
        except OSError:
            # Gone meanwhile.
            continue
        if (age_s < STALE_S) == alive:
            yield path, record


def _read(path: Path) -> _Record | None:
    try:
        record = _Record(**json.loads(read_regular(path, what="the file of a follower", most_bytes=_MOST_BYTES)))
        is_whole = all(type(step) is int for step in record.done) and all(type(task) is str for task in record.tasks)
    except (UserError, ValueError, TypeError, RecursionError):
        return None
    return record if is_whole else None


def _now(folder: Path) -> float:
    """By the clock that dates the files of ``folder``."""
    try:
        path = folder / "now"
        path.touch()
        return path.stat().st_mtime
    except OSError:
        return time.time()
