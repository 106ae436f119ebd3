"""Every command with its subcommands, usage, arguments and options, from the parsers that read them."""

import argparse
import os
from collections.abc import Iterator

from lightscale.cli import COMMANDS, load_command
from lightscale_site.markdown import block, directive, sentence

# Of a usage line; argparse reads it as it would a terminal's.
_WIDTH = "92"


def commands_text() -> str:
    """Of all commands, in the order of `lightscale --help`."""
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _WIDTH
    try:
        return "\n".join(text for name in COMMANDS for text in _command(load_command(name)[1], COMMANDS[name].help, 2))
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns


def _command(parser: argparse.ArgumentParser, summary: str, level: int) -> Iterator[str]:
    """A section for the command, then one for each below it."""
    yield f"{'#' * level} {parser.prog}\n"
    yield sentence(parser.description or summary)
    yield block(parser.format_usage().removeprefix("usage: "))
    yield directive("program", parser.prog, "")
    below: list[str] = []
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        options = [
            action for action in shown if not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction))
        ]
        if options and group.title not in ("positional arguments", "options"):
            yield f"**{sentence(group.title or '').strip().rstrip('.')}**\n"
            if group.description:
                yield sentence(group.description)
        for action in options:
            yield directive("option", _signature(parser, action), _meaning(parser, action))
        for action in shown:
            if isinstance(action, argparse._SubParsersAction):
                for listed in action._choices_actions:
                    below += _command(action.choices[listed.dest], listed.help or "", level + 1)
    if parser.epilog:
        is_raw = parser.formatter_class is argparse.RawDescriptionHelpFormatter
        yield block(parser.epilog) if is_raw else sentence(parser.epilog)
    yield from below


def _signature(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """As the help shows it: "--run RUN, --run-dir RUN"."""
    return parser._get_formatter()._format_action_invocation(action)


def _meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    if action.choices is not None and action.metavar is not None:
        text += f" (one of {', '.join(map(str, action.choices))})"
    given = action.default
    if given not in (None, False, argparse.SUPPRESS, [], ()) and "default" not in text:
        text += f" (default: {given})"
    return sentence(text)
