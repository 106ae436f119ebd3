"""Writing checkpoints: a copy that training waits for, and a thread that writes it and gives it its name.

The thread has a process group of its own. Every rank hashes the bytes as it writes them and syncs its files, rank 0
gathers the records into the manifest and renames the directory; see ``restore.py`` for what is in it.
"""

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightscale.errors import UserError
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.engine import Engine
from lightscale.parallel.mesh import Mesh
from lightscale.parallel.shards import Box, Shape, TensorShard, fault_of_cover
from lightscale.training.checkpoints.directories import (
    STATE,
    TENSORS,
    Retention,
    directory_name,
    environment,
    list_steps,
    put_aside,
    rank_stem,
    remove,
    verify_together,
)
from lightscale.training.checkpoints.manifest import DamagedCheckpoint, FileRecord, sync, write_manifest, write_synced
from lightscale.training.checkpoints.random_states import random_states
from lightscale.training.checkpoints.tensor_file import write_tensors
from lightscale.training.health.faults import reach

_SPARE_BYTES = 16 << 20
"""Free space asked for beyond the tensors: small files, and what other writers need meanwhile."""
_Own = tuple[str, dict[str, FileRecord], list[Box]]
"""A rank's host, files and boxes."""


class SaveError(UserError):
    """A checkpoint could not be written; the message has the path and what the system said. Earlier ones are good."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is on disk on all ranks."""

    step: int
    path: Path
    facts: Mapping[str, Any]
    """As they were given."""
    num_bytes: int
    """Of all files."""
    stall_s: float
    """Seconds that training waited for the copy."""
    write_s: float
    """Seconds until it was durable."""
    removed: tuple[int, ...] = ()
    """Steps of older checkpoints that were removed for it."""
    problem: str | None = None
    """Why older ones could not be removed."""


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """The state of one rank at one step, apart from what training goes on to change."""

    step: int
    pieces: Sequence[TensorShard]
    state: str
    random: str
    facts: Mapping[str, Any]
    about: Mapping[str, Any]
    stall_s: float


class Saver:
    """Writes the checkpoints of one run, all ranks of ``mesh`` together.

    Args:
        directory: the run's ``checkpoints`` directory; must be seen by every rank.
        mesh: every method but ``is_writing`` and ``is_written`` is collective over its ranks.
    """

    def __init__(self, directory: Path, mesh: Mesh) -> None:
        self.directory, self.mesh = directory, mesh
        self.known_good: set[int] = set()
        """Steps whose checkpoints this process has written or verified."""
        self._ranks = Agreement(mesh.saving)
        self._copies: dict[tuple[str, Shape], torch.Tensor] = {}
        self._written: Future[Saved] | None = None

    def reserve(self, engine: Engine) -> None:
        """Allocate the memory of the copies, as much as the rank's own state, before a step has to wait for it."""
        self._copy(engine.owned_shards())

    def begin(
        self,
        engine: Engine,
        *,
        step: int,
        common: Mapping[str, Any],
        facts: Mapping[str, Any],
        about: Mapping[str, Any] | None = None,
        retention: Retention | None = None,
    ) -> float:
        """Copy the state and begin to write it; ``finish`` gives the result. Returns the seconds of the copy.

        One save is in flight at most. A whole checkpoint of the same step and ``facts`` is that of this state already,
        and stays as it is.

        Args:
            engine: weights and optimizer state; may change as soon as this returns.
            common: small state that is the same on every rank (counters, data position), as JSON gives it back.
            facts: what the manifest says of the state, besides step, versions and layout, and a later save compares.
            about: what else the manifest says.
            retention: which older checkpoints are removed after it; None: none.
        """
        assert self._written is None, "the save before has not been finished"
        began = time.perf_counter()
        pieces = self._copy(engine.owned_shards())
        state = json.dumps({**common, "step": step, "optimizer": engine.counters()})
        snapshot = _Snapshot(
            step=step,
            pieces=pieces,
            state=state,
            random=json.dumps(random_states()),
            facts=dict(facts),
            about=dict(about or {}),
            stall_s=time.perf_counter() - began,
        )
        self._written = written = Future[Saved]()

        def work() -> None:
            try:
                written.set_result(self._write(snapshot, retention))
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                written.set_exception(error)

        # Not to be waited for when the interpreter ends: its peers may be gone.
        threading.Thread(target=work, name="checkpoint", daemon=True).start()
        return snapshot.stall_s

    @property
    def is_writing(self) -> bool:
        """Whether a save was begun and not finished."""
        return self._written is not None

    @property
    def is_written(self) -> bool:
        """Whether ``finish`` would return at once on this rank."""
        return self._written is not None and self._written.done()

    def finish(self) -> Saved:
        """Wait for the save in flight. Raises ``SaveError``, on every rank, where it failed."""
        assert self._written is not None, "no save was begun"
        written, self._written = self._written, None
        return written.result()

    def save(
        self,
        engine: Engine,
        *,
        step: int,
        common: Mapping[str, Any],
        facts: Mapping[str, Any],
        about: Mapping[str, Any] | None = None,
        retention: Retention | None = None,
    ) -> Saved:
        """``begin`` and ``finish``."""
        self.begin(engine, step=step, common=common, facts=facts, about=about, retention=retention)
        return self.finish()

    def _copy(self, pieces: Iterable[TensorShard]) -> list[TensorShard]:
        copied = []
        for piece in pieces:
            place, data = (piece.box.key, piece.box.offset), piece.data
            copy = self._copies.get(place)
            if copy is None or copy.shape != data.shape or copy.dtype != data.dtype:
                # Pinned, so that the GPU copies by itself; zeros, so that the pages are there.
                copy = torch.zeros(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
                self._copies[place] = copy
            copy.copy_(data, non_blocking=True)
            copied.append(replace(piece, data=copy))
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)
        return copied

    def _write(self, snapshot: _Snapshot, retention: Retention | None) -> Saved:
        """In the thread: everything of a save but the copy."""
        began = time.perf_counter()
        final = self.directory / directory_name(snapshot.step)
        draft = final.with_suffix(".tmp")
        try:
            self._ranks.on_all(lambda: reach("save:begin"))
            num_bytes = self._bytes_if_saved(final, snapshot)
            if num_bytes is None:
                num_bytes = self._write_new(draft, final, snapshot)
        except SaveError:
            raise
        except (OSError, UserError) as error:
            self._ranks.on_first(lambda: shutil.rmtree(draft, ignore_errors=True))
            raise SaveError(f"cannot write {final}: {error}") from error
        self.known_good.add(snapshot.step)
        write_s = time.perf_counter() - began
        removed, problem = self._retain(retention) if retention else ((), None)
        return Saved(
            step=snapshot.step,
            path=final,
            facts=snapshot.facts,
            num_bytes=num_bytes,
            stall_s=snapshot.stall_s,
            write_s=write_s,
            removed=removed,
            problem=problem,
        )

    def _write_new(self, draft: Path, final: Path, snapshot: _Snapshot) -> int:
        """Every rank's files, then the name; the bytes of all of them."""
        self._ranks.on_first(lambda: self._make_room(draft))
        self._check_space(snapshot)
        own = self._ranks.on_all(lambda: self._write_own(draft, snapshot))
        return self._ranks.on_first(lambda: self._commit(draft, final, own, snapshot))

    def _bytes_if_saved(self, final: Path, snapshot: _Snapshot) -> int | None:
        """The size of ``final`` if it is there and whole; a damaged one is put aside."""
        if not self._ranks.on_first(final.exists):
            return None
        try:
            manifest = verify_together(final, snapshot.step, self._ranks)
        except DamagedCheckpoint:
            put_aside([final], self._ranks)
            return None
        there, now = manifest.facts, snapshot.facts
        differing = [f"{key}: {there.get(key)} there, {now[key]} now" for key in now if there.get(key) != now[key]]
        if differing:
            raise SaveError(f"{final} is a good checkpoint of another state ({'; '.join(differing)}); move it away")
        return sum(record.num_bytes for record in manifest.files.values())

    def _make_room(self, draft: Path) -> None:
        """Drop what interrupted saves and removals left."""
        if not self.directory.exists():
            self.directory.mkdir(parents=True)
            sync(self.directory.parent)
        for dead in self.directory.glob("step-*.tmp"):
            shutil.rmtree(dead, ignore_errors=True)
        draft.mkdir()

    def _check_space(self, snapshot: _Snapshot) -> None:
        own = sum(piece.data.nbytes for piece in snapshot.pieces)
        every = self._ranks.on_all(lambda: (own, shutil.disk_usage(self.directory).free))
        needed, free = sum(size for size, _ in every) + _SPARE_BYTES, min(space for _, space in every)
        if free < needed:
            raise UserError(
                f"no space for a checkpoint: it needs {needed / 1e6:.0f} MB, {free / 1e6:.0f} MB are free; "
                "free some, or keep fewer (checkpoint.keep)"
            )

    def _write_own(self, draft: Path, snapshot: _Snapshot) -> _Own:
        """This rank's host, files and boxes."""
        reach("save:open")
        stem = rank_stem(self.mesh.rank)
        records = {
            f"{stem}{TENSORS}": write_tensors(draft / f"{stem}{TENSORS}", snapshot.pieces),
            f"{stem}.json": write_synced(draft / f"{stem}.json", snapshot.random.encode()),
        }
        if self.mesh.rank == 0:
            records[STATE] = write_synced(draft / STATE, snapshot.state.encode())
        return socket.gethostname(), records, [piece.box for piece in snapshot.pieces]

    def _commit(self, draft: Path, final: Path, own: Sequence[_Own], snapshot: _Snapshot) -> int:
        files = {name: record for _, records, _ in own for name, record in records.items()}
        if missing := {path.name for path in draft.iterdir()} ^ set(files):
            raise OSError(f"files that no rank wrote, or that are gone: {', '.join(sorted(missing))}")
        if fault := fault_of_cover(box for _, _, boxes in own for box in boxes):
            raise AssertionError(f"{draft}: {fault}")
        reach("save:manifest")
        facts = {
            "step": snapshot.step,
            **snapshot.facts,
            **snapshot.about,
            "layout": self.mesh.axes,
            "versions": environment(),
            "hosts": [host for host, _, _ in own],
        }
        write_manifest(draft, files, facts)
        sync(draft)
        reach("save:rename")
        draft.rename(final)
        sync(self.directory)
        return sum(record.num_bytes for record in files.values())

    def _retain(self, retention: Retention) -> tuple[tuple[int, ...], str | None]:
        """Remove what ``retention`` does not keep, once as many as it asks for are known to be good."""
        steps: list[int] = self._ranks.on_first(lambda: list_steps(self.directory))
        good: list[int] = []
        for step in reversed(steps):
            if len(good) < retention.keep and self._is_good(step):
                good.append(step)
        old = retention.superseded(steps, good)
        try:
            self._ranks.on_first(lambda: remove(self.directory, old))
        except OSError as error:
            return (), f"cannot remove older checkpoints: {error}"
        return tuple(old), None

    def _is_good(self, step: int) -> bool:
        """Whether the checkpoint is whole, as far as this process has seen; one that is not is put aside."""
        if step in self.known_good:
            return True
        path = self.directory / directory_name(step)
        try:
            verify_together(path, step, self._ranks)
        except DamagedCheckpoint:
            put_aside([path], self._ranks)
            return False
        self.known_good.add(step)
        return True
