"""The directory of one run: its configuration, records and final status.

All files survive a kill at any moment: whole files are replaced by a rename, records are appended line by line, and a
line counts once its newline is written. Damage by other programs or failing disks does not prevent a resume: damaged
lines are skipped, an unreadable status counts as none, and both are reported.
"""

import contextlib
import dataclasses
import datetime
import errno
import itertools
import json
import math
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import xxhash

from lightscale.config.fields import shown_value
from lightscale.config.files import difference, load, to_toml
from lightscale.config.optimizers import length_defaults
from lightscale.config.schedules.registry import schedule_of
from lightscale.config.schema import RunConfig
from lightscale.config.text import allow_changes, path_fault
from lightscale.errors import UserError, shortened
from lightscale.files import NotRegular, kind, open_regular, read_regular, sync
from lightscale.records import MOST_LINE_BYTES, SEAL, Record, newest_lines, parse_line, read_records, seal_of, sealed
from lightscale.runs.full_disk import MayNotWrite
from lightscale.runs.held_directory import HeldDirectory

Status = Literal["finished", "resumable", "stopped"]
# The events that begin an attempt: a process starts, or goes back to a checkpoint.
Beginning = Literal["start", "rollback"]

DAMAGE_EVENT = "records_damaged"
"""Event of a start that finds unreadable lines: ``damage``, by file name."""

GAVE_UP_EVENT = "guard_gave_up"
"""Event of a run that would roll back more often than it may: ``step``, the one to go back to, and ``reason``."""

# What may change when a run is resumed without making it another run. A section stands for all of its keys.
HARMLESS_KEYS: dict[str, str] = {
    "metrics": "changes only the records",
    "checkpoint": "changes only the time and retention of saves, not the state",
    "evaluation": "changes only measurements: no weight, no random state and no sample",
    "restart": "changes only the detection of failures and the number of restarts",
    "task.validation_mlm_probability": "changes only measurements",
    "guard.compare_replicas_every": "changes only checks",
    "guard.compare_gradients_every": "changes only checks",
    "guard.max_rollbacks": "changes only the number of rollbacks before the run stops",
    "parallel": "any layout resumes any other: batches, weights and sample order do not depend on it",
    "data.store": "a store may move; a checkpoint has its fingerprint and refuses another one",
    "data.stores": "stores may move; a checkpoint has their fingerprints and weights",
    "data.validation": "changes only measurements; the store marks the sources that are never trained on",
    "task.augmentation.workers": "the same images, changed by other threads",
    "train.cuda_graphs": "the same numbers, launched in other portions",
    "train.device": "the same computation on other hardware",
    "train.micro_batch_size": "the same batch, summed in other portions",
    "train.profile_steps": "changes only the records",
    "train.stop_step": "changes only where the run ends for now; its learning rates are those of the whole length",
    "train.validate_every": "validation changes no weight, no random state and no sample",
}

LENGTH_KEYS = ("train.steps", "train.tokens")
"""Either one decides the length of a run."""

_MOST_STATUS_BYTES = 1 << 20
# Of a file system of its own: what mkfs, snapshots and quotas put at its root.
_OF_A_MOUNT = frozenset({"lost+found", ".snapshot", ".snapshots", ".zfs"})
_SHOWN_FILES = 5
# Not in this attempt's number: it is recorded before the attempt that it belongs to.
_BEFORE_ITS_ATTEMPT = "configuration_changed"
_MOST_DIGITS = 10
"""Of a step."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The end of the last attempt: the contents of status.json."""

    status: Status
    """finished: done; resumable: start it again; stopped: needs attention."""
    reason: str
    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens trained on."""
    time: str
    """Time of writing, UTC, ISO 8601."""


def is_named(key: str, names: Collection[str]) -> bool:
    """Whether `key`, or a section that contains it, is among `names`."""
    parts = key.split(".")
    return any(".".join(parts[:length]) in names for length in range(1, len(parts) + 1))


def split_step(name: str) -> tuple[str, int | None]:
    """ "runs/first@1000" -> ("runs/first", 1000); a run alone has the step None."""
    if fault := path_fault(name):
        raise UserError(f'"{shortened(name)}": {fault}')
    run, at, step = name.rpartition("@")
    # A directory may have an @ in its name.
    if not at or Path(name).is_dir():
        return name, None
    if not (step.isdecimal() and len(step) <= _MOST_DIGITS):
        raise UserError(f'"{shortened(name)}": the step after @ must be a number, like {shortened(run)}@1000')
    return run, int(step)


def digest(config: RunConfig) -> str:
    """xxh3-128 of the resolved configuration."""
    return xxhash.xxh3_128(to_toml(config).encode()).hexdigest()


def end_text(config: RunConfig) -> str:
    """The reason of the end of a finished run of `config`."""
    total = config.total_steps
    if config.last_step == total:
        return f"all {total} steps are done"
    return f"{config.last_step} of {total} steps are done (train.stop_step)"


class RunDirectory:
    """The files in `path`. One process at a time writes them: the launcher before the ranks start, then rank 0."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.jobs = self.path / "jobs.jsonl"
        self.status = self.path / "status.json"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.tokenizer = self.path / "tokenizer"
        self.classes = self.path / "classes.json"
        self.chat = self.path / "chat.json"
        self.profile = self.path / "profile"
        self.evaluation = self.path / "evaluation"
        self.exports = self.path / "exports"
        self.logs = self.path / "logs"
        self._held: HeldDirectory | None = None

    @property
    def attempt(self) -> int:
        """Number of the current attempt, from 1; 0 before the first."""
        # The largest that is recorded, not the number of starts: one of their lines may be damaged.
        lines = (line for line in read_lines(self.events) if line["event"] != _BEFORE_ITS_ATTEMPT)
        return max((line["attempt"] for line in lines), default=0)

    def hold(self) -> None:
        """Hold the directory: later writes are refused if it is removed or replaced."""
        if self._held is None:
            try:
                self._held = HeldDirectory(self.path)
            except OSError as error:
                raise UserError(f"{self.path} cannot be opened: {error.strerror}") from None

    def check_held(self) -> None:
        """Raise ``DirectoryReplaced`` if the held directory was removed or replaced."""
        if self._held is not None:
            self._held.check()

    @property
    def is_replaced(self) -> bool:
        """Whether `check_held` would raise."""
        return self._held is not None and self._held.fault() is not None

    def damage(self) -> dict[str, str]:
        """Unreadable parts of the records: file name to the number of lines and the first fault."""
        found = {}
        for path in (self.events, self.metrics, self.jobs):
            records = read_records(path)
            if records.first_damage is not None:
                found[path.name] = damage_text(records.num_damaged, records.first_damage)
        if (fault := self.status_fault()) is not None:
            found[self.status.name] = fault
        return found

    def recover_records(self) -> None:
        """Set aside anything that blocks a record's path, and report unreadable lines once.

        Called at a start, under the lock. Afterwards every record can be written. Raises UserError if permissions
        forbid to read a record: that is no damage, and its content still counts.
        """
        self.check_held()
        aside = {}
        for path in (self.events, self.metrics, self.jobs, self.status):
            if (fault := self._foreign(path)) is not None:
                kept = _free_name(path)
                path.rename(kept)
                sync(self.path)
                aside[path.name] = f"{fault}; kept as {kept.name}"
        damage = self.damage()
        _warn(aside.values())
        # Damaged lines stay where they are, and each start finds them again: said once, until there are others.
        said: Any = next((e["damage"] for e in reversed(read_lines(self.events)) if e["event"] == DAMAGE_EVENT), {})
        if damage != said:
            _warn(damage.values())
        if aside or damage != said:
            self.event(DAMAGE_EVENT, damage=damage, set_aside=aside)

    def create_or_open(self, config: RunConfig, allow: Collection[str] = ()) -> bool:
        """Create the directory with its config.toml, atomically; True if it did not exist before.

        For an existing run, `changes` with `allow` must accept the configuration. Changes are stored and recorded as
        an event.
        """
        if self.create(config):
            return True
        changes = self.changes(config, allow)
        if changes:
            fields = {key: {"before": before, "now": now} for key, before, now in changes}
            # The event first: killed in between, the next start finds the change again and records it twice. The other
            # way round the run would go on with values that no record explains.
            self.event("configuration_changed", attempt=self.attempt + 1, changes=fields)
            write_atomically(self.config, to_toml(config))
        return False

    def changes(self, config: RunConfig, allow: Collection[str] = ()) -> list[tuple[str, Any, Any]]:
        """(key, value stored, value in `config`) for each difference from the configuration of this existing run.

        Accepted are `HARMLESS_KEYS`, another length with the same learning rates of the steps that are done, and keys
        or sections named in `allow`. Other differences raise UserError with the keys and both values.
        """
        if not self.config.exists():
            raise UserError(
                f"{self.path} is not a run directory: it has files ({self._content()}) but no config.toml; use "
                "another directory with --run"
            )
        self._check_trained_here()
        stored = load(self.config)
        if refused := self.refused(config, allow):
            lines = [
                f"  {key}: {shown_value(before)} in the run, {shown_value(now)} now" for key, before, now in refused
            ]
            if any(key in LENGTH_KEYS for key, *_ in refused):
                lines.append(f"  {self._length_fault(stored, config)}")
            raise UserError(
                f"{self.path} holds a run with another configuration:\n" + "\n".join(lines) + "\n"
                "Restore these values, start a new run with --run, or accept the new values at your own risk with "
                f"{allow_changes(key for key, *_ in refused)}."
            )
        changes = difference(stored, config)
        self._check_steps(stored, config, {key for key, *_ in changes}, allow)
        return changes

    def refused(self, config: RunConfig, allow: Collection[str] = ()) -> list[tuple[str, Any, Any]]:
        """Those of the differences from the configuration of this existing run that ``changes`` does not accept."""
        stored = load(self.config)
        return [
            change
            for change in difference(stored, config)
            if not is_named(change[0], allow) and not self._is_harmless(change[0], stored, config)
        ]

    def _check_trained_here(self) -> None:
        """Refuse a run that was written whole, as by an import: training would begin without its weights."""
        kept = self._newest("-weights")
        if kept is None or self.events.exists() or self.metrics.exists() or self._newest() is not None:
            return
        raise UserError(
            f"{self.path} was not trained here, and has only weights: training in it would not begin with them; start "
            f'a new run with --run and train.init_from = "{self.path}@{kept}"'
        )

    def _check_steps(self, stored: RunConfig, now: RunConfig, changed: Collection[str], allow: Collection[str]) -> None:
        """Refuse an end before the steps that are done, and another length that no key of the length says."""
        done, stop = self.newest_checkpoint(), now.train.stop_step
        if stop is not None and stop < done:
            raise UserError(
                f"{self.path}: train.stop_step = {stop}, and the newest checkpoint is of step {done}; use a later "
                'step, or "none" for the last one'
            )
        if stored.total_steps == now.total_steps or any(key in changed or is_named(key, allow) for key in LENGTH_KEYS):
            return
        if (fault := self._length_fault(stored, now)) is not None:
            raise UserError(
                f"{self.path}: train.tokens = {now.train.tokens} are {now.total_steps} steps with the new values, and "
                f"were {stored.total_steps}; {fault}; restore the values, or accept the new length at your own risk "
                f"with {allow_changes(['train.tokens'])}"
            )

    def begin_attempt(self, beginning: Beginning = "start", **fields: Any) -> int:
        """Record the start, remove the previous attempt's status, and return this attempt's number, from 1."""
        self.check_held()
        # Of the metrics too: where events are lost, the steps of two attempts must not look like those of one.
        attempt = 1 + max(self.attempt, (self._newest_line() or {"attempt": 0})["attempt"])
        # The event first: where it cannot be written (a full disk), the previous attempt's status must still be there.
        self.event(beginning, attempt=attempt, **fields)
        self.remove_status()
        return attempt

    def remove_status(self) -> None:
        """Remove status.json of an earlier attempt; removes nothing from a directory that replaced the run's."""
        self.check_held()
        self.status.unlink(missing_ok=True)

    def event(self, event: str, *, attempt: int | None = None, **fields: Any) -> None:
        """Append to events.jsonl; it is on disk when this returns. `attempt`: None is the current one."""
        self.append_event(self.event_record(event, attempt=attempt, **fields))

    def event_record(self, event: str, *, attempt: int | None = None, **fields: Any) -> dict[str, Any]:
        """The record that `event` would append now."""
        # The number is read from the run's own events.
        self.check_held()
        number = self.attempt if attempt is None else attempt
        return {"time": timestamp(), "attempt": number, "event": event, **fields}

    def append_event(self, record: dict[str, Any]) -> None:
        """Append an `event_record`; it is on disk when this returns."""
        self.check_held()
        with LineWriter(self.events) as writer:
            writer.write(record)
            writer.sync()

    def write_status(self, status: Status, *, reason: str, step: int, tokens: int) -> RunStatus:
        """Replace status.json and return its content; it is on disk then."""
        self.check_held()
        value = RunStatus(status=status, reason=reason, step=step, tokens=tokens, time=timestamp())
        fields = dataclasses.asdict(value)
        write_atomically(self.status, json.dumps({**fields, SEAL: seal_of(json.dumps(fields))}, indent=2) + "\n")
        return value

    def read_status(self) -> RunStatus | None:
        """The end of the last attempt; None: it runs, was killed, does not exist, or its status is unreadable."""
        value = self._status()
        return value if isinstance(value, RunStatus) else None

    def status_fault(self) -> str | None:
        """The reason why status.json is unreadable; None: it is readable or missing."""
        value = self._status()
        return value if isinstance(value, str) else None

    def is_finished(self, config: RunConfig) -> bool:
        """Whether the run has done all steps of `config`, up to its `last_step`."""
        status = self.read_status()
        return status is not None and status.status == "finished" and status.step >= config.last_step

    def progress(self) -> tuple[int, int]:
        """(step, tokens) of the newest line of metrics; (0, 0) before the first."""
        newest = self._newest_line()
        return (newest["step"], newest.get("tokens", 0)) if newest else (0, 0)

    def newest_checkpoint(self) -> int:
        """Step of the newest committed checkpoint, intact or not; 0: none."""
        return self._newest() or 0

    def _newest(self, suffix: str = "") -> int | None:
        """The largest step among the names of committed checkpoints that end with `suffix`."""
        names = (entry.name.removeprefix("step-") for entry in self.checkpoints.glob("step-*"))
        steps = (name.removesuffix(suffix) for name in names if name.endswith(suffix))
        return max((int(step) for step in steps if step.isdecimal()), default=None)

    def new_log_directory(self) -> Path:
        """Make a directory under logs/ for the output of the ranks of one launch."""
        self.check_held()
        self.logs.mkdir(exist_ok=True)
        number = 1 + len(list(self.logs.glob("launch-*")))
        directory = self.logs / f"launch-{number:04d}"
        directory.mkdir()
        return directory

    def create(self, config: RunConfig) -> bool:
        """Create the directory with its config.toml; returns True in only one of several concurrent processes.

        An existing empty directory becomes the run's; a mount point too.
        """
        # A directory cannot be renamed onto a link: the run is made where a link leads.
        path = self.path.resolve() if self.path.is_symlink() else self.path.absolute()
        # Beside its later name: a rename is atomic only within one file system.
        parent = path.parent
        draft = parent / f".{path.name}.{uuid.uuid4().hex}"
        try:
            if self.path.exists() and self._names():
                return False
            parent.mkdir(parents=True, exist_ok=True)
            draft.mkdir()
            write_atomically(draft / self.config.name, to_toml(config))
            try:
                # Fails if another process was faster: a directory cannot be renamed onto one that has files.
                draft.rename(path)
            except OSError as error:
                # Nothing can be renamed onto a mount point, nor onto a directory that has what a mount point may have.
                if error.errno not in (errno.EBUSY, errno.EXDEV, errno.ENOTEMPTY, errno.EEXIST) or self._names():
                    raise
                shutil.rmtree(draft)
                return self._create_within(config)
            sync(parent)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            if self.config.exists():
                return False
            raise UserError(
                f"cannot create the run directory {self.path}: {error.filename}: {error.strerror}"
            ) from None
        return True

    def _create_within(self, config: RunConfig) -> bool:
        """`create` in the directory itself: config.toml appears whole, and only one process can make it."""
        draft = self.path / f"{self._draft_prefix}{uuid.uuid4().hex}"
        try:
            write_atomically(draft, to_toml(config))
            # Fails where the name is taken; a rename would replace the other process's file.
            os.link(draft, self.config)
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        sync(self.path)
        return True

    @property
    def _draft_prefix(self) -> str:
        return f".{self.config.name}."

    def _names(self) -> list[str]:
        """What is in the directory, without what a mount point may have, and what a kill left of `_create_within`."""
        names = (entry.name for entry in self.path.iterdir())
        return sorted(n for n in names if n not in _OF_A_MOUNT and not n.startswith(self._draft_prefix))

    def _content(self) -> str:
        names = self._names()
        more = f", and {len(names) - _SHOWN_FILES} more" if len(names) > _SHOWN_FILES else ""
        return ", ".join(names[:_SHOWN_FILES]) + more

    def _foreign(self, path: Path) -> str | None:
        """What stands at `path` where nothing but a record of this run can be; None: a record, or nothing."""
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return None
        if path == self.status:
            return self.status_fault()
        return None if stat.S_ISREG(mode) else f"{path}: {kind(mode)}, not a record of this run"

    def _status(self) -> RunStatus | str | None:
        """The status; a text: why it cannot be read; None: there is none."""
        try:
            data = read_regular(self.status, what="the status of a run", most_bytes=_MOST_STATUS_BYTES)
            fields = json.loads(data.decode("utf-8"))
            seal = fields.pop(SEAL, None)
            value = RunStatus(**fields)
            if seal is not None and seal != seal_of(json.dumps(dataclasses.asdict(value))):
                raise ValueError(f"it differs from its hash, {SEAL}")
        except FileNotFoundError:
            return None
        except NotRegular as error:
            return str(error)
        except OSError as error:
            raise UserError(f"{self.status} cannot be read: {error.strerror}") from None
        except UserError:
            raise
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            return f"{self.status}: not the status of a run ({error})"
        counts = (value.step, value.tokens)
        if not all(type(count) is int and count >= 0 for count in counts):
            return f"{self.status}: not the status of a run (step = {value.step!r}, tokens = {value.tokens!r})"
        if not all(isinstance(text, str) for text in (value.reason, value.time)):
            return f"{self.status}: not the status of a run (reason = {value.reason!r}, time = {value.time!r})"
        if value.status not in get_args(Status):
            return f"{self.status}: status = {value.status!r}: must be one of {', '.join(get_args(Status))}"
        return value

    def _newest_line(self) -> Record | None:
        """The newest line of the metrics that can be read, found from the end."""
        try:
            with open_regular(self.metrics, what="a record of a run") as file:
                for _, text in newest_lines(file, file.seek(0, os.SEEK_END)):
                    with contextlib.suppress(ValueError):
                        return parse_line(text, self.metrics.name)
        except (FileNotFoundError, NotRegular):
            pass
        return None

    def _is_harmless(self, key: str, stored: RunConfig, now: RunConfig) -> bool:
        return is_named(key, HARMLESS_KEYS) or (key in LENGTH_KEYS and self._length_fault(stored, now) is None)

    def _length_fault(self, stored: RunConfig, now: RunConfig) -> str | None:
        """Why the run cannot get the length of `now`: its steps would have had other learning rates or constants."""
        # The metrics may have lost their newest lines.
        done = max(self.progress()[0], self.newest_checkpoint())
        for config in (stored, now):
            fixed = schedule_of(config.optimizer).fixed_until(config.optimizer, config.total_steps)
            if done > fixed:
                steps = f"of {config.total_steps} steps depend on that length after step {fixed}"
                return (
                    f'the learning rates of optimizer.schedule = "{config.optimizer.schedule}" {steps}; {done} are done'
                )
        # Constants may depend on the length of the run too, as AdEMAMix's warm-up does.
        before, after = (length_defaults(now.optimizer, one.total_steps) for one in (stored, now))
        if done and before != after:
            keys = ", ".join(f"optimizer.{key} = {value}" for key, value in before.items())
            return (
                f'constants of optimizer.name = "{now.optimizer.name}" depend on the length of the run; keep them by '
                f"{keys} {allow_changes(f'optimizer.{key}' for key in before)}"
            )
        return None


class LineWriter:
    """Appends JSON objects to `path`, one per line. Opening removes a last line that a kill cut short.

    Each write raises ``DirectoryReplaced`` if the directory of `path` was replaced since then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._directory = HeldDirectory(path.parent)
        try:
            # Each write goes to the end as it is then: launcher and rank 0 append to the same files, one after the
            # other. Without waiting, as an open of a named pipe does.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o666)
        except OSError as error:
            self._directory.close()
            if isinstance(error, PermissionError):
                raise MayNotWrite(f"{path}: user {os.geteuid()} may not write to it: {error.strerror}") from None
            raise _of(error, path) from None
        try:
            if not stat.S_ISREG(mode := os.fstat(self._file).st_mode):
                raise NotRegular(f"{path}: {kind(mode)}, in place of a record of the run")
            self._end_cut_line()
        except BaseException:
            self.close()
            raise

    def _end_cut_line(self) -> None:
        # Else the next line would continue the cut one, and both would be lost.
        size = os.fstat(self._file).st_size
        start = max(0, size - MOST_LINE_BYTES)
        tail = os.pread(self._file, 1, size - 1) if size else b"\n"
        if tail == b"\n":
            return
        tail = os.pread(self._file, size - start, start)
        newline = tail.rfind(b"\n")
        if newline >= 0 or start == 0:
            os.ftruncate(self._file, start + newline + 1)
        else:
            # No record was cut there, but something else was written; it stays, as one damaged line.
            os.write(self._file, b"\n")

    def write(self, value: dict[str, Any]) -> None:
        """Append `value` with its hash, in full or not at all; NaN and infinities, which JSON lacks, become null."""
        self._directory.check()
        data = memoryview((sealed(_json(_finite(value))) + "\n").encode())
        before = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            # A full disk accepts the beginning of a line. It is taken back, because the whole line is written later.
            os.ftruncate(self._file, before)
            raise _of(error, self._path) from None

    def sync(self) -> None:
        """Wait until everything written is on disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
        self._directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[Record]:
    """The lines of a metrics.jsonl in the order of their steps, one for each step.

    If several attempts reached a step, the last one counts; lines of one attempt for one step are joined.
    """
    steps: dict[int, Record] = {}
    for line in read_lines(Path(path)):
        # The order in the file decides, not the time in the lines: attempts may run on hosts whose clocks differ.
        before = steps.get(line["step"], line)
        steps[line["step"]] = {**before, **line} if before["attempt"] == line["attempt"] else line
    return [steps[step] for step in sorted(steps)]


def read_lines(path: Path) -> list[Record]:
    """The readable lines of a record, without a last line still being written; [] without a file."""
    return read_records(path).lines


def damage_text(count: int, first: str) -> str:
    """The number of unreadable lines and the first fault, for messages."""
    return f"1 line cannot be read: {first}" if count == 1 else f"{count:,} lines cannot be read, the first: {first}"


def _warn(texts: Iterable[str]) -> None:
    for text in texts:
        print(f"warning: {text}", file=sys.stderr, flush=True)


def _free_name(path: Path) -> Path:
    """RUN/metrics.jsonl.damaged-1, or the next number that is free."""
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` with `text`: a reader sees either the old or the new file, also after a power failure."""
    draft = path.with_name(f"{path.name}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # Before the rename: after a power failure the name could otherwise stand for an empty file.
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise _of(error, path) from None
    sync(path.parent)


def _of(error: OSError, path: Path) -> OSError:
    """`error` with the name of the file, which the system does not give for writes."""
    return OSError(error.errno, error.strerror, str(path))


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    """`value` with None for NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def timestamp() -> str:
    """The current time, as in all records: UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
