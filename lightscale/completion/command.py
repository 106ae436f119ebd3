"""``lightscale completion``: print a shell script that completes commands, options, configurations, runs and keys."""

import argparse
import shlex
from collections.abc import Callable
from importlib.resources import files

from lightscale import __version__
from lightscale.completion.tables import make_tables


def _quote_for_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# The file in this folder with the part that a shell needs of its own, and how that shell quotes.
_SHELLS: dict[str, tuple[str, Callable[[str], str]]] = {
    "bash": ("bash.sh", shlex.quote),
    "zsh": ("zsh.sh", shlex.quote),
    "fish": ("fish.fish", _quote_for_fish),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale completion``."""
    parser.add_argument("shell", choices=_SHELLS, help="shell to complete in")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = """Write the script to the shell's folder of completions; repeat after an upgrade:

  lightscale completion bash > ~/.local/share/bash-completion/completions/lightscale
  lightscale completion zsh > ~/.zfunc/_lightscale      (a folder of fpath, before compinit)
  lightscale completion fish > ~/.config/fish/completions/lightscale.fish

For bash without the package bash-completion, source the file in ~/.bashrc."""


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(script(args.shell), end="")
    return 0


def script(shell: str) -> str:
    """The completion script for "bash", "zsh" or "fish"."""
    name, quote = _SHELLS[shell]
    engine = make_tables().function() + _text("complete.sh")
    return _text(name).replace("@VERSION@", __version__).replace("@SCRIPT@", quote(engine))


def _text(name: str) -> str:
    return (files("lightscale.completion") / name).read_text(encoding="utf-8")
