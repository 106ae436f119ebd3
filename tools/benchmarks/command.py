"""`lightscale` as a benchmark runs it."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import TextIO

from lightscale.errors import UserError


def run_lightscale(*arguments: str) -> None:
    """`lightscale ARGUMENTS` in a process of its own; `UserError` where it fails."""
    # What it prints goes where progress goes.
    _run(arguments, stdout=sys.stderr)


def lightscale_output(*arguments: str) -> str:
    """What `lightscale ARGUMENTS` prints; `UserError` where it fails."""
    return str(_run(arguments, stdout=subprocess.PIPE).stdout)


def _run(arguments: Sequence[str], *, stdout: int | TextIO) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightscale", *arguments]
    # The folders of the current directory are no packages.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    found = subprocess.run(command, check=False, env=environment, stdout=stdout, encoding="utf-8")
    if found.returncode:
        raise UserError(
            f"`{shlex.join(['lightscale', *arguments])}` failed with exit code {found.returncode}; see its output above"
        )
    return found
