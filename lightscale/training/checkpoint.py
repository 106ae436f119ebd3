"""Checkpoints: everything a run is at one step, committed by one rename.

    checkpoints/step-00000100.tmp/    while it is being written
    checkpoints/step-00000100/        __R_N.distcp, .metadata, common.pt, metadata.json    Megatron's torch_dist files
                                      rank-RRRRR.pt                                        random states of each rank
                                      MANIFEST.json                                        size and hash of every file

Every rank hashes and syncs the files it wrote, rank 0 gathers the records into the manifest, and the directory gets
its name last. It is never written to again. Reading starts from what is on disk, newest first: a checkpoint is used
only when every file is what the manifest says; otherwise the next older one is. A damaged directory is renamed
(step-00000100.bad) when its run goes on without it; what happens to it then is for a person to say.
"""

import io
import itertools
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata as packages
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from lightscale import __version__
from lightscale.errors import UserError
from lightscale.parallel.engine import Engine
from lightscale.parallel.mesh import Mesh
from lightscale.training.faults import reach
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
_OPTIMIZER_PREFIX = "optimizer."
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
    damaged: tuple[Path, ...]
    """Their directories."""


def directory_name(step: int) -> str:
    """step-00000100"""
    return f"step-{step:08d}"


def list_steps(directory: Path) -> list[int]:
    """Steps of the checkpoints in ``directory``, oldest first, damaged ones included: nothing is read."""
    if not directory.is_dir():
        return []
    matches = (_STEP.fullmatch(entry.name) for entry in directory.iterdir() if entry.is_dir())
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

        A whole checkpoint of the same step and ``facts`` is that of this state already, and stays as it is.

        Args:
            engine: weights and optimizer state.
            common: small state that is the same on every rank (counters, data position).
            facts: what the manifest says about the run, besides versions and layout; as JSON gives it back.

        Raises:
            UserError: not enough space, the files cannot be written, or there is a whole checkpoint of another state
                of the same step. Nothing is left behind, and earlier checkpoints are as they were.
        """
        final = self.directory / directory_name(step)
        draft = final.with_suffix(".tmp")
        if self._is_saved(final, step, facts):
            return final
        state: dict[str, Any] = {**engine.sharded_state(loading=False), "common": {**common, "step": step}}
        sharded, small = save_preprocess(state)
        try:
            self._agree(lambda: reach("save:begin"))
            self._on_rank_0(lambda: self._make_room(draft))
            self._check_space(sharded)
            self._write(sharded, small, draft)
            records = self._agree(lambda: self._own_files(draft))
            files = {name: record for own in records for name, record in own.items()}
            self._on_rank_0(lambda: self._commit(draft, final, files, step, facts))
        except (OSError, CheckpointException, UserError) as error:
            self._on_rank_0(lambda: shutil.rmtree(draft, ignore_errors=True))
            if isinstance(error, UserError):
                raise
            raise UserError(f"cannot write {final}: {_cause(error)}") from error
        return final

    def _is_saved(self, final: Path, step: int, facts: Mapping[str, Any]) -> bool:
        """Whether ``final`` is there and whole; a damaged one is put aside."""
        if not self._on_rank_0(final.exists):
            return False
        try:
            there = self._verify(final, step).facts
        except DamagedCheckpoint:
            self.put_aside([final])
            return False
        differing = [f"{key}: {there.get(key)} there, {now} now" for key, now in facts.items() if there.get(key) != now]
        if differing:
            raise UserError(f"{final} is a good checkpoint of another state ({'; '.join(differing)}); move it away")
        return True

    def _make_room(self, draft: Path) -> None:
        """Drop what interrupted saves and removals left."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for dead in self.directory.glob("step-*.tmp"):
            shutil.rmtree(dead, ignore_errors=True)
        draft.mkdir()

    def _check_space(self, sharded: Mapping[str, Any]) -> None:
        tensors = (value for value in nested_values(sharded) if isinstance(value, ShardedTensor))
        own = sum(
            tensor.data.nbytes for tensor in tensors if tensor.data is not None and is_main_replica(tensor.replica_id)
        )
        every = self._agree(lambda: (own, shutil.disk_usage(self.directory).free))
        needed, free = sum(size for size, _ in every) + _SPARE_BYTES, min(space for _, space in every)
        if free < needed:
            raise UserError(
                f"no space for a checkpoint in {self.directory}: it needs {needed / 1e6:.0f} MB, "
                f"{free / 1e6:.0f} MB are free; free some, or keep fewer (checkpoint.keep)"
            )

    def _write(self, sharded: dict[str, Any], small: dict[str, Any], draft: Path) -> None:
        """The files of Megatron's ``dist_checkpointing.save``, each written in this process.

        That one starts a queue server and forks two writers per rank, which takes seconds, waits for ever for a writer
        that was killed, and leaves the other ranks waiting when rank 0 alone cannot write. Here an error of any rank
        is raised on all.
        """
        self._agree(lambda: reach("save:open"))
        self._on_rank_0(lambda: _save_file(small, draft / "common.pt"))
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(by_key),
            # Synced with the other files, in `_own_files`.
            storage_writer=_TensorWriter(draft, sync_files=False),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self.mesh.control,
        )
        self._on_rank_0(lambda: save_config(CheckpointingConfig("torch_dist", 1), str(draft)))

    def _own_files(self, draft: Path) -> dict[str, FileRecord]:
        rank = self.mesh.rank
        _save_file(_random_states(), draft / _rank_file(rank))
        own = [path for path in draft.iterdir() if path.name.startswith(f"__{rank}_") or path.name == _rank_file(rank)]
        if rank == 0:
            own += [path for path in draft.iterdir() if not path.name.startswith(("__", "rank-"))]
        for path in own:
            reach("save:sync")
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
        reach("save:manifest")
        write_manifest(draft, files, {"step": step, **facts, "layout": self.mesh.axes, "versions": versions})
        sync(draft)
        reach("save:rename")
        draft.rename(final)
        sync(self.directory)

    def put_aside(self, damaged: Sequence[Path]) -> None:
        """Rename damaged directories, so that they count neither as checkpoints nor as kept ones."""

        def rename() -> None:
            for path in damaged:
                names = (path.with_suffix(f".bad{number or ''}") for number in itertools.count())
                path.rename(next(name for name in names if not name.exists()))
            if damaged:
                sync(self.directory)

        self._on_rank_0(rename)

    def prune(self, *, keep: int, keep_every: int | None) -> list[int]:
        """Remove all but the newest ``keep`` and those at multiples of ``keep_every``; returns the steps removed."""

        def remove() -> list[int]:
            old = [step for step in list_steps(self.directory)[:-keep] if not keep_every or step % keep_every]
            for step in old:
                # Renamed first: a half-removed directory must not look like a checkpoint.
                path = self.directory / directory_name(step)
                doomed = path.with_suffix(".tmp")
                path.rename(doomed)
                reach("save:retention")
                shutil.rmtree(doomed)
            return old

        return self._on_rank_0(remove)

    def restore(self, engine: Engine, *, step: int | None = None, weights_only: bool = False) -> Restored | None:
        """Read the newest whole checkpoint, or that of ``step``, into ``engine``; None when there is none at all.

        No tensor changes before every file is verified. Random states are restored when the layout is the one that
        saved them (no other state depends on the layout).

        Raises:
            NoGoodCheckpoint: all candidates are damaged; the message has one line for each.
            UserError: ``step`` is not there, or the checkpoint is of another model or another format.
        """
        steps: list[int] = self._on_rank_0(lambda: list_steps(self.directory))
        if step is not None:
            if step not in steps:
                known = ", ".join(map(str, steps)) or "none"
                raise UserError(f"{self.directory} has no checkpoint of step {step}; it has: {known}")
            steps = [step]
        refused: dict[Path, str] = {}
        for candidate in reversed(steps):
            path = self.directory / directory_name(candidate)
            try:
                manifest = self._verify(path, candidate)
            except DamagedCheckpoint as error:
                refused[path] = str(error)
                continue
            common = self._read(engine, path, manifest, weights_only)
            reasons = tuple(refused.values())
            return Restored(step=candidate, path=path, common=common, refused=reasons, damaged=tuple(refused))
        if refused:
            raise NoGoodCheckpoint("no checkpoint is whole:\n" + "\n".join(f"  {line}" for line in refused.values()))
        return None

    def _verify(self, path: Path, step: int) -> Manifest:
        """Each rank reads its share of the files; all agree."""

        def own_share() -> Manifest:
            reach("load:verify")
            manifest = read_manifest(path)
            if manifest.facts["step"] != step:
                raise DamagedCheckpoint(f"{path / NAME}: expected step {step}, found {manifest.facts['step']}")
            verify_files(path, manifest, sorted(manifest.files)[self.mesh.rank :: self.mesh.world_size])
            return manifest

        return self._agree(own_share)[0]

    def _read(self, engine: Engine, path: Path, manifest: Manifest, weights_only: bool) -> dict[str, Any]:
        reach("load:read")
        state = engine.sharded_state(loading=True, with_optimizer=not weights_only)
        self._check_same_model(state["model"], path)
        loaded = dist_checkpointing.load(state, str(path))
        engine.load_state(loaded)
        common: dict[str, Any] = loaded["common"]
        mesh = self.mesh
        if manifest.facts["layout"] == mesh.axes and not weights_only:
            _set_random_states(torch.load(path / _rank_file(mesh.rank), weights_only=True))
        return common

    def _check_same_model(self, weights: dict[str, Any], path: Path) -> None:
        """Refuse a checkpoint whose weights are not those of the model, naming the first that differs."""
        own = {
            tensor.key: tuple(tensor.global_shape)
            for tensor in nested_values(load_preprocess(weights)[0])
            if isinstance(tensor, ShardedTensor)
        }
        here = {key: shape for part in self._agree(lambda: own) for key, shape in part.items()}
        there = {
            key: tuple(tensor.global_shape)
            for key, tensor in dist_checkpointing.load_tensors_metadata(str(path)).items()
            if not key.startswith(_OPTIMIZER_PREFIX)
        }
        for key in sorted({*here, *there}):
            found, expected = (shapes.get(key, "missing") for shapes in (there, here))
            if found != expected:
                raise UserError(f"{path} is of another model: {key} is {found} there and {expected} here")

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


class _TensorWriter(torch_checkpoint.FileSystemWriter):
    """PyTorch's writer, but telling what the system said: its archive reports a full disk as a wrong position."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            reach("save:write")
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, OSError):
                    raise cause from error
                cause = cause.__context__
            raise


def _save_file(value: Any, path: Path) -> None:
    # Not to the path: see `_TensorWriter`.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path.write_bytes(buffer.getbuffer())


def _cause(error: OSError | CheckpointException) -> str:
    """One line; of several ranks' errors the first one's."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items())
        return f"{cause if isinstance(cause, OSError) else repr(cause)} (rank {rank})"
    return str(error)


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


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
