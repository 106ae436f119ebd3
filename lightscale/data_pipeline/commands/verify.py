"""``lightscale data verify``: compare a store with the hashes of its data."""

import argparse
import json
from typing import Any

from lightscale.config.arguments import path_argument
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.errors import UserError, counted
from lightscale.output.progress import progress_bars
from lightscale.output.terminal import plain_console


def add_parser(commands: Any) -> None:
    """Add ``verify`` to the commands of ``lightscale data``."""
    parser = commands.add_parser("verify", help="read a whole token store and verify its hashes")
    parser.add_argument("store", type=path_argument, metavar="STORE")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run_data=_verify)


def _verify(args: argparse.Namespace) -> int:
    """0: the store is whole. 78: something is wrong, a line each."""
    with progress_bars() as progress:
        found = verify_store(args.store, progress)
    if args.json:
        result = {"store": str(args.store), "sources": found.sources, "shards": found.num_shards}
        print(json.dumps({**result, "bytes": found.num_bytes, "ok": not found.faults, "faults": found.faults}))
    else:
        console = plain_console(soft_wrap=True)
        for fault in found.faults:
            console.print(fault)
        verdict = counted(len(found.faults), "fault") if found.faults else "whole"
        console.print(f"{args.store}: {verdict}; {found.num_shards:,} shards, {found.num_bytes / 1e6:,.2f} MB read")
    return UserError.EXIT_CODE if found.faults else 0
