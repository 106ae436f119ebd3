"""``lightscale plan --trace``: what a rank asks of its GPU in a step, recorded by running it where no GPU is needed.

The program that records is ``tools/twin.py`` of a clone; it needs the CUDA build of PyTorch, and says how to fetch it.
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
        help="run real steps of one rank on a device that computes nothing, and print what it is asked for: launches, "
        "host waits, collectives and their bytes, streams, peak memory. Counted, not timed",
    )
    parser.add_argument("--rank", type=int, metavar="R", help="the rank for --trace (default: 0)")


def refuse_without_trace(args: argparse.Namespace) -> None:
    """UserError for an option that would be without effect."""
    if args.rank is not None:
        raise UserError("--rank requires --trace")


def run(args: argparse.Namespace) -> int:
    """Record the steps of ``args.rank``; the exit code says whether anything would fail on a GPU."""
    config = load(args.config, args.overrides)
    layout = plan(config, args.processes).layout
    rank = args.rank or 0
    if not 0 <= rank < layout.world_size:
        raise UserError(f"--rank {rank}: the run has ranks 0 … {layout.world_size - 1}; --processes says how many")
    if not _TOOL.exists():
        raise UserError(f"--trace needs a clone of lightscale, for tools/twin.py: there is no {_TOOL}")
    # A pipeline holds most when it is full; more micro-batches ask for the same again.
    micro_batches = min(layout.num_microbatches, max(2, layout.pipeline))
    options = ["--world", layout.world_size, "--rank", rank, "--micro-batches", micro_batches]
    command = [sys.executable, _TOOL, "null", args.config, *args.overrides, *options, *(["--json"] * args.json)]
    return subprocess.run([str(word) for word in command], check=False).returncode
