"""Checkpoints: everything a run is at one step, committed by one rename.

    checkpoints/step-00000100.tmp/    while it is being written
    checkpoints/step-00000100/        __R_N.distcp, .metadata, common.pt, metadata.json    Megatron's torch_dist files
                                      rank-RRRRR.pt                                        random states of each rank
                                      MANIFEST.json                                        size and hash of every file

Every rank hashes and syncs the files it wrote, rank 0 gathers the records into the manifest, and the directory gets
its name last. It is never written to again. Reading starts from what is on disk, newest first: a checkpoint is used
only when every file is what the manifest says; otherwise the next older one is.
"""

import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata as packages
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from lightscale import __version__
from lightscale.errors import UserError
from lightscale.parallel.engine import Engine
from lightscale.parallel.mesh import Mesh
from lightscale.training.manifest import (
    NAME,
    DamagedCheckpoint,
    FileRecord,
    Manifest,
    hash_file,
    read_manifest,
    sync,
    verify_files,
    write_manifest,
)

_T = TypeVar("_T")

_STEP = re.compile(r"step-(\d{8})")
_SPARE_BYTES = 16 << 20
"""Free space asked for beyond the tensors: metadata, and what other writers need meanwhile."""


class NoGoodCheckpoint(UserError):
    """There are checkpoints, but none that is whole. Starting again from step 0 would lose the run silently."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What was read: where the run stands, and the small state that was saved beside the tensors."""

    step: int
    path: Path
    common: dict[str, Any]
    refused: tuple[str, ...]
    """Why newer checkpoints were passed over, one line each."""


def directory_name(step: int) -> str:
    """step-00000100"""
    return f"step-{step:08d}"


def list_steps(directory: Path) -> list[int]:
    """Steps of the committed checkpoints in ``directory``, oldest first. Nothing is verified."""
    if not directory.is_dir():
        return []
    matches = (_STEP.fullmatch(entry.name) for entry in directory.iterdir() if (entry / NAME).exists())
    return sorted(int(match.group(1)) for match in matches if match)


class Checkpoints:
    """The checkpoints of one run, written and read by all ranks of ``mesh`` together.

    Args:
        directory: the run's ``checkpoints`` directory; must be seen by every rank.
        mesh: every method is collective over its ranks.
    """

    def __init__(self, directory: Path, mesh: Mesh) -> None:
        self.directory, self.mesh = directory, mesh

    def save(self, engine: Engine, *, step: int, common: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
        """Write the checkpoint of ``step`` and return its path once it is on disk on all ranks.

        Args:
            engine: weights and optimizer state.
            common: small state that is the same on every rank (counters, data position).
            facts: what the manifest says about the run, besides versions and layout.

        Raises:
            UserError: not enough space, or the files cannot be written. Nothing is left behind, and earlier
                checkpoints are as they were.
        """
        final = self.directory / directory_name(step)
        draft = final.with_suffix(".tmp")
        state: dict[str, Any] = {**engine.sharded_state(loading=False), "common": {**common, "step": step}}
        self._on_rank_0(lambda: self._make_room(draft, final))
        self._check_space(state)
        try:
            dist_checkpointing.save(state, str(draft))
            records = self._agree(lambda: self._own_files(draft))
            files = {name: record for own in records for name, record in own.items()}
            self._on_rank_0(lambda: self._commit(draft, final, files, step, facts))
        except (OSError, RuntimeError, dist_checkpointing.core.CheckpointingException) as error:
            if self.mesh.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            raise UserError(f"cannot write {final}: {error}") from error
        return final

    def _make_room(self, draft: Path, final: Path) -> None:
        """Drop what an interrupted save left; put a damaged directory of the same step aside."""
        self.directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        if final.exists():
            final.rename(final.with_suffix(".bad"))
        draft.mkdir()

    def _check_space(self, state: Mapping[str, Any]) -> None:
        tensors = (value for value in nested_values(state) if isinstance(value, ShardedTensor))
        own = sum(
            tensor.data.nbytes
            for tensor in tensors
            if tensor.data is not None and not any(_as_tuple(tensor.replica_id))
        )
        total = sum(self._agree(lambda: own)) + _SPARE_BYTES
        free = shutil.disk_usage(self.directory).free
        if min(self._agree(lambda: free)) < total:
            if self.mesh.rank == 0:
                for draft in self.directory.glob("*.tmp"):
                    shutil.rmtree(draft, ignore_errors=True)
            raise UserError(
                f"no space for a checkpoint in {self.directory}: it needs {total / 1e6:.0f} MB, "
                f"{free / 1e6:.0f} MB are free; free some, or keep fewer (checkpoint.keep)"
            )

    def _own_files(self, draft: Path) -> dict[str, FileRecord]:
        rank = self.mesh.rank
        torch.save(_random_states(), draft / _rank_file(rank))
        own = [path for path in draft.iterdir() if path.name.startswith(f"__{rank}_") or path.name == _rank_file(rank)]
        if rank == 0:
            own += [path for path in draft.iterdir() if not path.name.startswith(("__", "rank-"))]
        for path in own:
            sync(path)
        return {path.name: hash_file(path) for path in own}

    def _commit(
        self, draft: Path, final: Path, files: Mapping[str, FileRecord], step: int, facts: Mapping[str, Any]
    ) -> None:
        missing = {path.name for path in draft.iterdir()} ^ set(files)
        if missing:
            raise OSError(f"files that no rank wrote, or that are gone: {', '.join(sorted(missing))}")
        versions = {
            "lightscale": __version__,
            "torch": torch.__version__,
            "megatron-core": packages.version("megatron-core"),
        }
        write_manifest(draft, files, {"step": step, **facts, "layout": self.mesh.axes, "versions": versions})
        sync(draft)
        draft.rename(final)
        sync(self.directory)

    def prune(self, *, keep: int, keep_every: int | None) -> list[int]:
        """Remove all but the newest ``keep`` and those at multiples of ``keep_every``; returns the steps removed."""

        def remove() -> list[int]:
            old = [step for step in list_steps(self.directory)[:-keep] if not keep_every or step % keep_every]
            for step in old:
                # Renamed first: a half-removed directory must not look like a checkpoint.
                path = self.directory / directory_name(step)
                doomed = path.with_suffix(".tmp")
                path.rename(doomed)
                shutil.rmtree(doomed)
            return old

        return self._on_rank_0(remove)

    def restore(self, engine: Engine, *, step: int | None = None, weights_only: bool = False) -> Restored | None:
        """Read the newest whole checkpoint, or that of ``step``, into ``engine``; None when there is none at all.

        No tensor changes before every file is verified. Random states are restored when the layout is the one that
        saved them (no other state depends on the layout).

        Raises:
            NoGoodCheckpoint: all candidates are damaged; the message has one line for each.
            UserError: ``step`` is not there, or the checkpoint is of another model.
        """
        steps: list[int] = self._on_rank_0(lambda: list_steps(self.directory))
        if step is not None:
            if step not in steps:
                known = ", ".join(map(str, steps)) or "none"
                raise UserError(f"{self.directory} has no checkpoint of step {step}; it has: {known}")
            steps = [step]
        refused: list[str] = []
        for candidate in reversed(steps):
            path = self.directory / directory_name(candidate)
            try:
                manifest = self._verify(path)
            except DamagedCheckpoint as error:
                refused.append(str(error))
                continue
            common = self._read(engine, path, manifest, weights_only)
            return Restored(step=candidate, path=path, common=common, refused=tuple(refused))
        if refused:
            raise NoGoodCheckpoint("no checkpoint is whole:\n" + "\n".join(f"  {line}" for line in refused))
        return None

    def _verify(self, path: Path) -> Manifest:
        """Each rank reads its share of the files; all agree."""

        def own_share() -> Manifest:
            manifest = read_manifest(path)
            verify_files(path, manifest, sorted(manifest.files)[self.mesh.rank :: self.mesh.world_size])
            return manifest

        return self._agree(own_share)[0]

    def _read(self, engine: Engine, path: Path, manifest: Manifest, weights_only: bool) -> dict[str, Any]:
        _check_same_model(engine, path)
        state = engine.sharded_state(loading=True, with_optimizer=not weights_only)
        loaded = dist_checkpointing.load(state, str(path))
        engine.load_state(loaded)
        common: dict[str, Any] = loaded["common"]
        mesh = self.mesh
        if manifest.facts["layout"] == mesh.axes and not weights_only:
            _set_random_states(torch.load(path / _rank_file(mesh.rank), weights_only=True))
        return common

    def _agree(self, action: Callable[[], _T]) -> list[_T]:
        """Run ``action`` on every rank and return all results; an error of any rank is raised on all."""
        result: tuple[_T | None, Exception | None]
        try:
            result = (action(), None)
        except (OSError, UserError) as error:
            result = (None, error)
        every: list[Any] = [None] * self.mesh.world_size
        dist.all_gather_object(every, result, group=self.mesh.control)
        for _, failure in every:
            if failure is not None:
                raise failure
        return [value for value, _ in every]

    def _on_rank_0(self, action: Callable[[], _T]) -> _T:
        """Run ``action`` on rank 0 only; every rank gets its result or its error."""
        first: Any = self._agree(lambda: action() if self.mesh.rank == 0 else None)[0]
        return first


def _check_same_model(engine: Engine, path: Path) -> None:
    """Refuse a checkpoint whose tensors are not those of the model, naming them."""
    stored = dist_checkpointing.load_tensors_metadata(str(path))
    wanted = {
        tensor.key: tuple(tensor.global_shape)
        for tensor in nested_values(engine.sharded_state(loading=True, with_optimizer=False))
        if isinstance(tensor, ShardedTensor)
    }
    for key, shape in wanted.items():
        if key not in stored:
            raise UserError(f"{path} is of another model: it has no tensor {key}")
        found = tuple(stored[key].global_shape)
        if found != shape:
            raise UserError(f"{path} is of another model: {key} is {found} there and {shape} here")


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _as_tuple(replica: int | tuple[int, ...]) -> tuple[int, ...]:
    return replica if isinstance(replica, tuple) else (replica,)


def _random_states() -> dict[str, Any]:
    """Every generator of this process, in types that load without unpickling objects."""
    version, keys, gauss = random.getstate()
    # The global generator is what libraries draw from.
    numpy_state: Any = np.random.get_state()
    name, vector, position, has_gauss, cached = numpy_state
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(keys), gauss],
        "numpy": [str(name), torch.from_numpy(vector.astype(np.int64)), int(position), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    name, vector, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, vector.numpy().astype(np.uint32), position, has_gauss, cached))
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
