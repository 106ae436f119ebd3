"""``--anneal LENGTH`` of `lightscale train` and `submit`: a branch of a run that decays its learning rate to the end.

The options only choose the configuration and the directory of a run with ``train.branch_from``; all else is as without.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightscale.config.arguments import require_run, run_path
from lightscale.config.fields import toml_value
from lightscale.config.files import load
from lightscale.config.optimizers import length_defaults, optimizer_class
from lightscale.config.schedules.registry import schedule_of
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.launch.commands.checks import WrongUse
from lightscale.parallel.optimizer_spec import AveragedSpec
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.branch import parent_of
from lightscale.training.checkpoints.directories import list_steps

_SET_HERE = (
    "train.steps",
    "train.tokens",
    "train.branch_from",
    "train.init_from",
    "train.stop_step",
    "optimizer.schedule",
    "optimizer.decay_steps",
)


def add_anneal_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    group = parser.add_argument_group(
        "branches",
        "With --anneal, CONFIG is a run with a stable phase. The branch continues from a checkpoint of it, in a "
        "directory of its own, and decays the learning rate until its end. The parent stays as it is.",
    )
    group.add_argument(
        "--anneal",
        metavar="LENGTH",
        help="length of the decay: a share of the branch's whole run, such as 0.2, or a number of steps, such as 500",
    )
    group.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="with --anneal: step of the checkpoint to continue from (default: the newest of the stable phase)",
    )


def resolve_anneal(args: argparse.Namespace) -> None:
    """Replace ``args.config``, ``args.overrides`` and ``args.run`` by those of the branch, where --anneal is given.

    Raises UserError for a run without a stable phase, and for a step without a checkpoint in it.
    """
    if args.anneal is None:
        if args.step is not None:
            raise WrongUse(f"--step {args.step}: needs --anneal, the length of the decay")
        return
    for text in args.overrides:
        if (key := text.partition("=")[0]) in _SET_HERE:
            raise WrongUse(f"--anneal sets {key}; remove {text}")
    path = run_path(args.config.parent if args.config.name == "config.toml" else args.config)
    require_run(path)
    parent = RunDirectory(path)
    config = load(parent.config)
    step = _step(args, parent, config)
    decay_steps = _decay_steps(args.anneal, step)
    args.config = parent.config
    constants = length_defaults(config.optimizer, config.total_steps)
    args.overrides = [
        *(f"optimizer.{key}={toml_value(value)}" for key, value in constants.items()),
        # Steps of the parent, perhaps behind the branch's last one.
        "train.profile_steps=none",
        *args.overrides,
        f"train.branch_from={toml_value(f'{path}@{step}')}",
        "train.init_from=none",
        "train.stop_step=none",
        f"train.steps={step + decay_steps}",
        "optimizer.schedule=wsd",
        f"optimizer.decay_steps={decay_steps}",
    ]
    args.run = args.run or path.with_name(f"{path.name}-anneal-{step}-{decay_steps}")


def _decay_steps(text: str, step: int) -> int:
    """The steps of a decay behind `step`; a share is one of all steps, those before the decay included."""
    try:
        length = float(text)
    except ValueError:
        length = -1.0
    if 0 < length < 1:
        return max(1, round(step * length / (1 - length)))
    if length < 1 or not length.is_integer():
        raise WrongUse(f"--anneal {text}: use a share of the whole run below 1, such as 0.2, or a number of steps")
    return int(length)


def _step(args: argparse.Namespace, parent: RunDirectory, config: RunConfig) -> int:
    """The step of the parent's checkpoint."""
    optimizer = config.optimizer
    if issubclass(optimizer_class(optimizer.name), AveragedSpec):
        raise UserError(
            f'{parent.path}: optimizer.name = "{optimizer.name}" averages in the place of a decay: its checkpoints are '
            "the averages, to evaluate and export without one"
        )
    stable = schedule_of(optimizer).stable_steps(optimizer, config.total_steps)
    if stable is None:
        raise UserError(
            f'{parent.path}: optimizer.schedule = "{optimizer.schedule}" has no stable phase to branch off; use "wsd" '
            'or "constant" for runs with branches'
        )
    # The same command resumes the branch, although its parent may have newer checkpoints by now.
    if args.step is None and (begun := _begun(args.run, parent.path)) is not None:
        return begun
    there = list_steps(parent.checkpoints)
    fitting = [step for step in there if step in stable]
    if args.step is None and fitting:
        return fitting[-1]
    phase = f"the stable phase of {parent.path}, steps {stable.start} to {stable.stop - 1}"
    if args.step is None:
        raise UserError(f"no checkpoint in {phase}; full checkpoints of the run: {_listed(there)}")
    if args.step not in stable:
        raise UserError(f"--step {args.step}: not in {phase}; full checkpoints there: {_listed(fitting)}")
    return int(args.step)


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _begun(run: Path | None, parent: Path) -> int | None:
    """The step at which the branch of `parent` in the directory `run` began; None: there is no such branch."""
    if run is None or not (run / "config.toml").is_file():
        return None
    found = parent_of(load(run / "config.toml"))
    return found[1] if found is not None and found[0].path == parent else None
