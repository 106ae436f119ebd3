"""`lightscale` as a benchmark runs it."""

import os
import shlex
import subprocess
import sys

from lightscale.errors import UserError


def run_lightscale(*arguments: str) -> None:
    """`lightscale ARGUMENTS` in a process of its own; `UserError` where it fails."""
    command = [sys.executable, "-m", "lightscale", *arguments]
    # The folders of the current directory are no packages. What they print goes where progress goes.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    code = subprocess.run(command, check=False, env=environment, stdout=sys.stderr).returncode
    if code:
        raise UserError(
            f"`{shlex.join(['lightscale', *arguments])}` failed with exit code {code}; see its output above"
        )
