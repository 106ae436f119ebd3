"""Checkpoints as directories: their names, verification, retention, and what happens to damaged ones."""

import itertools
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata as packages
from pathlib import Path
from typing import TYPE_CHECKING

from lightscale import __version__
from lightscale.training.checkpoints.manifest import (
    NAME,
    DamagedCheckpoint,
    Manifest,
    read_manifest,
    sync,
    verify_files,
)
from lightscale.training.health.fault_injection import fault_point

if TYPE_CHECKING:
    # It imports torch; the names and the retention of checkpoints are read without.
    from lightscale.parallel.agreement import Agreement

STATE = "state.json"
TENSORS = ".safetensors"
# Matched as a whole: step-N.tmp (unfinished) and step-N.bad (put aside) are no checkpoints.
_STEP = re.compile(r"step-(\d{8})")


def directory_name(step: int) -> str:
    """step-00000100"""
    return f"step-{step:08d}"


def list_steps(directory: Path) -> list[int]:
    """Steps of the checkpoints in ``directory``, oldest first, damaged ones included: nothing is read."""
    if not directory.is_dir():
        return []
    matches = (_STEP.fullmatch(entry.name) for entry in directory.iterdir() if entry.is_dir())
    return sorted(int(match.group(1)) for match in matches if match)


def rank_stem(rank: int) -> str:
    """rank-00003, before the suffixes of a rank's two files."""
    return f"rank-{rank:05d}"


def environment() -> dict[str, str]:
    """Versions of the packages that decide the numbers of a run; a checkpoint records them."""
    return {
        "lightscale": __version__,
        "torch": packages.version("torch"),
        "megatron-core": packages.version("megatron-core"),
    }


def manifest_of(path: Path, step: int) -> Manifest:
    """The manifest of the checkpoint ``path``; ``DamagedCheckpoint`` where there is none, or not that of ``step``."""
    manifest = read_manifest(path)
    if manifest.facts["step"] != step:
        raise DamagedCheckpoint(f"{path / NAME}: expected step {step}, found {manifest.facts['step']}")
    return manifest


def verify_together(path: Path, step: int, ranks: "Agreement") -> Manifest:
    """The manifest of the checkpoint ``path``, each of ``ranks`` having read and hashed its share of the files.

    Raises ``DamagedCheckpoint`` on all of them where it is not whole, or not that of ``step``.
    """

    def own_share() -> Manifest:
        manifest = manifest_of(path, step)
        verify_files(path, manifest, sorted(manifest.files)[ranks.rank :: ranks.size])
        return manifest

    return ranks.on_all(own_share)[0]


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which older checkpoints stay: the newest ``keep`` good ones, and those at multiples of ``keep_every`` steps."""

    keep: int
    keep_every: int | None = None

    def superseded(self, steps: Sequence[int], good: Sequence[int]) -> list[int]:
        """Those of ``steps`` to remove. ``good``: the newest ones that are known to be whole, newest first."""
        # With fewer that are known to be whole, an older one may be the only one that can be read.
        if len(good) < self.keep:
            return []
        oldest = good[self.keep - 1]
        return [step for step in steps if step < oldest and (not self.keep_every or step % self.keep_every)]


def remove(directory: Path, steps: Sequence[int]) -> None:
    """Remove checkpoints, each renamed first, so that no name of a checkpoint ever stands for half of one."""
    for step in steps:
        path = directory / directory_name(step)
        # The name of a draft: what a kill leaves of it, the next save removes (``Saver._make_room``).
        doomed = path.with_suffix(".tmp")
        path.rename(doomed)
        # Otherwise a power failure may bring back the name without the files.
        sync(directory)
        fault_point("save:retention")
        shutil.rmtree(doomed)


def put_aside(damaged: Sequence[Path], ranks: "Agreement") -> None:
    """Rename directories to ….bad, so that they count neither as checkpoints nor as kept ones."""

    def rename() -> None:
        for path in damaged:
            # The name may be taken: a step that was put aside is saved again, and may be damaged again.
            names = (path.with_suffix(f".bad{number or ''}") for number in itertools.count())
            path.rename(next(name for name in names if not name.exists()))
            sync(path.parent)

    ranks.on_first(rename)
