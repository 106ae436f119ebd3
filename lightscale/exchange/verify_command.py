"""``lightscale verify``: compare an export, the checkpoints of a run or a token store with their hashes."""

import argparse
import json
from pathlib import Path
from types import ModuleType

from lightscale.config.arguments import path_argument, run_path
from lightscale.data_pipeline.commands import data
from lightscale.errors import UserError, counted
from lightscale.exchange.files import checksums
from lightscale.output.progress import progress_bars
from lightscale.output.terminal import plain_console
from lightscale.runs.run_directory import split_step
from lightscale.training.checkpoints import command as checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale verify``."""
    text = "an export, a token store, or RUN[@STEP]: a run's directory, or NAME for runs/NAME"
    parser.add_argument("path", type=path_argument, metavar="PATH", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """0: whole. 1: a damaged checkpoint. 78: a damaged export or store, or a path that is none of them."""
    path: Path = args.path
    options = ["--json"] if args.json else []
    if (path / checksums.NAME).exists():
        return _verify_export(path, as_json=args.json)
    if (path / "zarr.json").is_file():
        return _delegate(data, ["verify", str(path), *options])
    if (run_path(split_step(str(path).removesuffix("-weights"))[0]) / "config.toml").is_file():
        return _delegate(checkpoint, ["verify", str(path), *options])
    if (path / "config.json").is_file():
        raise UserError(f"{path}: no {checksums.NAME}; only exports of `lightscale export` have hashes")
    raise UserError(f"{path}: expected an export with {checksums.NAME}, a token store or a run")


def _delegate(command: ModuleType, words: list[str]) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return int(command.run(parser.parse_args(words)))


def _verify_export(path: Path, *, as_json: bool) -> int:
    with progress_bars(is_kept=False) as progress:
        faults = checksums.checksum_faults(path, progress)
    if as_json:
        print(json.dumps({"export": str(path), "ok": not faults, "faults": faults}))
    else:
        console = plain_console(soft_wrap=True)
        for fault in faults:
            console.print(fault)
        console.print(f"{path}: {counted(len(faults), 'fault') if faults else 'whole'}")
    return UserError.EXIT_CODE if faults else 0
