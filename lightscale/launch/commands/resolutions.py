"""``lightscale resolutions``: accuracy, speed and memory of image classifiers over image sizes."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lightscale.config.arguments import path_argument, run_path
from lightscale.data_pipeline.whole_files import whole_file
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import choose_run
from lightscale.evaluation.resolutions.request import ResolutionRequest, check_request
from lightscale.output.plot import check_plot_path
from lightscale.output.terminal import plain_console, plain_table
from lightscale.runs.run_directory import split_step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale resolutions``."""
    parser.description = (
        "Scales the validation images of a store to each size, and measures loss, top-1 and top-5 accuracy, images per "
        "second and the memory of a pass, on one process. Learned positions are interpolated; others are coordinates."
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN[@STEP]", help="directory of a run, or NAME for runs/NAME (default: the newest)")
    sizes = "sizes of the images in pixels, in multiples of a patch"
    add("--image-sizes", nargs="+", required=True, metavar="HEIGHTxWIDTH", help=sizes)
    add("--store", type=path_argument, metavar="PATH", help="store of images (default: that of the first run)")
    add("--source", metavar="NAME", help="source of the images (default: the first of the run's validation)")
    add("--images", type=int, metavar="N", help="number of images (default: all)")
    add("--batch-size", type=int, default=64, metavar="N", help="images per pass (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object per run and size")
    add("--out", type=path_argument, metavar="FILE", help="write JSON lines to a new file")
    add("--plot", type=path_argument, metavar="PATH", help="write a picture of the curves (.png, .svg, .pdf)")


def _asked(args: argparse.Namespace) -> ResolutionRequest:
    """What is to be done, found and checked without torch."""
    if args.plot is not None:
        check_plot_path(args.plot)
    if args.out is not None and (args.out.exists() or args.out.is_symlink()):
        raise UserError(f"--out {args.out}: the file exists; remove it or use another path")
    runs = []
    for given in args.runs:
        name, step = split_step(given)
        runs.append(choose_run(run_path(name), step=step, overrides=["train.device=auto"], any_task=True))
    return check_request(
        runs,
        args.image_sizes,
        store=args.store,
        source=args.source,
        num_images=args.images,
        batch_size=args.batch_size,
    )


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table or JSON lines as they come."""
    asked = _asked(args)
    # Behind the arguments, as it imports torch.
    from lightscale.evaluation.resolutions.measure import measured, of_runs  # noqa: PLC0415

    records = []
    for record in measured(asked):
        records.append(record)
        if args.json:
            print(json.dumps(record), flush=True)
        else:
            print(f"{record['run']}, {_size(record)}: measured", file=sys.stderr, flush=True)
    if not args.json:
        _print_table(records)
    if args.out is not None:
        with whole_file(args.out) as temporary:
            Path(temporary).write_text("".join(f"{json.dumps(one)}\n" for one in records), encoding="utf-8")
    if args.plot is not None:
        from lightscale.evaluation.resolutions.picture import draw  # noqa: PLC0415

        draw(args.plot, of_runs(records))
    return 0


def _size(record: dict[str, Any]) -> str:
    return "x".join(map(str, record["image_size"]))


def _print_table(records: list[dict[str, Any]]) -> None:
    table = plain_table(["run", "size"], ["tokens", "loss", "top-1", "top-5", "images/s", "memory"])
    for one in records:
        table.add_row(one["run"], _size(one), f"{one['tokens']:,}", *_numbers(one))
    plain_console(least_width=110).print(table)


def _numbers(record: dict[str, Any]) -> list[str]:
    if record.get("out_of_memory"):
        return ["", "", "", "", "out of memory"]
    speed, memory = record["images_per_s"], record["peak_memory_bytes"]
    return [
        f"{record['loss']:.4f}",
        f"{record['accuracy']:.2%}",
        f"{record['top5_accuracy']:.2%}",
        "" if speed is None else f"{speed:,.1f}",
        "" if memory is None else f"{memory / 2**20:,.1f} MiB",
    ]
