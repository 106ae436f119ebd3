"""The lock of a run directory: one job at a time may write to it.

    RUN/lock/000007     the process that holds the run, or held it last: host, process, boot, job, and since when

A process takes the lock by creating the file with the next number, which only one process can do. It then removes the
older files; no other process removes the file with the highest number. So two jobs cannot both take over from a dead
one, on any file system and from any machines.

Three signs show whether the holder of the highest number is alive. Its file is locked (flock): the kernel releases it
when the process dies, so that the next start on the same machine works at once. Where flock does not reach other
machines, the file's modification time does: the holder renews it every few seconds. It is compared with the time of a
new file, so that no machine's clock matters. Without flock (Lustre mounted without it), the holder is searched among
the processes of its machine. An empty file was released.
"""

import datetime
import errno
import fcntl
import json
import os
import re
import socket
import stat
import sys
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, Self

import psutil

from lightscale.errors import UserError
from lightscale.files import NotRegular, read_regular
from lightscale.runs.job_environment import job_id
from lightscale.runs.processes import boot_id, started_s
from lightscale.runs.repeated import Repeated
from lightscale.runs.run_directory import RunDirectory

_RENEW_S = 5.0
# Twelve renewals: a file system that hangs for a while must not cost a living job its lock.
_STALE_S = 60.0
_NUMBER = re.compile(r"[0-9]{6,18}")
_MOST_BYTES = 1 << 16
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class InUse(UserError):
    """Another job holds the run; ``job`` is its number, if a scheduler started it."""

    def __init__(self, message: str, job: str | None = None) -> None:
        super().__init__(message)
        self.job = job


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a run."""

    host: str
    process: int
    process_started: float
    """Start of the process, in seconds from the boot."""
    boot: str
    """Id of the machine's current boot: differs between machines, and after each restart of one."""
    time: str
    job: str | None

    @classmethod
    def this_process(cls) -> Self:
        """The current process as a holder."""
        return cls(
            host=socket.gethostname(),
            process=os.getpid(),
            process_started=started_s(os.getpid()),
            boot=boot_id(),
            time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            job=job_id(),
        )

    def is_running(self) -> bool:
        """Whether the process exists on this machine."""
        try:
            # Process ids are used again; one that started at another time is another process.
            return abs(started_s(self.process) - self.process_started) < 1.0
        except psutil.NoSuchProcess:
            return False

    def __str__(self) -> str:
        job = f" of job {self.job}" if self.job else ""
        return f"process {self.process} on {self.host}{job}, since {self.time}"


# Of a lock file that is damaged. Its boot and host are no machine's.
_UNKNOWN = Holder(host="an unknown host", process=0, process_started=0.0, boot="", time="an unknown time", job=None)


class RunLock:
    """Locks the run directory `run` for this process; a context manager, entered before any write to the run.

    Entering raises ``InUse`` if another job holds the run. A dead holder is replaced, which is recorded as an event.
    If the lock is lost (this machine was suspended, and another job took over), the process ends at once: two jobs
    would destroy each other's records.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._directory = run.path / "lock"
        self._number = 0
        self._file = -1
        self._renewing = Repeated(self._renew, period_s=_RENEW_S, name="run-lock")

    def __enter__(self) -> Self:
        draft = self._directory / f"draft-{uuid.uuid4().hex}"
        try:
            self._directory.mkdir(exist_ok=True)
            self._file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except (FileExistsError, NotADirectoryError):
            # Not set aside: of two jobs that did so at once, the second would move the lock of the first.
            raise UserError(f"{self._directory}: must be a directory; remove it if no job uses the run") from None
        except PermissionError as error:
            raise UserError(f"{self._directory}: user {os.geteuid()} may not write here: {error.strerror}") from None
        try:
            # Locked and complete before it gets its number: nobody may find a file of a living holder unlocked.
            _lock(self._file, fcntl.LOCK_EX)
            os.write(self._file, json.dumps(asdict(Holder.this_process())).encode())
            os.fsync(self._file)
            before = self._take(draft)
        except BaseException:
            os.close(self._file)
            raise
        finally:
            draft.unlink()
        if before is not None:
            self._run.event("lock_taken_over", **{f"from_{name}": value for name, value in asdict(before).items()})
        self._renewing.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._renewing.stop()
        # Emptied, not removed: numbers only grow, or a process that read the directory before could take one beside the
        # next holder. And before close, which releases the flock: a file that still names a holder, unlocked, is that
        # of a dead one.
        os.ftruncate(self._file, 0)
        os.close(self._file)

    def _take(self, draft: Path) -> Holder | None:
        """Give `draft`, which is locked, the next number; returns the dead holder of the previous one, if any."""
        newest = max(self._numbers(), default=0)
        before = self._check_dead(self._path(newest), draft) if newest else None
        self._number = newest + 1
        try:
            # Fails where the number is taken, on network file systems too; a rename would replace the other's file.
            os.link(draft, self._path(self._number))
        except FileExistsError:
            self._refuse(self._path(self._number))
        if max(self._numbers()) != self._number:
            # Others have taken and released the run since `newest` was read, so that this number was free again.
            self._path(self._number).unlink()
            self._refuse(self._path(max(self._numbers())))
        for number in self._numbers():
            if number < self._number and not self._is_foreign(self._path(number)):
                self._path(number).unlink(missing_ok=True)
        return before

    def _check_dead(self, path: Path, draft: Path) -> Holder | None:
        """Raise while the holder in `path` is alive; returns it when it is dead, None when it released the run."""
        if self._is_foreign(path):
            # Nobody locks a run with it; its number is only passed over.
            return None
        try:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            self._refuse(path)
        try:
            # Now, not below: a process that takes the run meanwhile removes the file.
            renewed = os.fstat(file).st_mtime
            can_lock = _lock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            # Emptied: released, a moment before its flock is.
            if _read(path) is None:
                return None
            self._refuse(path)
        finally:
            # Also releases the lock.
            os.close(file)
        holder = _read(path)
        if holder is None or (holder.boot == boot_id() and can_lock):
            return holder
        if holder.boot == boot_id() and holder.host == socket.gethostname():
            if holder.is_running():
                self._refuse(path)
            return holder
        # Of another machine, or damaged, so that only its age tells whether somebody renews it.
        age_s = draft.stat().st_mtime - renewed
        if age_s < _STALE_S:
            limit = f"it counts as dead after {_STALE_S:.0f} s"
            self._refuse(path, f"; it renewed its lock {age_s:.0f} s ago ({limit})")
        return holder

    @staticmethod
    def _is_foreign(path: Path) -> bool:
        """Whether what lies there is no file, and so cannot be a lock."""
        try:
            return not stat.S_ISREG(path.lstat().st_mode)
        except FileNotFoundError:
            return False

    def _refuse(self, path: Path, more: str = "") -> NoReturn:
        holder = _read(path)
        raise InUse(
            f"{self._run.path} is in use by {holder or 'another job'}{more}; "
            "wait for it, stop it, or start another run with --run",
            job=holder.job if holder else None,
        )

    def _numbers(self) -> list[int]:
        # As they are written here: "²" and "7" are no names of locks.
        names = (path.name for path in self._directory.iterdir())
        return [int(name) for name in names if _NUMBER.fullmatch(name)]

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:06d}"

    def _renew(self) -> None:
        # Another directory under its name has other locks, or none: the next record detects that, and stops the job.
        if self._run.is_replaced:
            return
        try:
            os.utime(self._file)
            newest = max(self._numbers(), default=0)
        except OSError:
            # The file system is out of reach. If it stays so, the lock becomes stale and others may take it.
            return
        if newest != self._number:
            holder = _read(self._path(newest))
            print(f"error: {self._run.path} was taken over by {holder}; this job ends", file=sys.stderr, flush=True)
            # Without cleaning up: whatever this process still wrote would go into the other job's run.
            os._exit(UserError.EXIT_CODE)


def process_here(run: RunDirectory) -> int | None:
    """Process id of the holder of `run`; None: no holder, or it is on another machine."""
    locks = sorted((run.path / "lock").glob("[0-9]*"))
    holder = _read(locks[-1]) if locks else None
    is_here = holder is not None and holder.boot == boot_id() and holder.is_running()
    return holder.process if holder is not None and is_here else None


def _lock(file: int, operation: int) -> bool:
    """flock; False where the file system has none. Raises BlockingIOError where another process has the lock."""
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _read(path: Path) -> Holder | None:
    """None: released, or removed. A holder that nobody can name where the file is damaged."""
    try:
        content = read_regular(path, what="the lock of a run", most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        return None
    except NotRegular:
        return _UNKNOWN
    if not content:
        return None
    try:
        holder = Holder(**json.loads(content.decode("utf-8")))
    except (ValueError, TypeError, RecursionError):
        return _UNKNOWN
    texts = (holder.host, holder.boot, holder.time, holder.job or "")
    is_whole = type(holder.process) is int and holder.process > 0 and isinstance(holder.process_started, int | float)
    return holder if is_whole and all(isinstance(text, str) for text in texts) else _UNKNOWN
