"""Branches: a run that continues another one from a full checkpoint, ``train.branch_from``, in its own directory.

A branch is a run like any other: its first checkpoint is that of its parent, its steps go on counting, and its data go
on where the parent stood. Its configuration may differ in the length and in the decay of the learning rate.
"""

from collections.abc import Collection

from lightscale.config.arguments import require_run
from lightscale.config.files import difference, load, toml_value
from lightscale.config.optimizers import length_defaults
from lightscale.config.schedules.registry import learning_rate
from lightscale.config.schema import RunConfig
from lightscale.config.text import allow_changes
from lightscale.errors import UserError
from lightscale.runs.run_directory import HARMLESS_KEYS, LENGTH_KEYS, RunDirectory, is_named
from lightscale.training.checkpoints.directories import CheckpointName, checkpoints_of_step, list_steps

_OWN_KEYS = (
    *LENGTH_KEYS,
    "train.branch_from",
    "train.init_from",
    "optimizer.schedule",
    "optimizer.decay",
    "optimizer.decay_steps",
    "optimizer.decay_power",
    "optimizer.min_lr_ratio",
)
"""What a branch may have otherwise than its parent, beside ``HARMLESS_KEYS``."""


def parent_of(config: RunConfig) -> tuple[RunDirectory, int] | None:
    """The run that ``config`` branches off, and the step of its checkpoint; None: it is no branch."""
    if config.train.branch_from is None:
        return None
    return RunDirectory(config.train.branch_from.rpartition("@")[0]), config.parent_steps


def lineage(config: RunConfig, directory: RunDirectory) -> list[tuple[RunConfig, RunDirectory]]:
    """The run ``config`` in ``directory``, its parent, the parent's, and so on, as far as they are still there."""
    found = [(config, directory)]
    while (parent := parent_of(found[-1][0])) is not None and parent[0].config.exists():
        found.append((load(parent[0].config), parent[0]))
    return found


def check_branch(config: RunConfig, directory: RunDirectory, allow: Collection[str] = ()) -> None:
    """UserError for a parent without the checkpoint, or from which the new run in ``directory`` cannot branch off.

    Reads configurations and names of checkpoints alone. ``allow``: keys or sections that may differ from the parent's.
    """
    parent = parent_of(config)
    # A branch that has a checkpoint goes on from there, whatever has become of its parent.
    if parent is None or list_steps(directory.checkpoints):
        return
    try:
        _check(config, *parent, allow)
    except UserError as error:
        raise UserError(f'train.branch_from = "{config.train.branch_from}": {error}') from None


def _check(config: RunConfig, parent: RunDirectory, step: int, allow: Collection[str]) -> None:
    require_run(parent.path)
    if CheckpointName(step) not in checkpoints_of_step(parent.checkpoints, step):
        steps = ", ".join(map(str, list_steps(parent.checkpoints))) or "none"
        raise UserError(
            f"{parent.checkpoints} has only weights of step {step}; a branch also needs optimizer moments and random "
            f"states. Full checkpoints: {steps}"
        )
    there = load(parent.config)
    refused = [
        change
        for change in difference(_with_constants(there), _with_constants(config))
        if not is_named(change[0], (*_OWN_KEYS, *HARMLESS_KEYS)) and not is_named(change[0], allow)
    ]
    if refused:
        lines = [f"  {key}: {toml_value(before)} there, {toml_value(now)} here" for key, before, now in refused]
        raise UserError(
            f"{parent.path} has another configuration:\n" + "\n".join(lines) + "\n"
            "Use its values, or accept the new ones at your own risk with "
            f"{allow_changes(key for key, *_ in refused)}"
        )
    before, now = (learning_rate(one.optimizer, step, one.total_steps) for one in (there, config))
    if before != now and not is_named("optimizer.schedule", allow):
        raise UserError(
            f"the learning rate of step {step} is {before:g} there, with optimizer.schedule = "
            f'"{there.optimizer.schedule}", and {now:g} here, with "{config.optimizer.schedule}"; branch off in a '
            "stable phase, or accept the jump with --allow-change optimizer.schedule"
        )


def _with_constants(config: RunConfig) -> RunConfig:
    """With the constants of the optimizer that come from the length of the run: a branch keeps those of its parent."""
    constants = length_defaults(config.optimizer, config.total_steps)
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=constants)})
