"""The only reader of checkpoints: any difference from the format that lightscale writes is ``DamagedCheckpoint``.

    manifest_of      MANIFEST.json, and a directory, no link, of the files that it, its layout and its name ask for
    check_files      every file is a regular one of its size and hash; random states have the generators' form
    check_contents   the state agrees with the manifest; the boxes of all files together are whole tensors

Hashes find damage and accidents. Whoever crafts a checkpoint also writes its hashes, so that all that a reader relies
on is checked as well, and before any weight changes. Without torch.
"""

import heapq
import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightscale.files import kind
from lightscale.parallel.optimizer_spec import AVERAGE, WHOLE
from lightscale.parallel.shards import Shape, fault_of_cover
from lightscale.training.checkpoints import header, schema
from lightscale.training.checkpoints.directories import (
    STATE,
    TENSORS,
    WEIGHTS_PREFIX,
    Contents,
    directory_name,
    rank_stem,
)
from lightscale.training.checkpoints.manifest import NAME, Manifest, read_manifest, verify_files
from lightscale.training.checkpoints.reading import DamagedCheckpoint, read_json, shown
from lightscale.training.checkpoints.schema import checked

if TYPE_CHECKING:
    # It imports torch; checkpoints are listed and verified without.
    from lightscale.parallel.agreement import Agreement

# The guard's two windows and the ranges that were skipped; a rank's is 25 kB.
MOST_STATE_BYTES, _MOST_RANK_BYTES = 1 << 23, 1 << 18
# Weights and moments are fp32; but an engine that only evaluates has weights of its own precision.
_TRAINED = ("F32",)
# Moments may be kept in bf16.
_STATE = ("F32", "BF16")
_WEIGHTS_ALONE = ("F32", "BF16")

_HOLDS: dict[Contents, str] = {
    "full": "holds a full checkpoint",
    "weights": "holds only weights, without optimizer moments and random states",
}

Headers = Mapping[str, list[header.Entry]]
"""The boxes in each file of tensors, by its name."""


def contents_of(manifest: Manifest) -> Contents:
    """The content of a checkpoint."""
    # Manifests from before there were others do not say what is in a full checkpoint.
    contents: Contents = manifest.facts.get("contents", "full")
    return contents


def manifest_of(path: Path, step: int) -> Manifest:
    """The manifest of the checkpoint ``path``. Raises ``DamagedCheckpoint`` if it is missing or has another name."""
    if path.is_symlink():
        raise DamagedCheckpoint(f"{path}: a symbolic link; use a real directory")
    manifest = read_manifest(path)
    facts = checked(schema.Facts, dict(manifest.facts), path / NAME)
    if facts.step != step:
        raise DamagedCheckpoint(f"{path / NAME}: expected step {step}, found {facts.step}")
    if path.name != directory_name(step, facts.contents):
        raise DamagedCheckpoint(
            f"{path / NAME}: {_HOLDS[facts.contents]}; its name is {directory_name(step, facts.contents)}"
        )
    _check_names(path, manifest, {STATE, *_rank_files(len(facts.hosts), facts.contents)})
    return manifest


def _rank_files(num_ranks: int, contents: Contents) -> Iterable[str]:
    suffixes = (TENSORS, ".json") if contents == "full" else (TENSORS,)
    return (f"{rank_stem(rank)}{suffix}" for rank in range(num_ranks) for suffix in suffixes)


def _check_names(path: Path, manifest: Manifest, expected: Collection[str]) -> None:
    """Refuse a directory whose files are not those of its manifest, or this not those that are ``expected``."""
    for name in sorted(manifest.files.keys() ^ expected):
        what, num_ranks = "has no" if name in expected else "has a", len(manifest.facts["hosts"])
        raise DamagedCheckpoint(f"{path / NAME}: {what} {name}, but the layout has {num_ranks} ranks")
    for name, record in manifest.files.items():
        if record.num_bytes > _most_bytes(name):
            raise DamagedCheckpoint(
                f"{path / NAME}: {name} has {record.num_bytes} bytes; at most {_most_bytes(name)} are possible"
            )
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name != NAME and entry.name not in expected:
                raise DamagedCheckpoint(f"{path}: has {shown(entry.name)}, which is not in its manifest")
            if not entry.is_file(follow_symlinks=False):
                what = kind(entry.stat(follow_symlinks=False).st_mode)
                raise DamagedCheckpoint(f"{path / entry.name}: {what}; a file of a checkpoint is a regular file")


def verify_together(path: Path, step: int, ranks: "Agreement") -> Manifest:
    """The manifest of the checkpoint ``path``, each of ``ranks`` having read and hashed its share of the files.

    Raises ``DamagedCheckpoint`` on all of them where it is not whole, or not that of ``step``.
    """

    def own_share() -> Manifest:
        manifest = manifest_of(path, step)
        sizes = {name: record.num_bytes for name, record in manifest.files.items()}
        check_files(path, manifest, shares_by_size(sizes, ranks.size)[ranks.rank])
        return manifest

    manifest = ranks.on_all(own_share)[0]
    # One rank for all: it reads the headers only.
    ranks.on_first(lambda: check_contents(path, manifest))
    return manifest


def verify(path: Path, step: int) -> Manifest:
    """As ``verify_together``, by this process alone."""
    manifest = manifest_of(path, step)
    check_files(path, manifest, sorted(manifest.files))
    check_contents(path, manifest)
    return manifest


def shares_by_size(sizes: Mapping[str, int], num_shares: int) -> list[list[str]]:
    """The names of ``sizes`` dealt into shares of about as many bytes; the same on every rank.

    From the largest on, each to the share that has least: no share has more than the fair one and one file.
    """
    shares: list[list[str]] = [[] for _ in range(num_shares)]
    # (bytes, share): of equals the first.
    loads = [(0, number) for number in range(num_shares)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, number = heapq.heappop(loads)
        shares[number].append(name)
        heapq.heappush(loads, (load + sizes[name], number))
    return shares


def _most_bytes(name: str) -> float:
    """Of the file ``name``, so that not even its hash is computed for ever; tensors may be as many as there are."""
    if name.endswith(TENSORS):
        return math.inf
    return MOST_STATE_BYTES if name == STATE else _MOST_RANK_BYTES


def check_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Refuse any of the files ``names`` whose bytes are not the manifest's, and random states that are none."""
    names = list(names)
    verify_files(path, manifest, names)
    for name in names:
        if name != STATE and name.endswith(".json"):
            read_generators(path / name)


def check_contents(path: Path, manifest: Manifest) -> None:
    """Refuse a state that is not the manifest's, and tensors that are not whole."""
    read_state(path, manifest)
    read_headers(path, manifest)


def read_state(path: Path, manifest: Manifest, parts: Collection[str] = ()) -> dict[str, Any]:
    """``state.json``, which must have ``parts``, each as a run writes it."""
    file = path / STATE
    value = read_json(file, most_bytes=MOST_STATE_BYTES)
    state, facts, contents = checked(schema.State, value, file), manifest.facts, contents_of(manifest)
    if missing := [name for name in parts if name not in value]:
        raise DamagedCheckpoint(f"{file}: has no {missing[0]}")
    if state.step != facts["step"]:
        raise DamagedCheckpoint(f"{file}: expected step {facts['step']}, found {state.step}")
    if ("optimizer" in value) != (contents == "full"):
        what = "optimizer counters" if "optimizer" in value else "no optimizer counters"
        raise DamagedCheckpoint(f"{file}: has {what}, and {_HOLDS[contents]}")
    # Other counters are sums of rates.
    steps = {name: count for name, count in value.get("optimizer", {}).items() if name.endswith("_steps")}
    for name, count in steps.items():
        if not isinstance(count, int):
            raise DamagedCheckpoint(f"{file}: optimizer.{shown(name)}: {count} is not a number of steps")
        # A skipped step counts for the run only.
        if count > state.step:
            raise DamagedCheckpoint(f"{file}: {count} steps as {shown(name)}, after {state.step} steps of the run")
    if "data" in value and state.data.tokens != facts.get("tokens", state.data.tokens):
        raise DamagedCheckpoint(f"{file}: expected {facts['tokens']} tokens as in {NAME}, found {state.data.tokens}")
    if "data" in parts and not (isinstance(state.data.fingerprint, dict) and "tokenizer" in state.data.fingerprint):
        raise DamagedCheckpoint(f"{file}: the data fingerprint has no tokenizer")
    return value


def read_generators(file: Path) -> dict[str, Any]:
    """The random states of a rank, ``rank-RRRRR.json``, with the types and lengths that the generators accept."""
    value = read_json(file, most_bytes=_MOST_RANK_BYTES)
    checked(schema.Generators, value, file)
    return value


def read_headers(path: Path, manifest: Manifest) -> Headers:
    """The boxes of all files: together they hold every element of every tensor, of the numbers that are expected."""
    headers = {name: header.read_header(path / name) for name in sorted(manifest.files) if name.endswith(TENSORS)}
    if fault := fault_of_cover(entry.box for entry in chain(*headers.values())):
        raise DamagedCheckpoint(f"{path}: {shown(fault)}")
    shapes: dict[str, dict[str, Shape]] = defaultdict(dict)
    dtypes: dict[str, set[str]] = defaultdict(set)
    for entry in chain(*headers.values()):
        # "model", "exp_avg", …
        what, _, name = entry.box.key.partition(".")
        shapes[what][name] = entry.box.shape
        dtypes[entry.box.key].add(entry.dtype)
    weights = WEIGHTS_PREFIX.removesuffix(".")
    for what, found in shapes.items():
        if what != weights and contents_of(manifest) == "weights":
            raise DamagedCheckpoint(f"{path}: has {shown(what)}.{shown(min(found))}, and {_HOLDS['weights']}")
        if what != weights and (wrong := _foreign_state(what, shapes, weights)):
            raise DamagedCheckpoint(f"{path}: {shown(wrong)} of {shown(what)} differs from that of the weights")
    for key, used in dtypes.items():
        is_weight = key.startswith((WEIGHTS_PREFIX, AVERAGE))
        expected = _WEIGHTS_ALONE if len(shapes) == 1 else _TRAINED if is_weight else _STATE
        if len(used) > 1 or not used <= set(expected):
            have, right = ", ".join(sorted(used)), " or ".join(expected)
            raise DamagedCheckpoint(f"{path}: {shown(key)} has dtype {have} instead of {right}")
    if not shapes:
        raise DamagedCheckpoint(f"{path}: has no tensor")
    return headers


def _foreign_state(what: str, shapes: Mapping[str, Mapping[str, Shape]], weights: str) -> str | None:
    """A parameter whose state ``what`` is missing or has not the weight's shape; None: there is none.

    An optimizer keeps some state for every weight, and may keep other tensors for some of them (Muon for matrices).
    Kinds of state with one parameter in common have all in common. Averages are of all weights. State of whole matrices
    is one row for each of the matrices that have it.
    """
    found, all_weights = shapes[what], shapes[weights].keys()
    if what.startswith(WHOLE):
        ranks = {name: (len(shapes[weights].get(name, ())), len(shape)) for name, shape in found.items()}
        return min((name for name, of_both in ranks.items() if of_both != (2, 1)), default=None)
    if what.startswith(AVERAGE):
        due = found.keys() | all_weights
    else:
        others = [one for name, one in shapes.items() if name != weights and not name.startswith(AVERAGE)]
        due = {name for one in others if one.keys() & found.keys() for name in one}
        due |= all_weights - {name for one in others for name in one}
    return min((name for name in due if found.get(name) != shapes[weights].get(name)), default=None)
