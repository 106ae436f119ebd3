"""The weights that a new run keeps from ``train.init_from``, computed from two configurations alone."""

from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.models.adapters import check_adapter
from lightscale.models.conversion import Conversion, conversion, other_settings
from lightscale.runs.base import base_run, refuse_adapters
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import checkpoints_of_step, list_steps


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
