"""Checkpoints: the whole state of a run at one step, committed by one rename.

    checkpoints/step-00000100.tmp/    while it is being written
    checkpoints/step-00000100/        rank-RRRRR.safetensors    the shards of weights and moments that a rank owns
                                      rank-RRRRR.json           its random states
                                      state.json                counters and all other state, the same on every rank
                                      MANIFEST.json             size and hash of every file, and the facts of the run
    checkpoints/step-00000100-weights/    the weights alone, in the same form, without rank-RRRRR.json: to be evaluated

``saving.py`` writes them: every rank hashes and syncs its files, rank 0 gathers the records into the manifest,
and the directory gets its name last. It is never written to again.

Reading starts from the newest checkpoint on disk. A checkpoint is used only if every file matches its manifest;
otherwise the next older one is. A damaged directory is renamed (step-00000100.bad) when its run continues without it,
and never removed by the program. Nothing in a checkpoint is unpickled or executed.

Any layout reads the checkpoints of any other. A shard stores its place in the whole tensor (``tensor_file.py``), and a
rank copies the overlaps of all stored shards with its own.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightscale.config.optimizers import OPTIMIZERS, optimizer_class
from lightscale.config.schedules.step_tokens import StepTokens
from lightscale.errors import UserError
from lightscale.models.accounting import parameter_shapes
from lightscale.models.conversion import Conversion
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.engine import Engine
from lightscale.parallel.mesh import Mesh
from lightscale.parallel.optimizer_spec import AVERAGE, CLIP, WHOLE, average_state
from lightscale.parallel.shards import TensorShard, copy_overlap, moved_rows
from lightscale.runs.run_directory import is_named
from lightscale.training.checkpoints.directories import (
    NUMBERING,
    STATE,
    WEIGHTS_PREFIX,
    CheckpointName,
    checkpoints_of_step,
    environment,
    list_checkpoints,
    put_aside,
    rank_stem,
)
from lightscale.training.checkpoints.manifest import NAME, Manifest
from lightscale.training.checkpoints.random_states import check_random_states, set_random_states
from lightscale.training.checkpoints.reader import read_generators, read_headers, read_state, verify_together
from lightscale.training.checkpoints.reading import DamagedCheckpoint, shown
from lightscale.training.checkpoints.tensor_file import TensorFile, tensor_files
from lightscale.training.health.fault_injection import fault_point


class NoGoodCheckpoint(UserError):
    """There are checkpoints, but none that is whole. Starting again from step 0 would lose the run silently."""

    EXIT_CODE = 74
    """``EX_IOERR``."""


class LostCheckpoints(NoGoodCheckpoint):
    """The record of the run lists checkpoints, and none exists."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The restored step, and the small state that was saved beside the tensors."""

    step: int
    path: Path
    manifest_xxh3_128: str
    common: dict[str, Any]
    refused: tuple[str, ...]
    """Why newer checkpoints were skipped, one line each."""
    damaged: tuple[Path, ...]
    """Their directories."""
    changes: tuple[str, ...] = ()
    """Differences of the environment that were allowed, one line each."""
    base: Mapping[str, Any] | None = None
    """The checkpoint with the frozen weights beside which adapters were trained; None: it holds a whole model."""


@dataclass(frozen=True, kw_only=True)
class _Contents:
    """A checkpoint's files, opened: of the tensors only the headers are read."""

    tensors: list[TensorFile]
    state: dict[str, Any]
    random: dict[str, Any] | None
    """The random states of this rank; None: another layout saved it."""


class Checkpoints:
    """The checkpoints of one run, read by all ranks of ``mesh`` together.

    Args:
        directory: the run's ``checkpoints`` directory; must be seen by every rank.
        mesh: every method is collective over its ranks.
        parts: of the state, which a checkpoint must have.
        step_tokens: of the whole run; None where they changed, or are not known.
        has_own_embedding_std: of a tied embedding; checkpoints of runs that drew it as two models are then refused.
    """

    def __init__(
        self,
        directory: Path,
        mesh: Mesh,
        *,
        parts: Collection[str] = (),
        step_tokens: StepTokens | None = None,
        has_own_embedding_std: bool = False,
    ) -> None:
        self.directory, self.mesh = directory, mesh
        self._parts, self._step_tokens = parts, step_tokens
        self._has_own_embedding_std = has_own_embedding_std
        self._ranks = Agreement(mesh.control)

    def restore(
        self,
        engine: Engine,
        *,
        step: int | None = None,
        weights_only: bool = False,
        allow: Collection[str] = (),
        conversion: Conversion | None = None,
        frozen: bool = False,
        average: str | None = None,
    ) -> Restored | None:
        """Read the newest intact checkpoint, or that of ``step``, into ``engine``; None if the run has no checkpoint.

        No tensor changes before every file is verified. Random states are restored when the layout is the one that
        saved them (no other state depends on the layout). Checkpoints of the weights alone are only read with
        ``weights_only``.

        Args:
            allow: changes that are accepted: ``versions`` or ``versions.NAME`` of a package (see ``environment``), and
                ``model.embedding_std`` (see ``_check_one_embedding``), ``optimizer.groups`` (see ``_check_numbering``).
            conversion: with ``weights_only``, of a model with other mixers; the weights that it does not keep stay.
            frozen: read the frozen weights of ``engine``, not those that it trains.
            average: with ``weights_only``, the name of an average that training kept (``optimizer.ema``), which is read
                in place of the weights.

        Raises:
            NoGoodCheckpoint: all candidates are damaged; the message has one line for each.
            UserError: ``step`` is not there, or the checkpoint is of another model, environment or format.
        """
        # As rank 0 sees the directory: with caches of a network file system, ranks could otherwise try different
        # checkpoints.
        names: list[CheckpointName] = self._ranks.on_first(
            lambda: list_checkpoints(self.directory) if step is None else checkpoints_of_step(self.directory, step)
        )
        if average is not None:
            names = self._with_averages(names, average)
        if not weights_only:
            if step is not None and all(name.contents == "weights" for name in names):
                raise UserError(
                    f"{self.directory / names[0].directory} has only weights; resuming also needs the optimizer "
                    "moments and random states of a full checkpoint"
                )
            names = [name for name in names if name.contents == "full"]
        refused: dict[Path, str] = {}
        # From the newest on. A damaged one is skipped for the next older; a whole one that may not be read (another
        # model, environment or format) is an error instead, as resuming from an older one would lose its training.
        # Of one step the weights alone come first: they are the same, and a third of the bytes to verify.
        for candidate in reversed(names):
            path = self.directory / candidate.directory
            try:
                fault_point("load:verify")
                manifest = verify_together(path, candidate.step, self._ranks)
                contents = self._open(path, manifest)
                # Weights mean the same under any version; a resumed run must not change its numbers unnoticed.
                changes = () if weights_only else _check_environment(path, manifest, allow)
                if self._has_own_embedding_std and not weights_only:
                    _check_one_embedding(path, manifest, allow)
                self._check_numbering(path, manifest, engine, allow)
                # Before the model: the state of another optimizer has other tensors.
                if not weights_only:
                    _check_counters(path, contents.state, engine.counters())
                wanted = engine.frozen_shards() if frozen else engine.wanted_shards(weights_only=weights_only)
                wanted = _with_new_averages(wanted, contents.tensors)
                if average is not None:
                    wanted = [_averaged(shard, average) for shard in wanted]
                self._check_same_model(path, wanted, contents.tensors, conversion)
            except DamagedCheckpoint as error:
                refused[path] = str(error)
                continue
            common = self._read(engine, wanted, contents, weights_only, conversion)
            return Restored(
                step=candidate.step,
                path=path,
                manifest_xxh3_128=manifest.xxh3_128,
                common=common,
                base=manifest.facts.get("base"),
                refused=tuple(refused.values()),
                damaged=tuple(refused),
                changes=changes,
            )
        # Not None, which means a new run: starting at step 0 beside damaged checkpoints would hide that they are lost.
        if refused:
            raise NoGoodCheckpoint("no intact checkpoint:\n" + "\n".join(f"  {line}" for line in refused.values()))
        return None

    def _with_averages(self, names: Sequence[CheckpointName], average: str) -> list[CheckpointName]:
        """Those of ``names`` that are full checkpoints, which alone have averages."""
        full = [name for name in names if name.contents == "full"]
        if names and not full:
            raise UserError(
                f"{self.directory / names[0].directory} has only weights, and not the average {average}; use a full "
                "checkpoint"
            )
        return full

    def put_aside(self, damaged: Sequence[Path]) -> None:
        """Rename damaged directories, so that they count neither as checkpoints nor as kept ones."""
        put_aside(damaged, self._ranks)

    def _open(self, path: Path, manifest: Manifest) -> _Contents:
        """Every rank opens the files for itself; if one rank cannot read a file, none uses the checkpoint."""
        # Through a list, as ``on_all`` would send its results to all ranks, and open files cannot be sent.
        opened: list[_Contents] = []

        def open_all() -> None:
            self._check_tokens(path, manifest)
            state = read_state(path, manifest, self._parts)
            files = tensor_files(path, read_headers(path, manifest))
            # On another layout there is no rank whose generators these would be: ranks then keep their own seeds.
            random_file = path / f"{rank_stem(self.mesh.rank)}.json"
            has_own = manifest.facts["layout"] == self.mesh.axes and random_file.name in manifest.files
            random = read_generators(random_file) if has_own else None
            if random is not None:
                check_random_states(random, random_file)
            opened.append(_Contents(tensors=files, state=state, random=random))

        self._ranks.on_all(open_all)
        return opened[0]

    def _check_tokens(self, path: Path, manifest: Manifest) -> None:
        """The state has the manifest's number of tokens (``read_state``), and this is that of the step."""
        step, tokens = manifest.facts["step"], manifest.facts.get("tokens")
        if self._step_tokens is not None and tokens != (expected := self._step_tokens.after(step)):
            raise DamagedCheckpoint(f"{path / NAME}: expected {expected} tokens after step {step}, found {tokens}")

    def _check_numbering(self, path: Path, manifest: Manifest, engine: Engine, allow: Collection[str]) -> None:
        """Refuse weights that may be under another parameter's name: shapes cannot tell, as the parameters' are equal.

        A run's own checkpoints, or those that it begins from: the groups of this engine stand for the writer's.
        """
        if manifest.facts.get("numbering") == NUMBERING or is_named("optimizer.groups", allow):
            return
        mixes = self._ranks.on_all(lambda: engine.optimizer is not None and engine.optimizer.mixes_dtypes)
        if any(mixes):
            raise UserError(
                f"{path} may have the weights of one parameter under the name of another: it was written in half "
                "precision by a version of lightscale that mistook parameters of one group of the optimizer for each "
                "other where some of them are kept in fp32 (as in the mixers of the delta rule). Start a new run. If "
                'it was written with train.precision = "fp32", or imported, its weights are right: read it with '
                "--allow-change optimizer.groups"
            )

    def _read(
        self,
        engine: Engine,
        wanted: Sequence[TensorShard],
        contents: _Contents,
        weights_only: bool,
        conversion: Conversion | None,
    ) -> dict[str, Any]:
        fault_point("load:read")
        # One pass over the stored shards, each mapped once, however many of this rank's shards it overlaps: the
        # pattern of reads is that of the files, and no whole tensor is ever in memory.
        by_key: dict[str, list[TensorShard]] = {}
        for shard in wanted:
            by_key.setdefault(shard.box.key, []).append(shard)

        def copy() -> None:
            for file in contents.tensors:
                for stored in file.shards():
                    for one in (stored,) if conversion is None else _converted(stored, conversion):
                        for shard in by_key.get(one.box.key, ()):
                            copy_overlap(one, shard)

        # Together, so that no rank waits for one whose read failed, or removes old checkpoints while others read them.
        self._ranks.on_all(copy)
        # The engine's own counters travel in the shared state; the caller gets the rest.
        common = dict(contents.state)
        counters = common.pop("optimizer", None)
        engine.finish_loading(None if weights_only else counters)
        if contents.random is not None and not weights_only:
            set_random_states(contents.random)
        return common

    def _check_same_model(
        self,
        path: Path,
        wanted: Sequence[TensorShard],
        files: Sequence[TensorFile],
        conversion: Conversion | None,
    ) -> None:
        """Refuse a checkpoint whose weights are not those of the model, naming the first that differs."""
        # Of all ranks: with pipeline stages this rank has only some of the layers, and all ranks must refuse alike.
        own = {shard.box.key: shard.box.shape for shard in wanted}
        here = {key: shape for part in self._ranks.on_all(lambda: own) for key, shape in part.items()}
        if conversion is not None:
            target = parameter_shapes(conversion.target)
            assert here == {f"{WEIGHTS_PREFIX}{name}": shape for name, shape in target.items()}
            here = {f"{WEIGHTS_PREFIX}{name}": shape for name, shape in parameter_shapes(conversion.source).items()}
        # "model", "exp_avg", …: with ``weights_only`` the moments in the file are not missing from the model.
        kinds = {key.partition(".")[0] for key in here}
        boxes = [box for file in files for box in file.boxes]
        if not kinds <= {WEIGHTS_PREFIX.removesuffix(".")}:
            # Moments may be those of a basis, which no matrix here has.
            kinds |= {kind for box in boxes if (kind := box.key.partition(".")[0]).startswith(WHOLE)}
        there = {box.key: box.shape for box in boxes if box.key.partition(".")[0] in kinds}
        # Weights before moments, whose names say less.
        for key in sorted({*here, *there}, key=lambda key: (not key.startswith("model."), key)):
            found, expected = (shapes.get(key, "missing") for shapes in (there, here))
            if found != expected:
                name = key.removeprefix("model.")
                where = "here" if conversion is None else "in the configuration of this run"
                if not key.startswith(WEIGHTS_PREFIX):
                    raise UserError(
                        f"{path} has other state of the optimizer: {name} is {found} there and {expected} {where}; set "
                        "the options of [optimizer] back, or start a new run with these weights (train.init_from)"
                    )
                raise UserError(f"{path} is of another model: {name} is {found} there and {expected} {where}")


def _with_new_averages(wanted: Sequence[TensorShard], files: Sequence[TensorFile]) -> list[TensorShard]:
    """``wanted``, where averages that no file has read the weights instead: they begin with the step that follows."""
    there = {box.key.partition(".")[0] for file in files for box in file.boxes}
    found = []
    for shard in wanted:
        what, _, name = shard.box.key.partition(".")
        if what.startswith(AVERAGE) and what not in there:
            shard = replace(shard, box=replace(shard.box, key=f"{WEIGHTS_PREFIX}{name}"))
        found.append(shard)
    return found


def _averaged(shard: TensorShard, average: str) -> TensorShard:
    """The shard of a weight, to be filled with its average."""
    key = f"{average_state(average)}.{shard.box.key.removeprefix(WEIGHTS_PREFIX)}"
    return replace(shard, box=replace(shard.box, key=key))


def _converted(stored: TensorShard, conversion: Conversion) -> Iterator[TensorShard]:
    """What is kept of ``stored``, as shards of the tensors that it goes to."""
    for move in conversion.moves.get(stored.box.key.removeprefix(WEIGHTS_PREFIX), ()):
        key = f"{WEIGHTS_PREFIX}{move.parameter}"
        shard = moved_rows(stored, move.first, move.last, key=key, shape=move.shape, to=move.to)
        if shard is not None:
            yield shard


def _check_environment(path: Path, manifest: Manifest, allow: Collection[str]) -> tuple[str, ...]:
    """The allowed differences between the versions that wrote the checkpoint and those that read it."""
    there, now = manifest.facts["versions"], environment()
    changes = {
        f"versions.{name}": f"{there.get(name, 'none')} in the checkpoint, {now.get(name, 'none')} now"
        for name in sorted({*there, *now})
        if there.get(name) != now.get(name)
    }
    # ``allow`` may name one package, or "versions" for all of them.
    refused = [key for key in changes if not is_named(key, allow)]
    if refused:
        raise UserError(
            f"{path} was written with other package versions, which can change results:\n"
            + "\n".join(f"  {key}: {changes[key]}" for key in refused)
            + "\nInstall those versions, or accept the new versions with --allow-change versions."
        )
    return tuple(f"{key}: {change}" for key, change in changes.items())


def _check_one_embedding(path: Path, manifest: Manifest, allow: Collection[str]) -> None:
    """Refuse what may be of two models: its stages drew the copies of the tied embedding with two deviations.

    The checkpoint has the copy of the first stage alone, and every stage reads that: the weights cannot tell.
    """
    facts = manifest.facts
    stages = facts["layout"]["pipeline"]
    if stages == 1 or facts.get("stage_copies") == "equal" or is_named("model.embedding_std", allow):
        return
    raise UserError(
        f"{path} is inconsistent: the copies of the tied embedding (embedding.word_embeddings.weight) on stage 0 "
        f"and stage {stages - 1} differ. It was written with parallel.pipeline = {stages} and model.embedding_std by "
        "a version of lightscale that initialized the copy of the last stage (the output layer) with model.init_std. "
        "Only the copy of the first stage was saved; the output layer is lost. Start a new run. If this run started "
        "with parallel.pipeline = 1, its copies are equal: resume it with --allow-change model.embedding_std"
    )


def _check_counters(path: Path, state: Mapping[str, Any], expected: Mapping[str, float]) -> None:
    """The optimizer's counters, by name; whether they are numbers that make sense is checked (``read_state``).

    Limits of gradient norms may be new, and begin with the step that follows, or gone.
    """
    there, here = ({name for name in names if not name.startswith(CLIP)} for names in (state["optimizer"], expected))
    if there != here:
        found, right = (", ".join(sorted(names)) or "none" for names in (there, here))
        if state["optimizer"].keys() & {optimizer_class(name).step_counter for name in OPTIMIZERS}:
            raise UserError(
                f"{path} has the state of another optimizer: its counters are {found}, those of optimizer.name are "
                f"{right}; set optimizer.name back, or start a new run with these weights (train.init_from)"
            )
        raise DamagedCheckpoint(f"{path / STATE}: expected the optimizer counters {right}, found {shown(found)}")
