"""The directory of one run: its configuration, its records, and how it ended.

Everything here survives a kill at any moment: whole files are replaced by a rename, records are appended line
by line, and a line counts once its newline is there.
"""

import dataclasses
import datetime
import json
import math
import os
import shutil
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, get_args

import xxhash

from lightscale.config.files import difference, load, to_toml
from lightscale.config.schema import RunConfig
from lightscale.config.text import path_fault
from lightscale.errors import UserError, shortened

Status = Literal["finished", "resumable", "stopped"]
# The events that begin an attempt: a process starts, or goes back to a checkpoint.
Beginning = Literal["start", "rollback"]

# What may change when a run is resumed without making it another run. A section stands for all of its keys.
HARMLESS_KEYS: dict[str, str] = {
    "metrics": "only what is recorded",
    "checkpoint": "only when the state is written and how long it is kept, not the state",
    "restart": "only how failures are noticed, and how often the run is restarted",
    "guard.compare_replicas_every": "only what is checked",
    "guard.max_rollbacks": "only after how many rollbacks the run stops",
    "parallel": "any layout resumes any other: batches, weights and sample order do not depend on it",
    "data.store": "a store may move; a checkpoint has its fingerprint and refuses another one",
    "data.validation": "only what is measured; the store says what is never trained on",
    "train.device": "the same computation on other hardware",
    "train.micro_batch_size": "the same batch, summed in other portions",
    "train.profile_steps": "only what is recorded",
    "train.validate_every": "validation changes no weight, no random state and no sample",
}

_CHUNK_BYTES = 1 << 16
_MOST_DIGITS = 10
"""Of a step."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How the last attempt ended: the contents of status.json."""

    status: Status
    """finished; resumable: start it again; stopped: needs attention."""
    reason: str
    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens trained on."""
    time: str
    """When it was written, UTC, ISO 8601."""


def is_named(key: str, names: Collection[str]) -> bool:
    """Whether `key`, or a section that it is in, is among `names`."""
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


class RunDirectory:
    """The files in `path`. One process writes at a time: the launcher before the ranks start, then rank 0."""

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
        self.profile = self.path / "profile"
        self.logs = self.path / "logs"

    @property
    def attempt(self) -> int:
        """Number of the current attempt, from 1: starts and rollbacks recorded so far; 0 before the first."""
        return sum(line["event"] in get_args(Beginning) for line in read_lines(self.events))

    def create_or_open(self, config: RunConfig, allow: Collection[str] = ()) -> bool:
        """Create the directory with its config.toml, atomically; True if it did not exist before.

        For an existing run the configuration must be one that `changes` with `allow` accepts. Changes are stored,
        and recorded as an event.
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
        """(key, value stored, value in `config`) of each difference to the configuration of this existing run.

        They must be harmless: those of `HARMLESS_KEYS`, and a longer run where the learning rates so far would have
        been the same; or be named in `allow`, as keys or sections. Otherwise raises UserError with the keys that
        differ and both values.
        """
        if not self.config.exists():
            raise UserError(
                f"{self.path} is not a run directory: it has files but no config.toml; choose another with --run"
            )
        stored = load(self.config)
        changes = difference(stored, config)
        refused = [
            change
            for change in changes
            if not is_named(change[0], allow) and not self._is_harmless(change[0], stored, config)
        ]
        if refused:
            lines = [f"  {key}: {_json(before)} in the run, {_json(now)} now" for key, before, now in refused]
            raise UserError(
                f"{self.path} holds a run with another configuration:\n" + "\n".join(lines) + "\n"
                "Restore those values, start a new run with --run, or accept the new ones, at your own risk, with "
                f"--allow-change {refused[0][0]}."
            )
        return changes

    def begin_attempt(self, beginning: Beginning = "start", **fields: Any) -> int:
        """Record the beginning, remove the previous attempt's status, and return this attempt's number, from 1."""
        attempt = self.attempt + 1
        # The event first: where it cannot be written (a full disk), the previous attempt's status must still be there.
        self.event(beginning, attempt=attempt, **fields)
        self.status.unlink(missing_ok=True)
        return attempt

    def event(self, event: str, *, attempt: int | None = None, **fields: Any) -> None:
        """Append to events.jsonl; it is on disk when this returns. `attempt`: None is the current one."""
        self.append_event(self.event_record(event, attempt=attempt, **fields))

    def event_record(self, event: str, *, attempt: int | None = None, **fields: Any) -> dict[str, Any]:
        """The record that `event` would append now."""
        number = self.attempt if attempt is None else attempt
        return {"time": timestamp(), "attempt": number, "event": event, **fields}

    def append_event(self, record: dict[str, Any]) -> None:
        """Append an `event_record`; it is on disk when this returns."""
        with LineWriter(self.events) as writer:
            writer.write(record)
            writer.sync()

    def write_status(self, status: Status, *, reason: str, step: int, tokens: int) -> RunStatus:
        """Replace status.json and return its content; it is on disk then."""
        value = RunStatus(status=status, reason=reason, step=step, tokens=tokens, time=timestamp())
        write_atomically(self.status, json.dumps(dataclasses.asdict(value), indent=2) + "\n")
        return value

    def read_status(self) -> RunStatus | None:
        """How the last attempt ended; None: it is running, was killed, or there was none."""
        try:
            value = RunStatus(**json.loads(self.status.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{self.status} cannot be read: {error.strerror}") from None
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
            raise UserError(f"{self.status}: not the status of a run ({error}); remove it to resume the run") from None
        if value.status not in get_args(Status):
            choices = ", ".join(get_args(Status))
            raise UserError(f'{self.status}: status = "{value.status}": must be one of {choices}')
        return value

    def is_finished(self, config: RunConfig) -> bool:
        """Whether the run has done all steps that `config` asks for."""
        status = self.read_status()
        return status is not None and status.status == "finished" and status.step >= config.total_steps

    def progress(self) -> tuple[int, int]:
        """(step, tokens) of the newest line of metrics; (0, 0) before the first."""
        newest = _last_line(self.metrics)
        return (newest["step"], newest["tokens"]) if newest else (0, 0)

    def newest_checkpoint(self) -> int:
        """Step of the newest checkpoint that was committed, whole or not; 0: there is none."""
        steps = (entry.name.removeprefix("step-") for entry in self.checkpoints.glob("step-*"))
        return max((int(step) for step in steps if step.isdecimal()), default=0)

    def new_log_directory(self) -> Path:
        """Make a directory under logs/ for the output of the ranks of one launch."""
        self.logs.mkdir(exist_ok=True)
        number = 1 + len(list(self.logs.glob("launch-*")))
        directory = self.logs / f"launch-{number:04d}"
        directory.mkdir()
        return directory

    def create(self, config: RunConfig) -> bool:
        """Create the directory with its config.toml; True for only one of two processes that do so at once."""
        parent = self.path.absolute().parent
        # Beside its later name: a rename is atomic only within one file system.
        draft = parent / f".{self.path.name}.{uuid.uuid4().hex}"
        try:
            if self.path.exists() and any(self.path.iterdir()):
                return False
            parent.mkdir(parents=True, exist_ok=True)
            draft.mkdir()
            write_atomically(draft / self.config.name, to_toml(config))
            # Fails if another process was faster: a directory cannot be renamed onto one that has files.
            draft.rename(self.path)
            _sync_directory(parent)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            if self.config.exists():
                return False
            raise UserError(
                f"cannot create the run directory {self.path}: {error.filename}: {error.strerror}"
            ) from None
        return True

    def _is_harmless(self, key: str, stored: RunConfig, now: RunConfig) -> bool:
        if key in ("train.steps", "train.tokens"):
            return now.total_steps >= stored.total_steps and self._may_extend(stored)
        return is_named(key, HARMLESS_KEYS)

    def _may_extend(self, stored: RunConfig) -> bool:
        """Whether a longer run would have had the same learning rates so far."""
        optimizer = stored.optimizer
        # Before its decay, WSD's rates do not depend on the length of the run; a cosine's do behind the warm-up.
        if optimizer.schedule == "wsd":
            return self.progress()[0] <= stored.total_steps - (optimizer.decay_steps or 0)
        return optimizer.schedule == "constant"


class LineWriter:
    """Appends JSON objects to `path`, one per line. Opening it removes a last line that a kill cut short."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Each write goes to the end as it is then: launcher and rank 0 append to the same files, one after the other.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            end = _after_newline(file, size)
        if end != size:
            # Else the next line would continue the cut one, and one damaged line would make the file unreadable.
            os.truncate(self._file, end)

    def write(self, value: dict[str, Any]) -> None:
        """Append `value`, all of it or nothing; NaN and infinities, which JSON does not have, become null."""
        data = memoryview((_json(_finite(value)) + "\n").encode())
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl in the order of their steps, one for each step.

    Where several attempts reached a step the last one counts; lines of one attempt for one step are joined.
    """
    steps: dict[int, dict[str, Any]] = {}
    for line in read_lines(Path(path)):
        # The order in the file decides, not the time in the lines: attempts may run on hosts whose clocks differ.
        before = steps.get(line["step"], line)
        steps[line["step"]] = {**before, **line} if before["attempt"] == line["attempt"] else line
    return [steps[step] for step in sorted(steps)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines, without a last line still being written; [] where there is no file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    objects = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise UserError(f"{path}:{number}: not a JSON object, the file is damaged; remove that line")
        objects.append(value)
    return objects


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`: a reader finds either the old or the new file, also after a power failure."""
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
    _sync_directory(path.parent)


def _of(error: OSError, path: Path) -> OSError:
    """`error` with the name of the file, which the system does not give for writes."""
    return OSError(error.errno, error.strerror, str(path))


def _sync_directory(path: Path) -> None:
    """Make renames in `path` durable."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _last_line(path: Path) -> dict[str, Any] | None:
    """The last complete object of a file of JSON lines, found from its end."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        end = _after_newline(file, file.seek(0, os.SEEK_END))
        start = _after_newline(file, end - 1)
        file.seek(start)
        value: dict[str, Any] | None = json.loads(file.read(end - start)) if end else None
    return value


def _after_newline(file: BinaryIO, end: int) -> int:
    """Position behind the last newline among the first `end` bytes of `file`; 0: there is none."""
    while end > 0:
        start = max(0, end - _CHUNK_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


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
    """The time now, as in all records: UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
