"""The `lightscale` command: imports the command's module, runs it, and turns errors into exit codes.

Only the chosen command's module is imported, so that `lightscale --help` does not wait for torch.
"""

import argparse
import errno
import importlib
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NoReturn

from lightscale import __version__
from lightscale.errors import UserError, printable, remedy_of_limit, shortened
from lightscale.output.streams import LogStream, open_missing_streams, spell_out_on_terminals

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
# Limits of an error message: longer ones quote a huge input.
_MOST_CHARACTERS, _MOST_LINES = 4000, 200
_WRONG_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command: its line in the help, and its module with `add_arguments(parser)` and `run(args) -> int`."""

    module: str
    help: str


COMMANDS: dict[str, Command] = {
    "config": Command(module="lightscale.config.commands.config", help="print a run's resolved configuration"),
    "configs": Command(module="lightscale.planning.commands.configs", help="list the shipped configurations"),
    "data": Command(module="lightscale.data_pipeline.commands.data", help="prepare and inspect token stores"),
    "train": Command(module="lightscale.launch.commands.train", help="train a model, or resume a run"),
    "submit": Command(module="lightscale.launch.commands.submit", help="start or resume a run as scheduler jobs"),
    "cancel": Command(module="lightscale.launch.commands.cancel", help="cancel the jobs of a run"),
    "logs": Command(module="lightscale.launch.commands.logs", help="show the output of a run"),
    "checkpoint": Command(
        module="lightscale.training.checkpoints.command",
        help="list, verify, show, compare and remove checkpoints",
    ),
    "runs": Command(module="lightscale.launch.commands.runs", help="list the runs of a folder and their goodput"),
    "doctor": Command(module="lightscale.launch.doctor.command", help="check machines and ranks before training"),
    "monitor": Command(
        module="lightscale.launch.commands.monitor", help="show training curves in the browser (TensorBoard)"
    ),
    "chaos": Command(
        module="lightscale.launch.chaos.command",
        help="test a run's recovery from kills, damage and failing disks",
    ),
    "plan": Command(
        module="lightscale.planning.commands.plan", help="predict parameters, FLOPs, memory, speed and goodput of a run"
    ),
    "evaluate": Command(
        module="lightscale.launch.commands.evaluate", help="evaluate models: perplexity and benchmarks"
    ),
    "study": Command(
        module="lightscale.study.commands.study",
        help="plan, run and monitor a set of training runs; fit scaling laws",
    ),
    "lr-find": Command(
        module="lightscale.study.commands.lr_find", help="train with a growing learning rate, and show the loss over it"
    ),
    "noise-scale": Command(
        module="lightscale.study.commands.noise_scale",
        help="show the gradient noise scale of a run, the critical size of its batches",
    ),
    "coordinate-check": Command(
        module="lightscale.training.coordinates.command",
        help="train a model at several widths, and judge the sizes of its activations",
    ),
    "compare": Command(
        module="lightscale.study.commands.compare",
        help="compare losses, configurations and scores of runs on a page",
    ),
    "predict": Command(
        module="lightscale.launch.commands.predict", help="fill masks, classify or embed documents with a model"
    ),
    "draw": Command(module="lightscale.launch.commands.draw", help="draw images with a diffusion transformer"),
    "resolutions": Command(
        module="lightscale.launch.commands.resolutions",
        help="measure accuracy, speed and memory of image classifiers over image sizes",
    ),
    "reference": Command(
        module="lightscale.launch.commands.reference",
        help="store the log-probabilities of a frozen reference, for preferences",
    ),
    "generate": Command(module="lightscale.launch.commands.generate", help="generate text with a model"),
    "chat": Command(module="lightscale.exchange.chat.command", help="talk with a model of conversations"),
    "export": Command(
        module="lightscale.exchange.export_command", help="export a checkpoint for Hugging Face transformers"
    ),
    "import": Command(
        module="lightscale.exchange.import_command", help="create a run from an exported model or a transformers LLaMA"
    ),
    "average": Command(
        module="lightscale.exchange.average_command",
        help="create a run from the mean of checkpoints or a kept average",
    ),
    "verify": Command(
        module="lightscale.exchange.verify_command",
        help="compare an export, run or token store with its hashes",
    ),
    "completion": Command(
        module="lightscale.completion.command", help="print a completion script for bash, zsh or fish"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `lightscale ARGV` and return the exit code.

    0: done. 78: an error that needs attention, in one message. 130: interrupted. 141: closed output pipe. Commands may
    add codes. Wrong usage and `--help` raise SystemExit (2 and 0), as argparse does.
    """
    open_missing_streams()
    spell_out_on_terminals()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except UserError as error:
        message = textwrap.indent(_readable(str(error)), " " * len("error: ")).lstrip()
        # In one write: ranks that share a terminal print at the same time. A closed stderr keeps the exit code.
        LogStream(sys.stderr).write(f"error: {message}\n")
        return error.EXIT_CODE
    except BrokenPipeError:
        # The reader of our output has ended (`lightscale … | head`). Python would fail once more when it flushes
        # stdout at exit, so stdout goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        # Limits of the system and missing permissions are met wherever files, memory or threads are used: they are no
        # bug.
        advice = remedy_of_limit(error)
        if advice is None and isinstance(error, OSError) and error.errno in _WRONG_PATH:
            advice = "use another path, or change its type or permissions"
        if advice is None:
            raise
        text = str(error) or type(error).__name__
        LogStream(sys.stderr).write(f"error: {_readable(text)}; {advice}\n")
        return UserError.EXIT_CODE
    except KeyboardInterrupt:
        LogStream(sys.stderr).write("interrupted\n")
        return EXIT_INTERRUPTED
    return code


def _readable(message: str) -> str:
    """`message` with its longest lines and any excess lines cut."""
    # An argument that is not UTF-8 has characters that a stream may refuse.
    text = printable(message.encode(errors="backslashreplace").decode())
    lines = [shortened(line, _MOST_CHARACTERS) for line in text.splitlines()]
    more = len(lines) - _MOST_LINES
    return "\n".join([*lines[:_MOST_LINES], f"and {more:,} more lines"] if more > 0 else lines)


class _Parser(argparse.ArgumentParser):
    """argparse's parser, with long arguments shortened in its errors (argparse quotes them in full)."""

    def error(self, message: str) -> NoReturn:
        super().error(_readable(message))


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in COMMANDS:
        overview = _overview()
        overview.parse_args(arguments or ["--help"])
        overview.error(f"the first argument must be a command: {', '.join(COMMANDS)}")
    name, *rest = arguments
    module, parser = load_command(name)
    # KEY=VALUE overrides may come before and after options; argparse supports that only without subcommands.
    parse = parser.parse_intermixed_args if parser._subparsers is None else parser.parse_args
    return int(module.run(parse(rest)))


def load_command(name: str) -> tuple[ModuleType, argparse.ArgumentParser]:
    """Import the module of a command in `COMMANDS`; returns it and the parser of its arguments."""
    module = importlib.import_module(COMMANDS[name].module)
    parser = _Parser(prog=f"lightscale {name}", description=COMMANDS[name].help)
    module.add_arguments(parser)
    return module, parser


def _overview() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lightscale",
        description="Train long-context language models with linear token mixing.",
        epilog="`lightscale COMMAND --help` shows a command's arguments.",
    )
    parser.add_argument("--version", action="version", version=f"lightscale {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help)
    return parser
