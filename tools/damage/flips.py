#!/usr/bin/env python
"""Bits flipped at rest, one at a time, in a store, an export and a run: each noticed, or harmless, or in neither class.

    python tools/damage/flips.py --count 2000 --seed 1 --out benchmarks/flips.json

A flip is noticed if verification or opening refuses the files, harmless if what is opened is equal nevertheless.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightscale import cli
from lightscale.config.files import load
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.data_pipeline.tokenizers import load_tokenizer
from lightscale.errors import UserError
from lightscale.exchange.files import checksums
from lightscale.records import read_records
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.reader import verify

_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
STEPS = 2
RUN = f"""
extends = ["{_CONFIGS}/arch/tnl.toml", "{_CONFIGS}/size/tiny.toml"]
[model]
vocab_size = 320
num_layers = 1
hidden_size = 32
num_heads = 2
intermediate_size = 32
[data]
store = "store"
sequence_length = 64
[train]
steps = {STEPS}
global_batch_size = 2
[checkpoint]
every = {STEPS}
[optimizer]
lr = 1e-3
warmup_steps = 0
[metrics]
sinks = ["jsonl"]
"""
NOTICED, HARMLESS, UNNOTICED = "noticed", "harmless", "unnoticed"


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """Files, and how they are opened."""

    name: str
    files: tuple[Path, ...]
    opened: Callable[[], Any]
    """Verify and open them. Raises UserError or another exception where anything is wrong."""


def make_store(folder: Path) -> Artifact:
    """A token store of two sources in ``folder``/store."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=5)) for _ in range(50)]
    lines = [json.dumps({"text": " ".join(generator.choices(words, k=80)), "id": str(one)}) for one in range(40)]
    (folder / "words.jsonl").write_text("\n".join(lines))
    out = folder / "store"
    _command("data", "prepare", str(folder / "words.jsonl"), "--out", str(out), "--vocab-size", "320")

    def opened() -> Any:
        _refuse(verify_store(out, _no_progress).faults)
        store = TokenStore(out)
        sources = {}
        for name in sorted(store.sources):
            source = store.source(name)
            tokens = source.read(0, source.num_tokens).tolist()
            ends = source.document_ends(0, source.num_documents).tolist()
            sources[name] = (tokens, ends, source.origin(0))
        return sources, store.training_weights(), store.fingerprint()

    return Artifact(name="store", files=_files(out), opened=opened)


def make_run(folder: Path) -> list[Artifact]:
    """A run of a few steps on the store in ``folder``, as its checkpoint and its records; and an export."""
    (folder / "run.toml").write_text(RUN)
    with contextlib.chdir(folder):
        _command("train", "run.toml", "--run", "runs/a", "--processes", "1")
        _command("export", "runs/a", "--to", "exported")
    run = RunDirectory(folder / "runs/a")
    (checkpoint,) = sorted(run.checkpoints.glob("step-*"))

    def weights() -> Any:
        manifest = verify(checkpoint, STEPS)
        return manifest.facts, {name: (checkpoint / name).read_bytes() for name in manifest.files}

    config, tokenizer = load(run.config), verify(checkpoint, STEPS).facts["tokenizer"]

    def records() -> Any:
        # As resuming, evaluating and `lightscale runs` do.
        # What a resume may change is recorded in the event configuration_changed.
        _refuse([str(change) for change in run.changes(config)])
        if load_tokenizer(run.path).sha256 != tokenizer:
            raise UserError(f"{run.tokenizer}: not the tokenizer of {checkpoint}")
        if (fault := run.status_fault()) is not None:
            raise UserError(fault)
        lines = []
        for path in (run.metrics, run.events):
            read = read_records(path)
            _refuse([read.first_damage] if read.first_damage else [])
            lines.append(read.lines)
        return load(run.config), run.read_status(), lines

    export = folder / "exported"

    def exported() -> Any:
        _refuse(checksums.checksum_faults(export, _no_progress))
        return {path: path.read_bytes() for path in _files(export) if path.name not in (checksums.NAME, "README.md")}

    record_files = (run.config, run.status, run.metrics, run.events, *_files(run.tokenizer))
    return [
        Artifact(name="checkpoint", files=_files(checkpoint), opened=weights),
        Artifact(name="run", files=record_files, opened=records),
        Artifact(name="export", files=_files(export), opened=exported),
    ]


def flips(artifact: Artifact, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Flip ``count`` bits one at a time, each file as often as any other, and put each back."""
    generator = random.Random(f"{artifact.name} {seed}")
    files = [path for path in artifact.files if path.stat().st_size]
    whole = artifact.opened()
    for _ in range(count):
        path = generator.choice(files)
        before = path.read_bytes()
        at, bit = generator.randrange(len(before)), generator.randrange(8)
        damaged = bytearray(before)
        damaged[at] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            yield {"artifact": artifact.name, "file": path.name, "byte": at, "bit": bit, **_outcome(artifact, whole)}
        finally:
            path.write_bytes(before)


def _outcome(artifact: Artifact, whole: Any) -> dict[str, str]:
    try:
        return {"outcome": HARMLESS if artifact.opened() == whole else UNNOTICED}
    except UserError:
        return {"outcome": NOTICED}
    except Exception as error:  # noqa: BLE001 - of a reader without a message of its own
        return {"outcome": NOTICED, "error": type(error).__name__}


def table(found: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """The outcomes by artifact and file."""
    counts: dict[str, Counter[str]] = {}
    for one in found:
        counts.setdefault(f"{one['artifact']}/{one['file']}", Counter())[one["outcome"]] += 1
    return {name: dict(sorted(outcomes.items())) for name, outcomes in sorted(counts.items())}


def _files(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(path for path in folder.rglob("*") if path.is_file()))


def _refuse(faults: list[str]) -> None:
    if faults:
        raise UserError(faults[0])


def _no_progress(step: str, done: int, total: int) -> None:
    pass


def _command(*words: str) -> None:
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
        code = cli.main(words)
    if code:
        raise SystemExit(f"lightscale {' '.join(words)}: exit code {code}")


def main() -> int:
    """Flip, print the outcomes by file, and write them to --out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=2000, help="number of flips (default: 2000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the table and each flip that was not noticed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lightscale-flips-") as name:
        artifacts = [make_store(Path(name)), *make_run(Path(name))]
        share = -(-args.count // len(artifacts))
        found = [one for artifact in artifacts for one in flips(artifact, share, args.seed)]
    counts = table(found)
    for file, outcomes in counts.items():
        print(f"{file:44} {outcomes}")
    if args.out is not None:
        rest = [one for one in found if one["outcome"] != NOTICED]
        result = {"seed": args.seed, "flips": len(found), "by_file": counts, "not_noticed": rest}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
