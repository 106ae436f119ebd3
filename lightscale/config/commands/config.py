"""``lightscale config``: print a run's resolved configuration, or the meaning of every field."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from rich import box
from rich.table import Table

from lightscale.config.arguments import add_config, add_overrides, path_argument
from lightscale.config.commands.picture import draw
from lightscale.config.fields import FieldDescription, describe_fields
from lightscale.config.files import load, to_toml
from lightscale.errors import UserError
from lightscale.output.terminal import PlainConsole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale config``."""
    add_config(parser, nargs="?")
    add_overrides(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot",
        type=path_argument,
        metavar="PATH",
        help="draw learning rate, batch and sequence length over the tokens of the run (.png, .svg, .pdf)",
    )
    parser.add_argument("--describe", action="store_true", help="print all fields with type, default and meaning")


def run(args: argparse.Namespace) -> int:
    """Print the resolved configuration as TOML (or JSON), or the table of fields, or draw what is planned."""
    if args.describe:
        _describe(as_json=args.json)
        return 0
    if args.config is None:
        raise UserError("no CONFIG given; name a TOML file or a shipped run, or use --describe to list all fields")
    config = load(args.config, args.overrides)
    if args.plot is not None:
        draw(config, args.plot)
        print(json.dumps({"plot": str(args.plot)}) if args.json else args.plot)
        return 0
    print(json.dumps(config.model_dump(mode="json"), indent=2) if args.json else to_toml(config).rstrip())
    return 0


def _describe(*, as_json: bool) -> None:
    fields = describe_fields()
    if as_json:
        print(json.dumps([dataclasses.asdict(field) for field in fields], indent=2))
        return
    if not sys.stdout.isatty():
        _print_plain(fields)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("field", no_wrap=True)
    for heading in ("type", "default", "meaning"):
        table.add_column(heading, ratio=3 if heading == "meaning" else 1)
    for field in fields:
        table.add_row(field.key, field.type, field.default, field.description)
    PlainConsole(markup=False).print(table)


def _print_plain(fields: Sequence[FieldDescription]) -> None:
    """A line for each field, whole, in columns: for grep and other programs."""
    rows = [("field", "type", "default", "meaning")]
    rows += [(field.key, field.type, field.default, field.description) for field in fields]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for *cells, meaning in rows:
        print(*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), meaning, sep="  ")
