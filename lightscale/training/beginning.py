"""The weights that a new run keeps from ``train.init_from``, computed from two configurations alone."""

from collections.abc import Collection
from typing import Any

from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.store.several_stores import open_stores
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.models.adapters import check_adapter
from lightscale.models.conversion import Conversion, conversion, other_settings
from lightscale.runs.base import base_run, refuse_adapters
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import checkpoints_of_step, list_steps
from lightscale.training.checkpoints.manifest import NAME as MANIFEST
from lightscale.training.checkpoints.manifest import hash_file

REFERENCE_KEY = "task.reference"
"""In ``--allow-change``: use log-probabilities that were computed on another layout."""


def kept_weights(config: RunConfig) -> tuple[Conversion | None, list[str]]:
    """The weights that ``config`` keeps from the run it begins from, and the notes about them.

    None: its mixers are the same, and all is kept. UserError where the model cannot begin with such weights.
    """
    assert config.train.init_from is not None
    source = RunDirectory(config.train.init_from.rpartition("@")[0])
    # Checkpoints that were copied without their run are those of the same model, or are refused by their shapes.
    if not source.config.exists():
        return None, []
    refuse_adapters(source, "train.init_from")
    there, here = load(source.config).model, config.model
    kept = conversion(there, here)
    return (kept, kept.lines()) if kept is not None else (None, other_settings(there, here))


def check_beginning(config: RunConfig, directory: RunDirectory) -> None:
    """UserError for weights that the new run in ``directory`` cannot begin with, or that are not there.

    Nothing is read but configurations.
    """
    # A run that has come to a checkpoint goes on from there, whatever has become of its first weights.
    if config.train.init_from is None or list_steps(directory.checkpoints):
        return
    source, _, step = config.train.init_from.rpartition("@")
    try:
        checkpoints_of_step(RunDirectory(source).checkpoints, int(step))
        kept_weights(config)
    except UserError as error:
        raise UserError(f'train.init_from = "{config.train.init_from}": {error}') from None


def check_base(config: RunConfig) -> None:
    """UserError for adapters that ``config`` cannot have, or where the frozen model is missing; reads no weights."""
    if not config.has_base:
        return
    check_adapter(config)
    directory, step = base_run(config)
    try:
        checkpoints_of_step(directory.checkpoints, step)
        if config.train.init_from is not None and kept_weights(config)[0] is not None:
            raise UserError(
                "its model differs from [model] of this run, and frozen weights are not drawn again; use its [model]"
            )
    except UserError as error:
        raise UserError(f'train.init_from = "{directory.path}@{step}": {error}') from None


def reference_layout(config: RunConfig) -> dict[str, Any]:
    """The keys that decide the last bits of a reference's log-probabilities, with their values."""
    parallel, train = config.parallel, config.train
    return {
        **{f"parallel.{axis}": getattr(parallel, axis) for axis in ("tensor", "pipeline", "sequence")},
        "data.sequence_length": config.data.sequence_length,
        **{f"train.{key}": getattr(train, key) for key in ("micro_batch_size", "precision", "kernels")},
    }


def check_reference(config: RunConfig, directory: RunDirectory, allow: Collection[str] = ()) -> None:
    """UserError for stored log-probabilities of another model than a new run begins from, or of another layout.

    ``allow``: with ``REFERENCE_KEY`` another layout is taken, on which sums differ in their last bits.
    """
    if not config.stored_reference:
        return
    store, data = open_stores(config.data), config.data
    training = data.sources or [name for name, one in store.sources.items() if one.split == "train"]
    sources = [store.source(name) for name in training]
    for chosen in data.validation.values():
        sources.append((store if chosen.store is None else TokenStore(chosen.store)).source(chosen.source))
    begins = config.train.init_from is not None and not list_steps(directory.checkpoints)
    here, layout = _manifest_of(config) if begins else None, reference_layout(config)
    for source in sources:
        found = source.reference
        assert found is not None, "checked with the store"
        where = f'task.reference = "stored": the log-probabilities of {source.directory}'
        if here is not None and found["manifest"] != here:
            raise UserError(
                f"{where} are those of {found['checkpoint']} ({found['manifest'][:16]}…), and train.init_from = "
                f'"{config.train.init_from}" is another model ({here[:16]}…); use that one, or compute them again with '
                "`lightscale reference`"
            )
        other = [key for key, value in found["layout"].items() if value != layout.get(key)]
        if other and REFERENCE_KEY not in allow:
            keys = ", ".join(f"{key} = {found['layout'][key]}, here {layout.get(key)}" for key in other)
            raise UserError(
                f"{where} were computed with {keys}; compute them again with `lightscale reference`, or accept sums "
                f"that differ in their last bits with --allow-change {REFERENCE_KEY}"
            )


def _manifest_of(config: RunConfig) -> str:
    """The hash of the manifest of the checkpoint that ``config`` begins from."""
    directory, step = base_run(config)
    try:
        (name, *_) = checkpoints_of_step(directory.checkpoints, step)
        return hash_file(directory.checkpoints / name.directory / MANIFEST).xxh3_128
    except (UserError, OSError) as error:
        raise UserError(f'train.init_from = "{config.train.init_from}": {error}') from None
