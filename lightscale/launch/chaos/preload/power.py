"""A power cut on a disk that lies: what was written, and not synced, is lost or half there.

Of each file the writes since its last fsync may be lost, be zeros, or be there up to any length. Of each directory the
last changes since its own fsync may be undone, later ones first: renames, new names, removed names. POSIX promises no
more (Pillai et al. 2014, "All File Systems Are Not Created Equal", OSDI, section 2).
"""

import os
import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(kw_only=True)
class Loss:
    """What a power cut took."""

    files: list[str] = field(default_factory=list)
    """Files that lost writes."""
    names: list[str] = field(default_factory=list)
    """Names that changed back."""


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A change of a directory: C(reate), R(ename) or U(nlink)."""

    what: str
    number: int
    """Inode of the file."""
    names: tuple[str, ...]


def cut(journal: Path, run: Path, generator: random.Random) -> Loss:
    """Lose unsynced writes below `run`, whose processes have ended, as `generator` draws."""
    loss = Loss()
    if not journal.exists():
        return loss
    sizes, changes = _unsynced(journal.read_text(encoding="utf-8", errors="surrogateescape"))
    paths = {path.stat().st_ino: path for path in sorted(run.rglob("*")) if path.is_file() and not path.is_symlink()}
    for number, size in sorted(sizes.items()):
        path = paths.get(number)
        if path is not None and path.stat().st_size > size and generator.random() < 0.7:
            _lose(path, size, generator)
            loss.files.append(str(path.relative_to(run)))
    for _, done in sorted(changes.items()):
        for change in reversed(done[generator.randint(0, len(done)) :]):
            if _undo(change):
                loss.names.append(str(Path(change.names[-2 if change.what == "R" else 0]).relative_to(run.absolute())))
    return loss


def _unsynced(journal: str) -> tuple[dict[int, int], dict[int, list[_Change]]]:
    """By inode, the size of files before their first unsynced write; by inode of directory, its unsynced changes."""
    sizes: dict[int, int] = {}
    changes: dict[int, list[_Change]] = defaultdict(list)
    # A process that was killed may have left half a line.
    for line in journal.split("\n")[:-1]:
        head, *names = line.split("\t")
        what, *numbers = head.split(" ")
        first = int(numbers[0])
        if what == "W":
            sizes.setdefault(first, int(numbers[1]))
        elif what == "S":
            sizes.pop(first, None)
            changes.pop(first, None)
        else:
            changes[first].append(_Change(what=what, number=int(numbers[1]), names=tuple(names)))
    return sizes, changes


def _lose(path: Path, size: int, generator: random.Random) -> None:
    now = path.stat().st_size
    way = generator.choice(("gone", "zeros", "a part"))
    with path.open("r+b") as file:
        if way == "a part":
            file.truncate(generator.randint(size, now))
        else:
            file.truncate(size)
            if way == "zeros":
                # The new length was on the disk, and the data was not.
                file.truncate(now)


def _undo(change: _Change) -> bool:
    path = Path(change.names[0])
    if change.what == "C":
        # Its name may belong to another file by now.
        if path.is_symlink() or not path.is_file() or path.stat().st_ino != change.number:
            return False
        path.unlink()
        return True
    if change.what == "U":
        kept = Path(change.names[1])
        if path.exists() or not kept.exists() or not path.parent.is_dir():
            return False
        os.link(kept, path)
        return True
    old, new, kept_name = change.names
    if not Path(new).exists() or Path(new).stat().st_ino != change.number:
        return False
    if Path(old).exists() or not Path(old).parent.is_dir():
        return False
    Path(new).rename(old)
    if kept_name and Path(kept_name).exists():
        os.link(kept_name, new)
    return True
