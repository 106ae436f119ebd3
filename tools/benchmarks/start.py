"""What it costs to start a run: CPU time of the whole process tree of a run of one step, by the real command.

CPU time, and not time that passes: it is nearly the same on a machine that others use too.
"""

import argparse
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.turns import positive
from lightscale.errors import UserError

CONFIG = "configs/tnl-tiny.toml"
# The training itself must not count for much.
OVERRIDES = ("train.steps=1", "train.validate_every=0", "optimizer.warmup_steps=0")
VOCAB_SIZE = 4096


def run(ranks: int, *, repeats: int, store: Path | None) -> dict[str, Any]:
    """CPU seconds of each of ``repeats`` starts of ``ranks`` ranks, and of importing torch alone.

    Raises:
        UserError: a command failed; it has said why.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if store is None:
            store = folder / "store"
            arguments = f"data prepare --corpus stdlib --vocab-size {VOCAB_SIZE} --validation 0.02 --out"
            _cpu_s([sys.executable, "-m", "lightscale", *arguments.split(), str(store)])
        train = [sys.executable, "-m", "lightscale", "train", CONFIG, "--processes", str(ranks)]
        train += [f"parallel.sequence={ranks}", f"data.store={store}", *OVERRIDES]
        torch_s = [_cpu_s([sys.executable, "-c", "import torch"]) for _ in range(repeats)]
        start_s = [_cpu_s([*train, "--run", str(folder / f"run-{number}")]) for number in range(repeats)]
    return {
        "cpu_s": statistics.median(start_s),
        "samples_cpu_s": start_s,
        "torch_cpu_s": statistics.median(torch_s),
        "in_imports_of_torch": statistics.median(start_s) / statistics.median(torch_s),
    }


def _cpu_s(command: list[str]) -> float:
    """User and system time of a command and all that it starts."""
    before = _children_s()
    # The folders of the current directory are no packages. What it prints goes where progress goes.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    code = subprocess.run(command, check=False, env=environment, stdout=sys.stderr).returncode
    if code:
        raise UserError(f"`{shlex.join(command)}` failed with exit code {code}; see its output above")
    return _children_s() - before


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(figures: dict[str, Any]) -> Table:
    """For people."""
    made = Table()
    for name in ("CPU s of a start", "CPU s of `import torch`", "starts in imports of torch"):
        made.add_column(name, justify="right")
    made.add_row(f"{figures['cpu_s']:.2f}", f"{figures['torch_cpu_s']:.2f}", f"{figures['in_imports_of_torch']:.1f}")
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``bench.py start``."""
    parser.add_argument("--ranks", type=positive, default=2, help="ranks on this machine (default 2)")
    parser.add_argument("--store", type=Path, help="token store (default: one made of the Python standard library)")
