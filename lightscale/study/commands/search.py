"""``lightscale study search``: show the trials of a study's search, and its best values."""

import argparse
import json

from lightscale.config.arguments import path_argument
from lightscale.errors import UserError
from lightscale.output.plot import DOTS_PER_INCH, check_plot_path
from lightscale.output.terminal import plain_console, plain_table
from lightscale.study.commands.arguments import add_study, the_study
from lightscale.study.commands.needing import needing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    add_study(parser)
    parser.add_argument("--plot", type=path_argument, metavar="PATH", help="draw loss over value (.png, .svg, .pdf)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print a table for each group, with the lowest point at each rung."""
    study = the_study(args)
    search = study.definition.search
    if search is None:
        raise UserError(f"{study.definition.path}: no table [search]; use `lightscale study fit` or `study report`")
    if args.plot is not None:
        check_plot_path(args.plot)
    study.require()
    groups = needing("lightscale.study.search_results").search_results(study)
    if args.plot is not None:
        drawn = [group for group in groups if group.key is not None]
        if not drawn:
            raise UserError("--plot: needs optimizer.lr, or one parameter alone, with values above 0")
        figure = needing("lightscale.study.report.search").search_figure(drawn, search.metric)
        figure.savefig(args.plot, dpi=DOTS_PER_INCH)
    if args.json:
        record = {"study": str(study.path), "method": search.method, "metric": search.metric}
        print(json.dumps({**record, "groups": [group.record() for group in groups]}))
        return 0
    report, console = needing("lightscale.study.report.search"), plain_console(least_width=110)
    for group in groups:
        table = plain_table(["trial"], [*search.parameters, "step", "loss"], has_notes=True, title=group.name)
        for one in group.trials:
            table.add_row(*report.trial_row(one))
        console.print(table)
        for line in report.optimum_lines(group):
            console.print(line)
    console.print(report.INTERVALS)
    return 0
