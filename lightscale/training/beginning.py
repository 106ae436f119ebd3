"""The weights that a new run keeps from ``train.init_from``, computed from two configurations alone."""

from collections.abc import Collection, Iterator
from typing import Any

from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.store.several_stores import open_stores
from lightscale.data_pipeline.store.token_store import TokenSource, TokenStore
from lightscale.errors import UserError
from lightscale.models.adapters import check_adapter
from lightscale.models.conversion import Conversion, conversion, other_settings
from lightscale.runs.base import base_run, refuse_adapters
from lightscale.runs.run_directory import RunDirectory, read_lines
from lightscale.training.branch import lineage
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
    axes = ["tensor", "pipeline", "sequence"]
    if parallel.sequence > 1:
        axes += ["exchange", "attention", "ranks_per_node"]
    return {
        **{f"parallel.{axis}": getattr(parallel, axis) for axis in axes},
        "data.sequence_length": config.data.sequence_length,
        **{f"train.{key}": getattr(train, key) for key in ("micro_batch_size", "precision", "kernels")},
    }


def check_reference(config: RunConfig, directory: RunDirectory, allow: Collection[str] = ()) -> None:
    """UserError for stored log-probabilities of another model than the run began from, or of another layout.

    ``allow``: with ``REFERENCE_KEY`` another layout is taken, on which sums differ in their last bits.
    """
    if not config.stored_reference:
        return
    began, layout = _manifest_of(config, directory), reference_layout(config)
    for source in reference_sources(config):
        found = source.reference
        assert found is not None, "checked with the store"
        where = f'task.reference = "stored": the log-probabilities of {source.directory}'
        if began is not None and found["manifest"] != began:
            raise UserError(
                f"{where} are those of {found['checkpoint']} ({found['manifest'][:16]}…), and {directory.path} begins "
                f"from another model ({began[:16]}…); train the model that they are of (train.init_from), or compute "
                "them again with `lightscale reference`"
            )
        # A store that was written before a key decided anything does not know it.
        other = [key for key in layout if key in found["layout"] and found["layout"][key] != layout[key]]
        if other and REFERENCE_KEY not in allow:
            keys = ", ".join(f"{key} = {found['layout'][key]}, here {layout[key]}" for key in other)
            raise UserError(
                f"{where} were computed with {keys}; compute them again with `lightscale reference`, or accept sums "
                f"that differ in their last bits with --allow-change {REFERENCE_KEY}"
            )


def reference_sources(config: RunConfig) -> Iterator[TokenSource]:
    """The sources that ``config`` trains on and validates with, whose log-probabilities it reads."""
    store, data = open_stores(config.data), config.data
    for name in data.sources or [name for name, one in store.sources.items() if one.split == "train"]:
        yield store.source(name)
    for chosen in data.validation.values():
        yield (store if chosen.store is None else TokenStore(chosen.store)).source(chosen.source)


def _manifest_of(config: RunConfig, directory: RunDirectory) -> str | None:
    """The hash of the manifest of the checkpoint that the run in ``directory`` begins from, or began from.

    None: nobody knows any more, as neither its record nor the checkpoint is there.
    """
    runs = lineage(config, directory)
    for _, run in runs:
        for event in read_lines(run.events):
            if event["event"] == "init_from":
                return str(event["manifest"])
    own, run = runs[-1]
    if own.train.branch_from is not None:
        return None
    base, step = base_run(own)
    try:
        (name, *_) = checkpoints_of_step(base.checkpoints, step)
        return hash_file(base.checkpoints / name.directory / MANIFEST).xxh3_128
    except (UserError, OSError) as error:
        # A run that has come to a checkpoint goes on from there, whatever has become of its first weights.
        if list_steps(run.checkpoints):
            return None
        raise UserError(f'train.init_from = "{own.train.init_from}": {error}') from None
