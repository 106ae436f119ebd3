"""The folders that a power failure may leave, whenever it comes: each prefix of the operations of a ``Recording``.

Until a file or a directory is synced, the disk may have its changes in any order, and of the last write a part. Of each
prefix these are built: with all changes that are not synced, with none, without one of them, with one alone, with a
file's bytes still zero, and with half of the last write. The changes of one file count as one; each change of names
counts by itself, whatever a file system promises about their order.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from system_calls import Names, Operation, Recording, Resize, Sync, Tree, Write


@dataclass(frozen=True, kw_only=True)
class State:
    """What a disk may have."""

    point: int
    """Number of operations before the failure."""
    how: str
    """The changes that reached the disk, of those that were not synced."""
    tree: Tree


def states(recording: Recording, kept: Sequence[str] = ()) -> Iterator[State]:
    """All of them, equal ones too. ``kept``: paths whose changes are on the disk at once, such as logs."""
    synced, waiting = recording.before.copy(), list[Operation]()
    operations = recording.operations
    for point in range(len(operations) + 1):
        if point:
            operation = operations[point - 1]
            if _is_kept(operation, recording, kept):
                synced.apply(operation)
            elif isinstance(operation, Sync):
                for one in waiting:
                    if operation.inode in _inodes(one):
                        synced.apply(one)
                waiting = [one for one in waiting if operation.inode not in _inodes(one)]
            else:
                waiting.append(operation)
        for how, some in _choices(waiting):
            tree = synced.copy()
            for one in some:
                tree.apply(one)
            yield State(point=point, how=how, tree=tree)


def _choices(waiting: Sequence[Operation]) -> Iterator[tuple[str, list[Operation]]]:
    yield "all", list(waiting)
    if not waiting:
        return
    yield "none", []
    groups: dict[object, list[Operation]] = {}
    for number, one in enumerate(waiting):
        groups.setdefault(("names", number) if isinstance(one, Names) else one.inode, []).append(one)
    for key, group in groups.items():
        chosen = {id(one) for one in group}
        if len(groups) > 1:
            yield "all but one", [one for one in waiting if id(one) not in chosen]
            yield "one", group
        if not isinstance(key, tuple):
            yield "zeros", [_zeroed(one) if id(one) in chosen else one for one in waiting]
    if isinstance(last := waiting[-1], Write) and len(last.data) > 1:
        half = Write(inode=last.inode, offset=last.offset, data=last.data[: len(last.data) // 2])
        yield "half", [*waiting[:-1], half]


def _zeroed(operation: Operation) -> Operation:
    if isinstance(operation, Write):
        return Write(inode=operation.inode, offset=operation.offset, data=bytes(len(operation.data)))
    return operation


def _inodes(operation: Operation) -> set[int]:
    """Whose sync brings the operation to the disk."""
    match operation:
        case Names(changes=changes):
            return {directory for directory, _, _ in changes}
        case Write(inode=inode) | Resize(inode=inode) | Sync(inode=inode):
            return {inode}


def _is_kept(operation: Operation, recording: Recording, kept: Sequence[str]) -> bool:
    if isinstance(operation, Names):
        changed = [inode for _, _, inode in operation.changes if inode is not None]
    else:
        changed = [operation.inode]
    paths = [recording.paths.get(inode, "") for inode in changed]
    return bool(paths) and all(any(re.fullmatch(pattern, path) for pattern in kept) for path in paths)
