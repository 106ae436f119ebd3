"""``lightscale data listops``, ``mqar``, …: stores of made-up documents, a command for each generator."""

import argparse
import functools
import time
from typing import Any

from lightscale.config.arguments import path_argument
from lightscale.data_pipeline.commands.printed_report import show_store
from lightscale.data_pipeline.generators.interface import GENERATORS, generator_class
from lightscale.data_pipeline.generators.write import write_made_store
from lightscale.output.progress import progress_bars

_VALIDATION_SHARE = 50


def add_parsers(commands: Any) -> None:
    """Add the command of each generator to those of ``lightscale data``."""
    for name in GENERATORS:
        generator = generator_class(name)
        parser = commands.add_parser(name, help=generator.help)
        add = parser.add_argument
        add("--out", required=True, type=path_argument, metavar="STORE", help="the store to write; must not exist")
        add("--documents", type=int, required=True, metavar="N", help="training documents")
        validation = f"documents of the source {name}-validation (default: one for {_VALIDATION_SHARE} of the others)"
        add("--validation", type=int, metavar="N", help=validation)
        add("--seed", type=int, default=0, help="seed of all documents (default: %(default)s)")
        if generator.has_images:
            images = "write images, for models of images (default: a token for each pixel, for models of sequences)"
            add("--images", action="store_true", help=images)
        generator.add_arguments(parser)
        add("--json", action="store_true", help="print the report as JSON")
        parser.set_defaults(run_data=functools.partial(_make, name))


def _make(name: str, args: argparse.Namespace) -> int:
    started = time.monotonic()
    validation = -(-args.documents // _VALIDATION_SHARE) if args.validation is None else args.validation
    generator = generator_class(name).of(args)
    with progress_bars(counts="documents") as progress:
        report = write_made_store(
            args.out,
            name,
            generator,
            documents=args.documents,
            validation=validation,
            seed=args.seed,
            as_images=getattr(args, "images", False),
            progress=progress,
        )
    seconds = time.monotonic() - started
    if (console := show_store(args, report, seconds)) is not None:
        console.print(f"wrote {args.out} in {seconds:.1f} s")
    return 0
