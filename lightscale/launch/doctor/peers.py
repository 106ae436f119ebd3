"""The rendezvous of the ranks of `lightscale doctor`; ranks that do not answer are reported."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from lightscale.launch.environment import RankEnvironment
from lightscale.launch.network import choose_interface
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.rendezvous.rank_store import gate_secret, join_store, private, serve_store, serves_store
from lightscale.training.health.machine import host_name

_T = TypeVar("_T")
# The error text of torch's monitored_barrier: nothing else says which ranks are missing.
_FAILED_TO_PASS = re.compile(r"Ranks ([\d, ]+) failed to pass")
_POLL_S = 0.1


class AbsentRanks(Exception):
    """Ranks that did not answer in time; raised on rank 0, whose loss the other ranks detect."""

    def __init__(self, ranks: tuple[int, ...], hosts: list[str], timeout_s: float) -> None:
        super().__init__(f"no answer within {timeout_s:.0f} s")
        self.ranks, self.hosts = ranks, hosts


class PeerRanks(Agreement):
    """All ranks of one command, with their hosts. No wait for a rank takes longer than `timeout_s`."""

    def __init__(self, hosts: list[str], timeout_s: float) -> None:
        group = dist.group.WORLD
        assert group is not None
        super().__init__(group)
        self.hosts, self._timeout_s = hosts, timeout_s

    def barrier(self) -> None:
        """Wait for all ranks. Raises AbsentRanks on rank 0 if some are missing."""
        try:
            # Only gloo has it. Rank 0 hears from each rank in turn, so that it can name those that are silent; with
            # `wait_all_ranks` it names all of them, not only the first.
            dist.monitored_barrier(timeout=timedelta(seconds=self._timeout_s), wait_all_ranks=True)
        except RuntimeError as error:
            match = _FAILED_TO_PASS.search(str(error))
            # On the other ranks, which only learn that rank 0 has left: `command.run` reports that.
            if match is None:
                raise
            ranks = tuple(int(number) for number in match[1].split(","))
            raise AbsentRanks(ranks, self.hosts, self._timeout_s) from None

    def on_all(self, action: Callable[[], _T]) -> list[_T]:
        """Do `action` on all ranks, as in `Agreement`; reports a rank that hangs in it."""
        outcome: Future[_T] = Future()
        try:
            outcome.set_result(action())
        # From a barrier within `action`: rank 0 knows who is missing, and another barrier would only wait as long
        # again.
        except AbsentRanks:
            raise
        except Exception as error:  # noqa: BLE001 - raised below, on all ranks
            outcome.set_exception(error)
        # Before the exchange of the results, whose own time-out would name nobody.
        self.barrier()
        return super().on_all(outcome.result)


@contextlib.contextmanager
def meet_peers(environment: RankEnvironment, timeout_s: float) -> Iterator[PeerRanks]:
    """Connect to the other ranks of this job by gloo. Raises AbsentRanks on rank 0 if some are missing."""
    os.environ.update(environment.variables())
    choose_interface(environment)
    wait = timedelta(seconds=timeout_s)
    secret = gate_secret(os.environ, on_one_host=environment.is_one_host)
    if serves_store(os.environ, environment.rank):
        server = serve_store(environment.master_port, secret=secret, timeout=wait)
    else:
        server = join_store(environment.address, environment.master_port, secret=secret, timeout=wait)
    store = private(server, os.environ, "doctor")
    store.set(_key(environment.rank), host_name())
    keys = [_key(rank) for rank in range(environment.world_size)]
    if environment.rank == 0:
        _await_all(store, keys, timeout_s)
    # Twice: rank 0 has just waited as long for the last one.
    store.wait(keys, 2 * wait)
    hosts = [store.get(key).decode() for key in keys]
    # gloo, on GPUs too: a rank whose NCCL is broken must still be able to say so.
    dist.init_process_group(
        "gloo", store=store, rank=environment.rank, world_size=environment.world_size, timeout=2 * wait
    )
    try:
        yield PeerRanks(hosts, timeout_s)
    finally:
        dist.destroy_process_group()


def _key(rank: int) -> str:
    return f"host-{rank}"


def _await_all(store: dist.Store, keys: list[str], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        if time.monotonic() > deadline:
            there = [store.check([key]) for key in keys]
            hosts = [store.get(key).decode() if known else "unknown" for key, known in zip(keys, there, strict=True)]
            raise AbsentRanks(tuple(rank for rank, known in enumerate(there) if not known), hosts, timeout_s)
        time.sleep(_POLL_S)
