"""What each rank sends to whom: a record of all collectives and messages of a process, whatever library starts them."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = (
    "allreduce",
    "broadcast",
    "allgather",
    "_allgather_base",
    "reduce_scatter",
    "_reduce_scatter_base",
    "alltoall_base",
    "alltoall",
)
MESSAGES = ("send", "recv")
Record = dict[tuple[Any, ...], list[tuple[Any, ...]]]


def shapes(nested: Any) -> tuple[Any, ...]:
    """(shape, dtype) of every tensor."""
    if isinstance(nested, torch.Tensor):
        return ((tuple(nested.shape), str(nested.dtype)),)
    if isinstance(nested, (list, tuple)):
        return tuple(entry for part in nested for entry in shapes(part))
    return ()


@contextmanager
def recorded() -> Iterator[Record]:
    """By group (its ranks and its name): operations, shapes and peers, in order.

    Taken where PyTorch hands them to the process group, so that no caller and no thread escapes.
    """
    record: Record = defaultdict(list)

    def key(group: Any) -> tuple[Any, ...]:
        # Several groups have the same ranks; all ranks make all groups in one order, so the names agree.
        return (*dist.get_process_group_ranks(group), group.group_name)

    def wrap(name: str, original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            peer = tuple(arg for arg in args[1:2] if isinstance(arg, int)) if name in MESSAGES else ()
            record[key(self)].append((name, *peer, *shapes(args)))
            return original(self, *args, **kwargs)

        return call

    originals = {name: getattr(dist.ProcessGroup, name) for name in (*COLLECTIVES, *MESSAGES)}
    for name, original in originals.items():
        setattr(dist.ProcessGroup, name, wrap(name, original))
    try:
        yield record
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


def check_equal(by_rank: list[Record], where: str) -> int:
    """Every group's ranks did the same in the same order, and every message has its receiver. Returns how many."""
    groups: dict[tuple[Any, ...], dict[int, list[tuple[Any, ...]]]] = defaultdict(dict)
    for rank, record in enumerate(by_rank):
        for group, operations in record.items():
            groups[group][rank] = operations
    number = 0
    for group, by_member in groups.items():
        members = group[:-1]
        collectives = {
            rank: [operation for operation in by_member.get(rank, []) if operation[0] not in MESSAGES]
            for rank in members
        }
        first = collectives[members[0]]
        for rank in members:
            assert collectives[rank] == first, f"{where}: ranks {members[0]} and {rank} of {members} differ"
        number += len(first)
        for index, rank in enumerate(members):
            for peer, other in enumerate(members):
                sent = [entry[2:] for entry in by_member.get(rank, []) if entry[:2] == ("send", peer)]
                received = [entry[2:] for entry in by_member.get(other, []) if entry[:2] == ("recv", index)]
                assert sent == received, f"{where}: messages from {rank} to {other}"
                number += len(sent)
    return number
