"""One process that stands for one rank of many: the null device's NCCL needs no other, the host agrees with itself.

What the other ranks would contribute is what this one does. So groups, layouts, schedules, messages and memory are
those of the rank, in a world of any size; numbers are not, of which a null device has none.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist

_groups: dict[bytes, str] = {}
"""The beginning of a communicator's identifier to the name of its group, for those that were made here."""


def group_of(identifier: bytes) -> str:
    """What the group is for, of the communicator whose identifier begins so; "" for one that was made elsewhere."""
    name = _groups.get(identifier, "")
    of_name = [group for group, other in dist.distributed_c10d._world.pg_names.items() if other == name]
    described = of_name[0].group_desc if of_name else ""
    # Megatron describes all of its own; the others are those of the states' exchange.
    return "states" if described == "undefined" else described.removesuffix("_GROUP").lower()


class _LoneStore(dist.Store):
    """A rendezvous at which whoever is waited for has been."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """See ``dist.Store``."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._note(key)

    def get(self, key: str) -> bytes:
        """See ``dist.Store``. What another rank would have set is an identifier of a communicator."""
        self._values.setdefault(key, secrets.token_bytes(128))
        self._note(key)
        return self._values[key]

    def _note(self, key: str) -> None:
        # PyTorch's keys: 0//GROUP//cuda//NUMBER, and 0//cuda//NUMBER of the group of all.
        prefix, _, rest = key.partition("//cuda//")
        if rest:
            _groups[self._values[key][:8]] = prefix.partition("//")[2] or "0"

    def add(self, key: str, amount: int) -> int:
        """See ``dist.Store``."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See ``dist.Store``: nothing to wait for."""

    def check(self, keys: Sequence[str]) -> bool:
        """See ``dist.Store``."""
        return True

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """See ``dist.Store``."""
        self.set(key, desired)
        return self._values[key]

    def delete_key(self, key: str) -> bool:
        """See ``dist.Store``."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """See ``dist.Store``."""
        return len(self._values)


@contextmanager
def lone_rank(rank: int, world_size: int) -> Iterator[None]:
    """While this is open, ``init_process_group`` makes ``rank`` of ``world_size``, with no process for the others."""
    start, new_group = dist.init_process_group, dist.new_group
    store = _LoneStore()

    def start_alone(*_: Any, **__: Any) -> None:
        start("nccl", store=store, rank=rank, world_size=world_size)

    def new_group_alone(ranks: Sequence[int] | None = None, *words: Any, **options: Any) -> Any:
        options.pop("pg_options", None)
        if options.get("backend") != "gloo":
            return new_group(ranks, *words, **options)
        # Of the host: this rank with itself, or not among them.
        is_member = ranks is None or rank in ranks
        return new_group([rank], *words, **options) if is_member else dist.GroupMember.NON_GROUP_MEMBER

    with (
        mock.patch.object(dist, "init_process_group", start_alone),
        mock.patch.object(dist, "new_group", new_group_alone),
    ):
        yield
