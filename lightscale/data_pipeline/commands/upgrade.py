"""``lightscale data upgrade``: bring a store of an earlier format to this one."""

import argparse
from typing import Any

from lightscale.config.arguments import path_argument
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.store.upgrade import upgrade_store
from lightscale.output.progress import progress_bars
from lightscale.output.terminal import plain_console


def add_parser(commands: Any) -> None:
    """Add ``upgrade`` to the commands of ``lightscale data``."""
    parser = commands.add_parser("upgrade", help="add block hashes to a token store of an earlier format")
    parser.add_argument("store", type=path_argument, metavar="STORE")
    parser.add_argument("--out", type=path_argument, metavar="NEW", help="upgrade a copy (default: the store itself)")
    parser.set_defaults(run_data=_upgrade)


def _upgrade(args: argparse.Namespace) -> int:
    """0: the store has this format; ``UserError`` where it is not whole or cannot be written, and then as it was."""
    with progress_bars() as progress:
        upgraded = upgrade_store(args.store, progress, out=args.out)
    store = TokenStore(args.out if upgraded and args.out else args.store)
    done = "upgraded to" if upgraded else "nothing to do: it is of"
    console = plain_console(soft_wrap=True)
    console.print(f"{store.path}: {done} format {store.format_version}; fingerprint {store.fingerprint()}")
    if upgraded:
        console.print("runs trained on it can continue with it; the origins of its documents are not stored")
    return 0
