"""The work directory of a preparation, STORE.work: finished work stays finished after any interruption.

    state.json          description of the store: corpus, versions, files; a restart compares it
    plan.jsonl          the units of work, one per line
    tokenizer/          the tokenizer, complete
    samples/NNNNNN.json texts that train it
    parts/NNNNNN/       of a unit that is one large compressed file: its finished parts (``unit_parts.py``)
    units/NNNNNN/       the results for the documents of a unit (``units.py``)
    duplicates/         the duplicates to drop (``deduplication.py``)
    kept/NNNNNN.json    the kept documents of a unit
    keys/               hashes of the finished files of keys
    shards/             hashes and counts of the finished shards
    store/              the store, until it gets its name

Every file is written under a temporary name and renamed when it is complete. A name in the directory means finished
work; there is no other record of it.
"""

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightscale.data_pipeline.whole_files import DISK_FULL_ERRNOS, TEMPORARY_SUFFIX, write_json
from lightscale.errors import UserError, remedy_of_limit
from lightscale.files import lock_or_refuse

_SUFFIX = ".work"
_STATE_FILE, _LOCK_FILE = "state.json", "lock"
# The state comes last: while anything is left of a finished preparation, it says that it is finished.
_OWN_NAMES = (
    "plan.jsonl",
    "plan.new.jsonl",
    "tokenizer",
    "samples",
    "parts",
    "units",
    "duplicates",
    "kept",
    "keys",
    "shards",
    "store",
    _STATE_FILE,
)


def is_work_directory(path: Path) -> bool:
    """Whether a preparation works, or has worked, there: nothing in it is of a corpus."""
    return path.name.endswith(_SUFFIX) and (path / _LOCK_FILE).is_file()


class WorkDirectory:
    """The files beside the store that is being made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan, self.new_plan = path / "plan.jsonl", path / "plan.new.jsonl"
        self.store = path / "store"

    @classmethod
    def beside(cls, store: Path) -> "WorkDirectory":
        """That of ``store``."""
        return cls(store.parent / f"{store.name}{_SUFFIX}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make it and keep other preparations out. ``UserError`` where one is running in it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"{self.path}: cannot create {error.filename} ({error.strerror})") from error
        try:
            lock_or_refuse(descriptor, self.path, held="another process is preparing this store")
            yield
        finally:
            os.close(descriptor)  # releases the lock; so does the end of the process, however it ends

    def clean(self, below: Path | None = None) -> None:
        """Remove incomplete files of interrupted processes, in the whole directory or ``below`` a part."""
        # Workers of a killed preparation may still be removing their own files: what vanishes meanwhile is no error.
        for directory, names, files in os.walk(below or self.path):
            for name in [name for name in names if name.endswith(TEMPORARY_SUFFIX)]:
                names.remove(name)
                shutil.rmtree(Path(directory, name), ignore_errors=True)
            for name in files:
                # zarr's own names, of metadata.
                if name.endswith((TEMPORARY_SUFFIX, ".partial")):
                    Path(directory, name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the directory, except for foreign files."""
        self.empty()
        (self.path / _LOCK_FILE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def empty(self) -> None:
        """Remove all that preparations put there, but for the lock."""
        self.clean()
        # Only names that a preparation makes: the directory may hold files of a user by mistake.
        for entry in (self.path / name for name in _OWN_NAMES):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)

    def require_own(self) -> None:
        """``UserError`` where it has files of another origin."""
        others = [entry.name for entry in self.path.iterdir() if entry.name not in (*_OWN_NAMES, _LOCK_FILE)]
        if others := [name for name in others if not name.endswith(TEMPORARY_SUFFIX)]:
            raise UserError(f"{self.path}: reserved for work in progress, but it contains {others[0]}; move that file")

    def read_state(self) -> dict[str, Any] | None:
        """The description of the store in preparation; None in a new directory."""
        try:
            content: dict[str, Any] = json.loads((self.path / _STATE_FILE).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UserError(f"{self.path / _STATE_FILE}: damaged ({error}); use --restart to start again") from error
        return content

    def write_state(self, state: dict[str, Any]) -> None:
        """Record the description of the store in preparation."""
        write_json(self.path / _STATE_FILE, state)

    def entry(self, kind: str, number: int, suffix: str = "") -> Path:
        """The file or directory of unit, shard or partition ``number``."""
        return self.path / kind / f"{number:06}{suffix}"

    def has_finished_work(self) -> bool:
        """Whether any unit, or a part of one, is finished."""
        found = itertools.chain(self.path.glob("units/*"), self.path.glob("parts/*/unit-*"))
        return any(not entry.name.endswith(TEMPORARY_SUFFIX) for entry in found)


@contextmanager
def explain_full_disk(work: WorkDirectory) -> Iterator[None]:
    """A full disk in the block becomes a ``UserError`` that names the way to continue."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise UserError(
            f"{work.path}: cannot write ({error.strerror}); finished work is kept there: "
            f"{remedy_of_limit(error)}, and run the same command again"
        ) from error


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """``key: then → now`` for every value that differs between two states."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [f"{key}: {_shown(old.get(key))} → {_shown(new.get(key))}" for key in keys]


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
