"""``lightscale import``: create a run from a model of lightscale or transformers."""

import argparse
import sys
from pathlib import Path

from lightscale.config.arguments import RUNS, path_argument, run_argument
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.exchange.files.pipeline_folder import refuse_pipeline
from lightscale.runs.run_directory import RunDirectory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale import``."""
    add = parser.add_argument
    add("directory", type=path_argument, metavar="PATH", help="a directory with config.json, safetensors and tokenizer")
    text = "the new run: a directory, or NAME for runs/NAME; its checkpoint is RUN@0"
    add("--run", "--run-dir", type=run_argument, required=True, metavar="RUN", help=text)


def run(args: argparse.Namespace) -> int:
    """Write the run, and print on stderr how to use it."""
    target: Path = args.run if len(args.run.parts) > 1 else RUNS / args.run
    refuse_pipeline(args.directory)
    if not (args.directory / "config.json").is_file():
        raise UserError(f"{args.directory}: no model; expected config.json and files of tensors")
    # Behind the arguments, as it imports torch.
    from lightscale.exchange.imported import import_model  # noqa: PLC0415

    checkpoint = import_model(args.directory, target)
    task = load(RunDirectory(target).config).task.name
    files = "photos" if task == "classify-image" else "texts.jsonl"
    use = f"generate {target}" if task == "causal" else f"predict {target} --file {files}"
    print(f'{checkpoint}; train it with train.init_from = "{target}@0", or: lightscale {use}', file=sys.stderr)
    return 0
