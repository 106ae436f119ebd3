"""``lightscale checkpoint``: list, verify, compare and remove the checkpoints of a run, in one process."""

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from lightscale.config.arguments import add_run, require_run, run_path
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.output.progress import progress_bars
from lightscale.output.terminal import plain_console
from lightscale.parallel.shards import Box
from lightscale.runs.followers import needed
from lightscale.runs.lock import RunLock
from lightscale.runs.run_directory import RunDirectory, split_step
from lightscale.training.checkpoints.directories import (
    WEIGHTS_PREFIX,
    CheckpointName,
    Contents,
    Retention,
    list_checkpoints,
    remove,
    steps_of,
)
from lightscale.training.checkpoints.exports import unexported
from lightscale.training.checkpoints.manifest import Manifest
from lightscale.training.checkpoints.reader import Headers, manifest_of, read_headers, verify
from lightscale.training.checkpoints.reading import DamagedCheckpoint

EXIT_DIFFERENT = 1
"""Something is damaged, or two checkpoints differ."""
_WEIGHTS_SUFFIX = "-weights"
_KINDS = (
    "A run continues from its full checkpoints. Weights-only checkpoints (checkpoint.keep_weights_every) are for "
    "evaluation; neither a run nor prune removes them."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale checkpoint``."""
    commands = parser.add_subparsers(dest="checkpoint_command", metavar="COMMAND", title="commands", required=True)

    def add(name: str, action: Callable[[argparse.Namespace], int], help_: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_, description=help_)
        command.set_defaults(run_checkpoint=action)
        command.epilog = _KINDS
        command.add_argument("--json", action="store_true", help="print one JSON object")
        return command

    one = "the run's directory, or RUN@STEP for a checkpoint; RUN@STEP-weights: the weights-only checkpoint"
    add_run(add("list", _list, "list the checkpoints of a run from their manifests, without reading tensors"))
    add("verify", _verify, "read every file and verify it against its manifest").add_argument(
        "run", metavar="RUN[@STEP]", help=one
    )
    add("show", _show, "print the manifest and the tensors of a checkpoint").add_argument(
        "run", metavar="RUN[@STEP]", help=f"{one} (default: the newest)"
    )
    diff = add("diff", _diff, "compare two checkpoints of any layouts, tensor by tensor")
    for name in ("first", "second"):
        diff.add_argument(name, metavar="RUN@STEP")
    prune = add("prune", _prune, "remove older full checkpoints after verifying the remaining ones")
    add_run(prune)
    prune.add_argument(
        "--keep", type=int, default=2, metavar="N", help=("number of newest intact checkpoints to keep (default: 2)")
    )
    prune.add_argument("--keep-every", type=int, metavar="K", help="also keep steps at multiples of K")
    prune.add_argument("--dry-run", action="store_true", help="only print the checkpoints to remove")


def run(args: argparse.Namespace) -> int:
    """Run the chosen command. 0: nothing wrong; 1: damaged, or different; ``UserError`` for a mistake."""
    chosen: Callable[[argparse.Namespace], int] = args.run_checkpoint
    return chosen(args)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Checkpoint:
    """One directory."""

    name: CheckpointName
    path: Path

    @property
    def step(self) -> int:
        return self.name.step

    def manifest(self) -> Manifest:
        return manifest_of(self.path, self.step)

    def damage(self) -> str | None:
        """Why it is not whole; every file is read."""
        try:
            verify(self.path, self.step)
        except DamagedCheckpoint as error:
            return str(error)
        return None

    def headers(self) -> Headers:
        """Of the files with tensors."""
        return read_headers(self.path, self.manifest())

    def tensors(self) -> dict[str, list[Box]]:
        """The boxes of every tensor."""
        found: dict[str, list[Box]] = {}
        for entry in itertools.chain(*self.headers().values()):
            found.setdefault(entry.box.key, []).append(entry.box)
        return dict(sorted(found.items()))


def _all_of(run: Path) -> list[_Checkpoint]:
    require_run(run)
    directory = RunDirectory(run)
    names = list_checkpoints(directory.checkpoints)
    if not names:
        raise UserError(f"{run} has no checkpoint yet")
    return [_Checkpoint(name=name, path=directory.checkpoints / name.directory) for name in names]


def _chosen(name: str) -> list[_Checkpoint]:
    """``RUN``, ``RUN@STEP`` or ``RUN@STEP-weights``, oldest first; of a step the full checkpoint first."""
    run, step = split_step(name.removesuffix(_WEIGHTS_SUFFIX) if "@" in name else name)
    every = _all_of(run_path(run))
    if step is None:
        return every
    wanted: tuple[Contents, ...] = ("weights",) if name.endswith(_WEIGHTS_SUFFIX) else ("full", "weights")
    found = [one for one in every if one.step == step and one.name.contents in wanted]
    if not found:
        has = steps_of(one.name for one in every)
        raise UserError(f"{run} has no checkpoint of step {name.rpartition('@')[2]}; it has: {has}")
    return found


def _list(args: argparse.Namespace) -> int:
    rows = [_summary(one) for one in _all_of(args.run)]
    if args.json:
        print(json.dumps({"run": str(args.run), "checkpoints": rows}))
    else:
        table = Table("step", "contents", "tokens", "size", "ranks", "layout", "written by", box=None, pad_edge=False)
        for row in rows:
            if "damage" in row:
                table.add_row(str(row["step"]), row["contents"], "", "", "", row["damage"], "")
                continue
            layout = " ".join(f"{axis} {size}" for axis, size in row["layout"].items() if size > 1) or "one rank"
            written = ", ".join(sorted(set(row["hosts"])))
            size = f"{row['num_bytes'] / 1e6:,.1f} MB"
            ranks = str(len(row["hosts"]))
            tokens = f"{row.get('tokens', 0):,}"
            table.add_row(f"{row['step']:,}", row["contents"], tokens, size, ranks, layout, written)
        plain_console().print(table)
    return EXIT_DIFFERENT if any("damage" in row for row in rows) else 0


def _summary(one: _Checkpoint) -> dict[str, Any]:
    try:
        manifest = one.manifest()
    except DamagedCheckpoint as error:
        return {"step": one.step, "contents": one.name.contents, "damage": str(error)}
    num_bytes = sum(record.num_bytes for record in manifest.files.values())
    more = {"contents": one.name.contents, "num_bytes": num_bytes, "files": len(manifest.files)}
    return {**manifest.facts, **more}


def _verify(args: argparse.Namespace) -> int:
    found, chosen = {}, _chosen(args.run)
    with progress_bars(counts="checkpoints", is_kept=False) as progress:
        for done, one in enumerate(chosen):
            progress("verifying", done, len(chosen))
            found[one.name] = one.damage()
    if args.json:
        print(json.dumps({"checkpoints": [{**name._asdict(), "damage": damage} for name, damage in found.items()]}))
    else:
        for name, damage in found.items():
            print(f"step {steps_of([name])}: {damage or 'intact'}")
    return EXIT_DIFFERENT if any(found.values()) else 0


def _show(args: argparse.Namespace) -> int:
    chosen = _chosen(args.run)
    # Of the newest step, the full one if it is there.
    one = next(each for each in chosen if each.step == chosen[-1].step)
    facts = one.manifest().facts
    boxes = one.tensors()
    if args.json:
        tensors = {key: {"shape": parts[0].shape, "boxes": len(parts)} for key, parts in boxes.items()}
        print(json.dumps({"checkpoint": str(one.path), **facts, "tensors": tensors}))
        return 0
    console = plain_console()
    console.print(str(one.path), soft_wrap=True)
    for key, value in facts.items():
        console.print(f"  {key}: {json.dumps(value)}", soft_wrap=True)
    table = Table("tensor", "shape", "boxes", box=None, pad_edge=False)
    for key, parts in boxes.items():
        table.add_row(key, " x ".join(map(str, parts[0].shape)), str(len(parts)))
    console.print(table)
    return 0


def _diff(args: argparse.Namespace) -> int:
    first, second = (_only(name) for name in (args.first, args.second))
    # By name: it imports torch, which no other command needs.
    compare = importlib.import_module("lightscale.training.checkpoints.differences").differences
    prefix = WEIGHTS_PREFIX if _compared(first, second) == "weights" else ""
    rows: list[dict[str, Any]] = list(compare((first.path, first.headers()), (second.path, second.headers()), prefix))
    facts = _differing_facts(first.manifest(), second.manifest())
    if args.json:
        print(json.dumps({"facts": facts, "tensors": rows}))
    else:
        console = plain_console()
        for key, (before, now) in facts.items():
            console.print(f"{key}: {json.dumps(before)} and {json.dumps(now)}", soft_wrap=True)
        table = Table("tensor", "largest difference", "RMSE / RMS of the first", box=None, pad_edge=False)
        for row in rows:
            table.add_row(row["tensor"], *(row["problem"], "") if "problem" in row else _figures(row))
        console.print(table if rows else f"all {_compared(first, second)} are bitwise equal")
    return EXIT_DIFFERENT if rows else 0


def _only(name: str) -> _Checkpoint:
    if "@" not in name:
        raise UserError(f'"{name}" must be RUN@STEP, like {name}@1000')
    one = _chosen(name)[0]
    # Damage would show as a difference, and say nothing about the two states.
    if (damage := one.damage()) is not None:
        raise UserError(damage)
    return one


def _figures(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['max_difference']:.3e}", f"{row['relative_rmse']:.3e}"


def _differing_facts(first: Manifest, second: Manifest) -> dict[str, tuple[Any, Any]]:
    # That of weights and of all is no difference between two states.
    keys = sorted({*first.facts, *second.facts} - {"manifest_xxh3_128", "contents"})
    return {key: (a, b) for key in keys if (a := first.facts.get(key)) != (b := second.facts.get(key))}


def _compared(first: _Checkpoint, second: _Checkpoint) -> str:
    """What of two checkpoints can be compared: everything, unless one of them has the weights alone."""
    return "weights" if "weights" in (first.name.contents, second.name.contents) else "tensors"


def _prune(args: argparse.Namespace) -> int:
    # At least two, as in a run (checkpoint.keep): the newest may be damaged later.
    for name, value, least in (("--keep", args.keep, 2), ("--keep-every", args.keep_every, 1)):
        if value is not None and value < least:
            raise UserError(f"{name} {value}: must be at least {least}")
    directory, retention = RunDirectory(args.run), Retention(keep=args.keep, keep_every=args.keep_every)
    # A missing run is not to be locked, which makes a directory in it.
    _all_of(args.run)
    # A job would save, count and remove checkpoints meanwhile, by what it has verified itself.
    with contextlib.nullcontext() if args.dry_run else RunLock(directory):
        good, old = _prune_held(directory, retention, dry_run=args.dry_run)
    if args.json:
        print(json.dumps({"good": sorted(good), "removed": old, "dry_run": args.dry_run}))
    elif len(good) < args.keep:
        print(f"nothing removed: only {len(good)} checkpoints are intact, and --keep is {args.keep}")
    else:
        verb = "would be removed" if args.dry_run else "removed"
        print(
            f"{verb}: {', '.join(map(str, old)) or 'none'}; newest intact checkpoints: "
            f"{', '.join(map(str, sorted(good)))}"
        )
    return 0


def _unexported(directory: RunDirectory, steps: Sequence[int]) -> set[int]:
    if not directory.config.exists():
        return set()
    config = load(directory.config)
    return unexported(directory, config.checkpoint.export_every, steps, after=config.parent_steps)


def _prune_held(directory: RunDirectory, retention: Retention, *, dry_run: bool) -> tuple[list[int], list[int]]:
    """(steps known to be whole, steps removed), of full checkpoints."""
    every = [one for one in _all_of(directory.path) if one.name.contents == "full"]
    good: list[int] = []
    for one in reversed(every):
        # From the newest on, and no more than needed: each one is read as a whole.
        if len(good) < retention.keep and one.damage() is None:
            good.append(one.step)
    old = retention.superseded([one.step for one in every], good)
    # What `lightscale evaluate --follow` has still to read, and what the run, resumed, has still to export.
    spared = needed(directory, old) | _unexported(directory, old)
    old = [step for step in old if step not in spared]
    if not dry_run:
        remove(directory.checkpoints, old)
    return good, old
