"""Shared parts of the commands that use trained models on one process or on ranks."""

import argparse
import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from lightscale.config.layout import check_layout
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError, counted
from lightscale.launch.commands.checks import WrongUse, check_lines, num_gpus
from lightscale.launch.environment import RankEnvironment
from lightscale.launch.launcher.rank import run_rank
from lightscale.launch.network import choose_interface
from lightscale.launch.scheduler import adopt_job
from lightscale.training.health.limits import Needs, require_limits

_OVERRIDE = re.compile(r"[a-z_]+\.[a-z_.]+=.*", re.ASCII)
# What may differ from training's: where the ranks stand, and what computes.
_MAY_CHANGE = ("parallel.", "train.device=", "train.precision=", "train.kernels=", "restart.")


def as_usage(action: Callable[[], int]) -> int:
    """Do ``action``; its refusals exit like wrong usage."""
    try:
        return action()
    except UserError as error:
        # Of its own accord one may ask to be tried again, as where ranks did not come.
        if error.EXIT_CODE != UserError.EXIT_CODE:
            raise
        raise WrongUse(str(error)) from error


def join_or_start(rank: Callable[[RankEnvironment], int], start: Callable[[], int]) -> int:
    """Do ``rank`` where torchrun, srun or mpirun started this process, else ``start``, which starts the ranks."""
    adopt_job(os.environ)
    environment = RankEnvironment.read(os.environ)
    if environment is None:
        return as_usage(start)
    return run_rank(functools.partial(as_usage, functools.partial(rank, environment)))


def join(environment: RankEnvironment) -> None:
    """Make a rank of this process: torch.distributed and Megatron know only torchrun's variables."""
    os.environ.update(environment.variables())
    choose_interface(environment)


def overrides_among_one(words: Sequence[str]) -> list[str]:
    """``overrides_among`` the words behind one run; a word that is none is refused."""
    overrides = overrides_among(words)
    for word in words:
        if word not in overrides:
            raise UserError(f"{word}: neither a layout key such as parallel.tensor=2 nor an option; name one run only")
    return overrides


def overrides_among(words: Sequence[str]) -> list[str]:
    """The `section.key=value` among ``words``. Raises UserError for one that changes the model."""
    overrides = [word for word in words if _OVERRIDE.fullmatch(word)]
    for override in overrides:
        if not override.startswith(_MAY_CHANGE):
            raise UserError(f"{override}: not allowed for a trained model; only {', '.join(_MAY_CHANGE)}… may change")
    return overrides


def check_ranks(config: RunConfig, world_size: int) -> None:
    """Refuse a number of ranks that does not fit the model's layout."""
    parallel = config.parallel
    inner = parallel.tensor * parallel.pipeline * parallel.sequence
    # Neither batches nor sequences are those of training: they fit any layout. But images have one length.
    batch = max(1, world_size // inner)
    sizes = {"global_batch_size": batch, "micro_batch_size": 1, "rampup_batch_size": []}
    update: dict[str, Any] = {
        "train": config.train.model_copy(update=sizes),
        # Of training steps, which have more micro-batches.
        "metrics": config.metrics.model_copy(update={"gradient_noise_every": 0}),
    }
    if config.model.patches is None:
        update["data"] = config.data.model_copy(update={"sequence_length": inner, "curriculum": []})
    else:
        check_lines(config)
    check_layout(config.model_copy(update=update), world_size)


def rank_words(args: argparse.Namespace, *, options: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """The arguments of a rank: those of a command with a run and overrides, but for the number of processes.

    Args:
        args: parsed.
        options: names of options by that of their value, where these differ.
    """
    words = [args.run, *args.overrides]
    for name, value in vars(args).items():
        if name in ("run", "overrides", "processes") or value is None or value is False:
            continue
        option = options.get(name, f"--{name.replace('_', '-')}")
        if value is True:
            words.append(option)
        else:
            # In one word: a value may begin with a hyphen.
            words += [f"{option}={one}" for one in (value if isinstance(value, list) else [value])]
    return words


def start_ranks(command: ModuleType, words: Sequence[str], *, config: RunConfig, processes: int) -> int:
    """Start ``processes`` ranks of ``command`` with ``words`` on this machine; returns their exit code.

    Args:
        command: module with ``NAME``, ``add_arguments``, ``run``, and ``preload``, which imports the modules of all
            ranks once.
        words: arguments of the command.
        config: configuration of the run, with the layout.
        processes: number of ranks.

    Raises:
        WrongUse: if a rank refuses.
    """
    from lightscale.launch.launcher.torchrun import ThisMachine  # noqa: PLC0415

    forks = not num_gpus(config)
    require_limits(Needs.of(None, local_ranks=processes, num_ranks=processes, on_gpu=not forks))
    if forks:
        command.preload()
    nodes = ThisMachine(functools.partial(_forked_rank, command)) if forks else ThisMachine()
    logs = Path(tempfile.mkdtemp(prefix=f"lightscale-{command.NAME}-"))
    print(f"starting {counted(processes, 'rank')}", file=sys.stderr, flush=True)
    launch = nodes.launch_ranks(
        [*_command_line(command), *words],
        processes=processes,
        logs=logs,
        hang_timeout_s=config.restart.hang_timeout_s,
        deadline_s=None,
    )
    failure = launch.failure
    if failure is None:
        shutil.rmtree(logs)
        return 0
    if failure.mistake_code is not None:
        shutil.rmtree(logs)
        raise WrongUse(failure.summary)
    if failure.traceback is not None and failure.limit is None:
        sys.stderr.write(failure.traceback)
    print(f"rank {failure.rank} failed: {failure.summary} (output of all ranks: {logs})", file=sys.stderr)
    return 1 if failure.limit is None else UserError.EXIT_CODE


def _command_line(command: ModuleType) -> list[str]:
    """Of a rank, before its arguments."""
    return [sys.executable, "-m", "lightscale", command.NAME]


def _forked_rank(command: ModuleType, words: Sequence[str]) -> int:
    """The command line of a rank, in a fork of the launcher."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    try:
        return int(command.run(parser.parse_args(words[len(_command_line(command)) :])))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.EXIT_CODE
