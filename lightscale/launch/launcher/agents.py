"""The rendezvous of torch's elastic agents: of one node alone, without a socket, or of several nodes at an address.

torch's own ones listen on all interfaces, also for the agent of a single node, and do not ask for a key.
"""

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from lightscale.parallel.rendezvous.rank_store import join_store, private, serve_store
from lightscale.parallel.rendezvous.sockets import GATED_VARIABLE, KEY_VARIABLE, LOOPBACK, listen

BACKEND = "lightscale"
"""Name of this rendezvous, for ``LaunchConfig.rdzv_backend``; its options are ``node`` and ``timeout``, in seconds."""


class AgentRendezvous(RendezvousHandler):
    """A rendezvous in a given order, for one start of the ranks. ``params.endpoint``: of the first of several nodes."""

    def __init__(self, params: RendezvousParameters) -> None:
        self._params, self._num_nodes = params, params.max_nodes

    def get_backend(self) -> str:
        """See RendezvousHandler."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks meet in the store of the agents; those of one node serve their own."""
        return self._num_nodes > 1

    def next_rendezvous(self) -> RendezvousInfo:
        """The agents' store, and the address at which ranks meet. Raises OSError or DistError."""
        node = int(self._params.config["node"])
        if not self.use_agent_store:
            with listen(0, on_one_host=True) as free:
                port = free.getsockname()[1]
            return RendezvousInfo(dist.HashStore(), node, 1, RendezvousStoreInfo(LOOPBACK, port))
        address, _, digits = self._params.endpoint.rpartition(":")
        port, wait = int(digits), timedelta(seconds=self._params.config["timeout"])
        # For the ranks, which are this agent's children and join its store.
        os.environ[GATED_VARIABLE] = "1"
        secret = os.environ.get(KEY_VARIABLE, "")
        if node == 0:
            server = serve_store(port, secret=secret, timeout=wait)
        else:
            server = join_store(address, port, secret=secret, timeout=wait)
        # Named by the run and its start: agents of an earlier start cannot join.
        store = private(server, os.environ, f"agents of {self._params.run_id}")
        return RendezvousInfo(store, node, self._num_nodes, RendezvousStoreInfo(address, port))

    def is_closed(self) -> bool:
        """See RendezvousHandler."""
        return False

    def set_closed(self) -> None:
        """See RendezvousHandler."""

    def num_nodes_waiting(self) -> int:
        """See RendezvousHandler."""
        return 0

    def get_run_id(self) -> str:
        """See RendezvousHandler."""
        return self._params.run_id

    def shutdown(self) -> bool:
        """See RendezvousHandler."""
        return True


rendezvous_handler_registry.register(BACKEND, AgentRendezvous)
