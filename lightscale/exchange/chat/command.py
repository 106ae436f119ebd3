"""``lightscale chat``: talk with a model, a line a message."""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from lightscale.config.arguments import require_run, run_path
from lightscale.config.files import load
from lightscale.config.tasks import task_class
from lightscale.data_pipeline.chat.files import find_template
from lightscale.data_pipeline.chat.named import NAMED
from lightscale.data_pipeline.chat.prepared import Chat
from lightscale.data_pipeline.chat.recorded import kept_template
from lightscale.errors import UserError
from lightscale.evaluation.generation.sampling_arguments import add_sampling, sampling_of
from lightscale.exchange.chat.terminal import Talk, talk
from lightscale.runs.run_directory import RunDirectory, split_step

_MODEL = "config.json"
"""What makes a directory an export."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale chat``."""
    add = parser.add_argument
    run = "directory of a run, or NAME for runs/NAME; step (default: the newest); or directory of an export"
    add("run", metavar="RUN[@STEP]", help=run)
    add("--system", metavar="TEXT", help="message of the system, before the conversation (default: none)")
    template = f"chat template: {', '.join(NAMED)}, or a file (default: the template of the training)"
    add("--template", metavar="NAME|FILE", help=template)
    add("--tokens", type=int, default=512, metavar="N", help="most tokens of an answer (default: %(default)s)")
    add_sampling(parser)
    context = (
        "most tokens of the conversation (default: no limit for linear mixers; the longest training sequence for "
        "models with softmax attention)"
    )
    add("--context", type=int, metavar="N", help=context)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device of the model (default: %(default)s)")
    add("--json", action="store_true", help="print each answer as one line of JSON")


def run(args: argparse.Namespace) -> int:
    """Talk until stdin ends, or ``/quit``."""
    for name, value in (("tokens", args.tokens), ("context", args.context)):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    sampling = sampling_of(args)
    template = _template(args)
    print("loading PyTorch …", file=sys.stderr, flush=True)
    # By name: it takes seconds, and mistakes are reported before.
    library: Any = importlib.import_module("lightscale.exchange.library")
    model = library.load(args.run, device=args.device)
    for reason in model.refused:
        print(f"skipped a damaged checkpoint: {reason}", file=sys.stderr)
    session = model.chat(args.system, template=template, context=args.context)
    how = Talk(
        tokens=args.tokens,
        sampling=sampling,
        as_json=args.json,
        origin=model.origin,
        is_terminal=sys.stdin.isatty(),
    )
    talk(session, how)
    return 0


def _template(args: argparse.Namespace) -> Chat:
    """The chat template, found and checked without torch, as the model's task."""
    directory = _directory(args.run)
    if args.template is not None:
        chat = Chat(files=find_template(args.template, None, key="--template"))
    elif (kept := kept_template(directory)) is not None:
        chat = kept
    else:
        raise UserError(
            f"{directory}: no chat template: the model was not trained on a store of conversations; use --template "
            f"{next(iter(NAMED))} or a file's path, or `lightscale generate` to continue texts"
        )
    chat.check()
    return chat


def _directory(given: str) -> Path:
    """Of a run whose model writes text, or of an export. Raises ``UserError``."""
    path = Path(given)
    if (path / _MODEL).is_file() and not (path / "config.toml").exists():
        return path
    run = RunDirectory(run_path(split_step(given)[0]))
    require_run(run.path)
    task = load(run.config).task.name
    if not task_class(task).writes_text:
        raise UserError(
            f'{run.path}: its task.name = "{task}": only models that predict the next token answer; use `lightscale '
            "predict` for this model"
        )
    return run.path
