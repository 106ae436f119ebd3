"""What each rank sends to whom: a record of all collectives and messages of a process, whatever library starts them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

COLLECTIVES = (
    "allreduce",
    "broadcast",
    "allgather",
    "_allgather_base",
    "reduce_scatter",
    "_reduce_scatter_base",
    "alltoall_base",
    "alltoall",
    "all_gather_single",
    "reduce_scatter_single",
    # Those of several tensors, which Megatron's buckets are.
    "allreduce_coalesced",
    "all_gather_single_coalesced",
    "reduce_scatter_single_coalesced",
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

    with _wrapped((*COLLECTIVES, *MESSAGES), wrap):
        yield record


@contextmanager
def begun_beside_computation(group: Any) -> Iterator[Counter[tuple[str, str]]]:
    """How many collectives of ``group`` begin inside a backward pass, and inside a module's forward.

    By (the pass, "backward" or "forward"; the collective). Seen where they are begun, whoever was told to.
    """
    found: Counter[tuple[str, str]] = Counter()
    modules = [0]

    def wrap(name: str, original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            # -1: no backward pass is running in this thread.
            is_backward = torch._C._current_graph_task_id() != -1
            if self.group_name == group.group_name and (is_backward or modules[0]):
                found["backward" if is_backward else "forward", name] += 1
            return original(self, *args, **kwargs)

        return call

    def enter(*_: Any) -> None:
        modules[0] += 1

    def leave(*_: Any) -> None:
        modules[0] -= 1

    # Hooks of all modules run before a module's own ones, in which Megatron begins its collectives.
    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        with _wrapped(COLLECTIVES, wrap):
            yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _wrapped(names: Sequence[str], wrap: Callable[[str, Any], Any]) -> Iterator[None]:
    # Releases of PyTorch name some of them otherwise. Taken as the class holds them: what `getattr` gives would, put
    # back, be called without its group.
    originals = {name: vars(dist.ProcessGroup)[name] for name in names if name in vars(dist.ProcessGroup)}
    for name, original in originals.items():
        setattr(dist.ProcessGroup, name, wrap(name, original))
    try:
        yield
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
