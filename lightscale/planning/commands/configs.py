"""``lightscale configs``: list the shipped configurations, and the parts that files can extend."""

import argparse
import itertools
import json
from typing import Any

from rich.table import Table

from lightscale.config import shipped
from lightscale.config.files import load
from lightscale.models.accounting import parameter_terms
from lightscale.output.terminal import plain_console, plain_table

_MOST_COLUMNS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale configs``."""
    parser.description = (
        "Lists the shipped configurations for CONFIG (usable from any directory), the parts for `extends` in a file, "
        "and the studies."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the runs as a table, the parts by folder and the studies, or all as JSON."""
    runs = shipped_runs()
    if args.json:
        parts, studies = shipped.part_names(), shipped.study_names()
        print(
            json.dumps({"folder": str(shipped.FOLDER), "configs": runs, "extends": parts, "studies": studies}, indent=2)
        )
        return 0
    # As wide as the content and without line breaks, so that names can be copied and lines be searched.
    console = plain_console(least_width=_MOST_COLUMNS, soft_wrap=True)
    console.print(_table(runs))
    console.print("for `extends` in a file, in addition to the above:")
    for folder, names in shipped.part_names().items():
        console.print(f"  {folder + ':':<8} {' '.join(names)}")
    console.print(f"studies, for `lightscale study`: {' '.join(shipped.study_names())}")
    console.print(f"files: {shipped.FOLDER}; `lightscale config NAME` prints the resolved configuration")
    return 0


def shipped_runs() -> list[dict[str, Any]]:
    """The shipped runs, by architecture and size: name, architecture, parameters, tokens, sequence_length."""
    return sorted(map(_record, shipped.run_names()), key=lambda one: (one["architecture"], one["parameters"]))


def _record(name: str) -> dict[str, Any]:
    config = load(shipped.shipped_file(name))
    terms = parameter_terms(config.model)
    return {
        "name": name,
        "architecture": _architecture(config.model.layers),
        "parameters": sum(terms.values()),
        "tokens": config.total_tokens,
        "sequence_length": config.data.sequence_length,
    }


def _architecture(layers: tuple[str, ...]) -> str:
    """The mixers from the first layer on until they repeat, as `model.mixer` writes them: "tnl", "tnl*3 llama"."""
    period = next(num for num in range(1, len(layers) + 1) if layers[:num] * (len(layers) // num) == layers)
    repeats = [(mixer, len(list(group))) for mixer, group in itertools.groupby(layers[:period])]
    return " ".join(mixer if count == 1 else f"{mixer}*{count}" for mixer, count in repeats)


def _table(runs: list[dict[str, Any]]) -> Table:
    table = plain_table(("name", "architecture"), ("parameters", "tokens", "length"))
    for one in runs:
        numbers = (f"{one[key]:,}" for key in ("parameters", "tokens", "sequence_length"))
        table.add_row(one["name"], one["architecture"], *numbers)
    return table
