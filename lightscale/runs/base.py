"""The frozen model of a run, beside adapters or as a reference (``train.init_from``); without torch."""

from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.runs.run_directory import RunDirectory


def base_run(config: RunConfig) -> tuple[RunDirectory, int]:
    """The directory and the step of the frozen model of ``config``, which has one; a branch has its parent's.

    Raises UserError if the parent of a branch has no valid configuration, or no frozen model.
    """
    asked = config.train.branch_from
    while config.train.init_from is None:
        if config.train.branch_from is None:
            raise UserError(
                f'train.branch_from = "{asked}": the run that it branches off has no frozen model; to begin with its '
                f'weights, frozen, set train.init_from = "{asked}" in place of train.branch_from'
            )
        config = load(RunDirectory(config.train.branch_from.rpartition("@")[0]).config)
    name, _, step = config.train.init_from.rpartition("@")
    return RunDirectory(name), int(step)


def refuse_adapters(directory: RunDirectory, use: str) -> None:
    """UserError if the run in ``directory`` has only adapters; ``use`` needs a whole model."""
    # Checkpoints that were copied without their run are refused by their shapes.
    if directory.config.exists() and load(directory.config).adapters is not None:
        raise UserError(
            f"{directory.path} holds adapters, and {use} needs a whole model; merge it with `lightscale export "
            f"{directory.path} --merge --to DIR`, and make a run of it with `lightscale import DIR`"
        )
