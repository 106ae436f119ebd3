"""``lightscale export``: export a checkpoint to a directory for transformers, fla or diffusers."""

import argparse
import re
import sys
import time

from lightscale.config.arguments import path_argument, run_path
from lightscale.errors import UserError, shortened
from lightscale.evaluation.chosen_run import ChosenRun, choose_run
from lightscale.exchange.formats import FORMATS, usual_format
from lightscale.files import size_text
from lightscale.runs.run_directory import split_step

_SIZE = re.compile(r"(?P<number>[0-9]{1,6}(\.[0-9]{1,3})?)(?P<unit>[KMG]?)B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale export``."""
    add = parser.add_argument
    add("run", metavar="RUN[@STEP]", help="the run's directory, or NAME for runs/NAME; a step (default: the newest)")
    add("--to", type=path_argument, required=True, metavar="PATH", help="the new directory to write")
    formats = (
        "classes that load the export; fla (flash-linear-attention) if they compute the same (default: transformers; "
        "diffusers for runs that draw images)"
    )
    add("--format", choices=tuple(FORMATS), help=formats)
    add("--ema", metavar="NAME", help="the average of that name in optimizer.ema, in place of the weights")
    dtypes = "number format of the weights (default: %(default)s); angles, decays and bounds stay fp32"
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16", help=dtypes)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--merge", action="store_true", help="put adapters into the weights, and export the whole model")
    how.add_argument("--adapter", action="store_true", help="export adapters alone, as files of PEFT")
    add("--base", metavar="NAME", help="path or name of the base's export, for --adapter (default: unset)")
    add(
        "--shard-size",
        type=size,
        default="5GB",
        metavar="SIZE",
        help="maximum size of a file, such as 500MB or 5GB (default)",
    )


def size(given: str) -> int:
    """Bytes of "500MB" or "5G", as argparse's ``type``; wrong usage for other texts, and below 1 MB."""
    match = _SIZE.fullmatch(given)
    found = int(float(match["number"]) * _UNITS[match["unit"].upper()]) if match else 0
    if found < 10**6:
        raise argparse.ArgumentTypeError(f"{shortened(given)!r}: use a size of at least 1MB, such as 500MB or 5GB")
    return found


def _check_adapters(args: argparse.Namespace, chosen: ChosenRun) -> None:
    """UserError unless the options say what becomes of adapters, and where they say it without any."""
    path = chosen.directory.path
    if chosen.config.adapters is None:
        if args.merge or args.adapter:
            raise UserError(f"--{'merge' if args.merge else 'adapter'}: {path} has no [adapter]; remove this option")
    elif not (args.merge or args.adapter):
        raise UserError(f"{path} has adapters; use --adapter for PEFT's files, or --merge for the whole model")
    wanted = args.format or usual_format(chosen.config.task.name == "diffusion")
    if args.adapter and wanted != "transformers":
        raise UserError(f"--adapter: PEFT's files are for --format transformers, not {wanted}; use --merge")
    if args.base is not None and not args.adapter:
        raise UserError(f"--base {args.base}: only the files of --adapter name their base; remove --base")


def run(args: argparse.Namespace) -> int:
    """Write the export, and print size and time on stderr."""
    name, step = split_step(args.run)
    chosen = choose_run(run_path(name), step=step, any_task=True)
    _check_adapters(args, chosen)
    # Behind the arguments, as it imports torch.
    from lightscale.exchange.export import export  # noqa: PLC0415

    began = time.perf_counter()
    done = export(
        chosen,
        args.to,
        dtype=args.dtype,
        shard_bytes=args.shard_size,
        format_name=args.format,
        adapters="alone" if args.adapter else "merge",
        base=args.base,
        average=args.ema,
    )
    for reason in done.refused:
        print(f"skipped a damaged checkpoint: {reason}", file=sys.stderr)
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    took = time.perf_counter() - began
    print(
        f"{done.directory}: {done.num_parameters:,} parameters, {size_text(done.num_bytes)} of {args.dtype} in "
        f"{took:.1f} s, from {done.checkpoint}",
        file=sys.stderr,
    )
    return 0
