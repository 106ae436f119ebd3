"""``lightscale reference``: compute the log-probabilities of a frozen reference once, and store them."""

import argparse
import functools
import importlib
import sys
from types import ModuleType

from lightscale.config.arguments import OVERRIDE, path_argument
from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.store.reference import check_without_reference
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.launch.commands.checks import check_divides, check_inputs, num_processes
from lightscale.launch.commands.model_ranks import join, join_or_start, start_ranks
from lightscale.launch.environment import RankEnvironment
from lightscale.runs.run_directory import RunDirectory

NAME = "reference"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale reference``."""
    parser.description = (
        'Reads the configuration of a run with task.name = "preference", and writes a copy of its store that has the '
        "log-probabilities of the model in train.init_from beside the tokens. The run then has task.reference = "
        '"stored", this store, and no second model.'
    )
    add = parser.add_argument
    add("config", type=path_argument, metavar="CONFIG", help="configuration of the run: its data, model and layout")
    add("overrides", nargs="*", default=[], metavar=OVERRIDE, help="changes of the configuration, as of the run")
    add("--out", type=path_argument, required=True, metavar="STORE", help="the new store")
    add("--processes", type=int, metavar="N", help="ranks on this machine (default: one per GPU, or one)")


def run(args: argparse.Namespace) -> int:
    """Write the store. A rank (started by torchrun, srun or mpirun) joins the others; others start the ranks."""
    return join_or_start(functools.partial(_rank, args), functools.partial(_start, args))


def _asked(args: argparse.Namespace) -> RunConfig:
    """The configuration, checked without torch."""
    config = load(args.config, args.overrides)
    if config.task.name != "preference":
        raise UserError(
            f'{args.config}: task.name = "{config.task.name}" compares no answers; use task.name = "preference"'
        )
    if not (config.has_reference or config.stored_reference) or config.train.init_from is None:
        raise UserError(f'{args.config}: no reference: use task.loss = "dpo" or "ipo", and set train.init_from')
    # The reference that writes what the run will read.
    config = config.model_copy(update={"task": config.task.model_copy(update={"reference": "model"})})
    if config.data.curriculum:
        raise UserError("data.curriculum: log-probabilities are stored for sequences of one length; remove the stages")
    if config.data.store is None:
        raise UserError("data.stores: log-probabilities are written for one store at a time; name it in data.store")
    check_inputs(config, RunDirectory(args.out))
    check_without_reference(TokenStore(config.data.store), args.out)
    return config


def _start(args: argparse.Namespace) -> int:
    config = _asked(args)
    processes = num_processes(config, args.processes)
    check_divides(config, processes)
    print("loading PyTorch and Megatron …", file=sys.stderr, flush=True)
    if processes > 1:
        words = [str(args.config), *args.overrides, f"--out={args.out}"]
        return start_ranks(sys.modules[__name__], words, config=config, processes=processes)
    preload().write(config, args.out)
    return 0


def _rank(args: argparse.Namespace, environment: RankEnvironment) -> int:
    """The work of one rank."""
    join(environment)
    config = _asked(args)
    check_divides(config, environment.world_size)
    preload().write(config, args.out)
    return 0


def preload() -> ModuleType:
    """Import models and engine by name: it takes seconds, and mistakes are reported before."""
    return importlib.import_module("lightscale.evaluation.reference")
