"""``lightscale study``: sets of runs, and scaling laws fitted to them."""

import argparse

from lightscale.study.commands import fit, plan, report, run_cells, search, status

_COMMANDS = {
    "plan": (plan, "show cells, parameters, FLOPs, tokens, kept bytes and hours of a study"),
    "run": (run_cells, "train the cells of a study, or continue it"),
    "status": (status, "show the progress of a study's cells"),
    "search": (search, "show the trials of a study's search, and its best values"),
    "fit": (fit, "fit scaling laws to a study, or to points in a file"),
    "report": (report, "write a study's report as one HTML file"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale study``."""
    commands = parser.add_subparsers(dest="study_command", metavar="COMMAND", title="commands", required=True)
    for name, (module, text) in _COMMANDS.items():
        description = f"{text[0].upper()}{text[1:]}."
        module.add_arguments(commands.add_parser(name, help=text, description=description))


def run(args: argparse.Namespace) -> int:
    """Run the chosen command. Raises ``UserError`` for a mistake."""
    module, _ = _COMMANDS[args.study_command]
    return int(module.run(args))
