"""Checkpoints as directories: names, verification, retention, and the handling of damaged ones."""

import itertools
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata as packages
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from lightscale import __version__
from lightscale.errors import UserError
from lightscale.files import sync
from lightscale.training.health.fault_injection import fault_point

if TYPE_CHECKING:
    # It imports torch; the names and the retention of checkpoints are read without.
    from lightscale.parallel.agreement import Agreement

STATE = "state.json"
TENSORS = ".safetensors"
WEIGHTS_PREFIX = "model."
"""Begins the keys of weights; those of moments begin with their own names."""
NUMBERING = "by parameter"
"""In manifests, of weights that are surely under their own names (``restore._check_numbering``)."""
# Matched as a whole: step-N.tmp (unfinished) and step-N.bad (put aside) are no checkpoints.
_NAME = re.compile(r"step-(\d{8})(-weights)?", re.ASCII)

Contents = Literal["full", "weights"]
"""Content of a checkpoint: the whole state that a run continues from, or its weights alone, which are never removed."""


class CheckpointName(NamedTuple):
    """Which checkpoint of a run. In order: by step, and of one step the full one first."""

    step: int
    contents: Contents = "full"

    @property
    def directory(self) -> str:
        """step-00000100, or step-00000100-weights"""
        return directory_name(self.step, self.contents)


def directory_name(step: int, contents: Contents = "full") -> str:
    """step-00000100, or step-00000100-weights"""
    return f"step-{step:08d}{'' if contents == 'full' else f'-{contents}'}"


def list_checkpoints(directory: Path) -> list[CheckpointName]:
    """The checkpoints in ``directory``, oldest first, damaged ones included: nothing is read.

    A symbolic link counts as a damaged one, whatever it points to: it is refused by its name, and renamed or removed
    itself.
    """
    if not directory.is_dir():
        return []
    entries = (entry.name for entry in directory.iterdir() if entry.is_dir() or entry.is_symlink())
    matches = map(_NAME.fullmatch, entries)
    return sorted(CheckpointName(int(match[1]), "weights" if match[2] else "full") for match in matches if match)


def list_steps(directory: Path, contents: Contents = "full") -> list[int]:
    """The steps of the checkpoints with ``contents``, oldest first. A run continues from full ones only."""
    return [name.step for name in list_checkpoints(directory) if name.contents == contents]


def steps_of(names: Iterable[CheckpointName]) -> str:
    """For messages: "10, 20, 30 (weights)"."""
    contents: dict[int, list[Contents]] = {}
    for name in names:
        contents.setdefault(name.step, []).append(name.contents)
    marked = (f"{step}{'' if 'full' in held else ' (weights)'}" for step, held in sorted(contents.items()))
    return ", ".join(marked) or "none"


def checkpoints_of_step(directory: Path, step: int) -> list[CheckpointName]:
    """Those in ``directory``; UserError with the steps that there are where none is."""
    names = list_checkpoints(directory)
    if found := [name for name in names if name.step == step]:
        return found
    raise UserError(f"{directory} has no checkpoint of step {step}; it has: {steps_of(names)}")


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
        clear(doomed)


def clear(path: Path) -> None:
    """Remove ``path`` if it exists: a directory with its content, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def adopt(source: Path, directory: Path) -> None:
    """Make the whole checkpoint ``source`` one of ``directory`` too, by one rename; ``source`` stays as it is.

    Its files are hard links, since neither run writes to a checkpoint again; copies where links are impossible.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sync(directory.parent)
    draft = directory / f"{source.name}.tmp"
    clear(draft)
    draft.mkdir()
    for file in source.iterdir():
        try:
            os.link(file, draft / file.name)
        except OSError:
            # Another file system, one without links, or files of another user.
            shutil.copyfile(file, draft / file.name)
            sync(draft / file.name)
    sync(draft)
    draft.rename(directory / source.name)
    sync(directory)


def put_aside(damaged: Sequence[Path], ranks: "Agreement") -> None:
    """Rename directories to ….bad, so that they count neither as checkpoints nor as kept ones."""

    def rename() -> None:
        for path in damaged:
            # The name may be taken: a step that was put aside is saved again, and may be damaged again.
            names = (path.with_suffix(f".bad{number or ''}") for number in itertools.count())
            path.rename(next(name for name in names if not os.path.lexists(name)))
            sync(path.parent)

    ranks.on_first(rename)
