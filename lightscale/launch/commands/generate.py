"""``lightscale generate``: continue texts with a trained model."""

import argparse
import functools
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Literal

from lightscale.config.arguments import OVERRIDE, path_argument, run_path
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import choose_run, longest_context
from lightscale.evaluation.generation.prompt_file import PromptText, read_prompts
from lightscale.evaluation.generation.request import GenerationRequest
from lightscale.evaluation.generation.sampling_arguments import add_sampling, sampling_of
from lightscale.evaluation.inference.prompts import check_generates
from lightscale.files import read_regular
from lightscale.launch.commands.checks import num_processes
from lightscale.launch.commands.model_ranks import (
    check_ranks,
    join,
    join_or_start,
    overrides_among_one,
    rank_words,
    start_ranks,
)
from lightscale.launch.environment import RankEnvironment
from lightscale.runs.run_directory import split_step

NAME = "generate"
_MOST_PROMPT_BYTES = 2**28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale generate``."""
    add = parser.add_argument
    add("run", metavar="RUN[@STEP]", help="directory of a run, or NAME for runs/NAME; step (default: the newest)")
    layout = "layout of the model over ranks, such as parallel.tensor=2 (default: a complete model on each rank)"
    add("overrides", nargs="*", default=[], metavar=OVERRIDE, help=layout)
    add("--prompt", metavar="TEXT", help="text to continue (default: none, the model starts a document)")
    add("--prompt-file", type=path_argument, metavar="FILE", help="file with the text to continue, UTF-8")
    prompts = 'file of texts to continue: JSON lines such as {"prompt": "def ", "tokens": 50}'
    add("--file", type=path_argument, metavar="FILE", help=prompts)
    add("--interactive", action="store_true", help="continue each line of stdin")
    add("--step", type=int, metavar="N", help="same as RUN@N")
    add("--tokens", type=int, default=200, metavar="N", help="most tokens to generate (default: %(default)s)")
    add_sampling(parser)
    add("--stop", action="append", default=[], metavar="TEXT",
        help="stop before this text; repeatable")  # fmt: skip
    add(
        "--batch",
        type=int,
        default=32,
        metavar="N",
        help="texts of --file per batch (default: %(default)s)",
    )
    add("--context", type=int, metavar="N", help="longest prompt, in tokens (default: no limit for linear mixers; the "
        "longest training sequence for models with softmax attention)")  # fmt: skip
    add("--processes", type=int, metavar="N", help="ranks on this machine (default: as many as the layout needs)")
    add("--store", type=path_argument, metavar="PATH", help="token store with the tokenizer (default: the run's)")
    add("--json", action="store_true", help="print each text as one line of JSON, with its tokens")


def run(args: argparse.Namespace) -> int:
    """Generate. A rank (started by torchrun, srun or mpirun) joins the others; any other process starts the ranks."""
    return join_or_start(functools.partial(_rank, args), functools.partial(_start, args))


def _asked(args: argparse.Namespace) -> GenerationRequest:
    """What is to be done, found and checked without torch."""
    for name, value in (("tokens", args.tokens), ("batch", args.batch), ("context", args.context)):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    if not all(args.stop):
        raise UserError("--stop '': must have at least one character")
    sampling = sampling_of(args)
    default = PromptText(text="", max_tokens=args.tokens, stop=tuple(args.stop), sampling=sampling)
    overrides = overrides_among_one(args.overrides)
    kind, prompts = _prompts(args, default)
    directory, step = _run_and_step(args)
    # On whatever device there is, as a run of GPUs is looked at on any machine.
    chosen = choose_run(directory, step=step, store=args.store, overrides=["train.device=auto", *overrides])
    check_generates(chosen.config.parallel.pipeline, chosen.config.parallel.sequence)
    asked = GenerationRequest(
        chosen=chosen,
        prompts=prompts,
        kind=kind,
        context=args.context or longest_context(chosen.config),
        batch=args.batch,
        as_json=args.json,
    )
    for prompt in prompts:
        asked.check(prompt)
    return asked


def _start(args: argparse.Namespace) -> int:
    asked = _asked(args)
    config = asked.chosen.config
    processes = num_processes(config, args.processes or config.parallel.tensor)
    _check_ranks(asked, processes)
    if asked.goes_beyond:
        print(f"texts longer than {asked.context:,} tokens exceed the training sequences", file=sys.stderr)
    print("loading PyTorch and Megatron …", file=sys.stderr, flush=True)
    if processes > 1:
        return start_ranks(sys.modules[__name__], rank_words(args), config=config, processes=processes)
    preload().write(asked)
    return 0


def _check_ranks(asked: GenerationRequest, world_size: int) -> None:
    check_ranks(asked.chosen.config, world_size)
    if asked.kind == "lines" and world_size > 1:
        raise UserError(f"--interactive: needs one process, not {world_size}; use --file")


def _rank(args: argparse.Namespace, environment: RankEnvironment) -> int:
    """The work of one rank."""
    join(environment)
    asked = _asked(args)
    _check_ranks(asked, environment.world_size)
    preload().write(asked)
    return 0


def preload() -> ModuleType:
    """Import models and engine by name: it takes seconds, and mistakes are reported before."""
    return importlib.import_module("lightscale.evaluation.generation.generate")


def _run_and_step(args: argparse.Namespace) -> tuple[Path, int | None]:
    """The run's directory, and the step; none: of the newest checkpoint."""
    run, step = split_step(args.run)
    if step is not None and args.step not in (None, step):
        raise UserError(f"{args.run} and --step {args.step} both set the step; use only one of them")
    return run_path(run), args.step if step is None else step


def _prompts(args: argparse.Namespace, default: PromptText) -> tuple[Literal["one", "file", "lines"], list[PromptText]]:
    """The kind of what is asked for, and the prompts."""
    sources = {
        "--prompt": args.prompt is not None,
        "--prompt-file": args.prompt_file is not None,
        "--file": args.file is not None,
        "--interactive": args.interactive,
    }
    given = [name for name, is_given in sources.items() if is_given]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} both set the text to continue; use only one of them")
    match given:
        case ["--file"]:
            return "file", read_prompts(args.file, default)
        case ["--interactive"]:
            return "lines", [default]
        case ["--prompt"]:
            text, origin = args.prompt, "--prompt"
        case ["--prompt-file"]:
            text, origin = _read_text(args.prompt_file), f"--prompt-file {args.prompt_file}"
        case _:
            return "one", [default]
    if not text:
        raise UserError(f"{origin}: empty; omit the option to start a document")
    return "one", [replace(default, text=text, origin=origin)]


def _read_text(path: Path) -> str:
    try:
        return read_regular(path, what="a prompt", most_bytes=_MOST_PROMPT_BYTES, follow_links=True).decode()
    except OSError as error:
        raise UserError(f"--prompt-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt-file {path}: not valid UTF-8 at byte {error.start}") from error
