"""``lightscale plan --trace``: record a rank's calls to its GPU in a step, without a GPU.

``tools/twin.py`` of a clone records them; it needs the CUDA build of PyTorch, and prints how to fetch it.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.planning.plan import plan

_TOOL = Path(__file__).resolve().parents[3] / "tools/twin.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--trace`` and ``--rank``."""
    parser.add_argument(
        "--trace",
        action="store_true",
        help="run real steps of one rank on a simulated CUDA device that computes nothing, and count its launches, "
        "host waits, collectives with bytes, streams and peak memory (counted, not timed)",
    )
    parser.add_argument("--rank", type=int, metavar="R", help="rank for --trace (default: 0)")


def refuse_without_trace(args: argparse.Namespace) -> None:
    """Raise UserError for an option without effect."""
    if args.rank is not None:
        raise UserError("--rank requires --trace")


def run(args: argparse.Namespace) -> int:
    """Record the steps of ``args.rank``; the exit code tells whether they would fail on a GPU."""
    config = load(args.config, args.overrides)
    layout = plan(config, args.processes).layout
    rank = args.rank or 0
    if not 0 <= rank < layout.world_size:
        raise UserError(
            f"--rank {rank}: the run has ranks 0 to {layout.world_size - 1}; set their number with --processes"
        )
    if not _TOOL.exists():
        raise UserError(f"--trace needs tools/twin.py of a clone of lightscale: no file {_TOOL}")
    # A pipeline holds most when it is full; more micro-batches ask for the same again.
    micro_batches = min(layout.num_microbatches, max(2, layout.pipeline))
    options = ["--world", layout.world_size, "--rank", rank, "--micro-batches", micro_batches]
    command = [sys.executable, _TOOL, "null", args.config, *args.overrides, *options, *(["--json"] * args.json)]
    return subprocess.run([str(word) for word in command], check=False).returncode
