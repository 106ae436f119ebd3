"""What the process of a rank does around its work: it ends with its launcher, and leaves its errors to it."""

import faulthandler
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from lightscale.errors import UserError
from lightscale.training.signals import die_with_parent

EXIT_CRASHED = 1

# Process id of the launcher, for its ranks.
LAUNCHER_VARIABLE = "LIGHTSCALE_LAUNCHER"
# Where torchrun's agent looks for the error of a rank.
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def run_rank(work: Callable[[], int]) -> int:
    """Do `work`, whose result is the exit code. An exception goes to the launcher, which shows the first.

    Until `work` takes over the stop signals, they end the process. The end of the launcher ends it always.
    """
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is not None:
        die_with_parent(int(launcher))
    try:
        return work()
    except Exception as error:
        if not _record(error) or launcher is None:
            raise
        return UserError.EXIT_CODE if isinstance(error, UserError) else EXIT_CRASHED


def _record(error: Exception) -> bool:
    """Write `error` where the agent looks for it, in torchrun's form with more fields; whether it could."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return False
    now = time.time()
    extra = {
        "py_callstack": traceback.format_exc(),
        "timestamp": str(int(now)),
        # Whole seconds do not tell the rank that failed from those that lost it.
        "time_s": now,
        "user_error": isinstance(error, UserError),
    }
    summary = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    try:
        Path(path).write_text(json.dumps({"message": {"message": summary, "extraInfo": extra}}), "utf-8")
    except OSError:
        return False
    return True
