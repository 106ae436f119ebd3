"""The store that ranks share: who serves it, and which part of it is a run's own.

Ranks of one host listen on the loopback interface only. Ranks of several hosts listen on all interfaces, and the names
of their keys in the store begin with a hash of LIGHTSCALE_RENDEZVOUS_KEY: a stranger with another key reads and writes
other names.
"""

import hashlib
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from lightscale.parallel.rendezvous.sockets import KEY_VARIABLE, LOOPBACK, listen


def serve_store(port: int, *, on_one_host: bool, timeout: timedelta) -> dist.TCPStore:
    """Serve a store at ``port`` of this host for as long as the result lives. Raises OSError if the port is in use."""
    # torch itself would listen on all interfaces.
    server = listen(port, on_one_host=on_one_host)
    return dist.TCPStore(
        LOOPBACK,
        server.getsockname()[1],
        is_master=True,
        # Nobody waits within the constructor, which could not tell who is missing.
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=server.detach(),
    )


def join_store(address: str, port: int, *, timeout: timedelta) -> dist.TCPStore:
    """Connect to the store at ``address``."""
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def serves_store(environ: Mapping[str, str], rank: int) -> bool:
    """Whether ``rank`` serves the store: rank 0, unless torchrun's agent does."""
    return rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def open_store(environ: Mapping[str, str], timeout: timedelta) -> dist.Store:
    """The store for process groups of ranks that have not met before: served by rank 0, or by torchrun's agent.

    ``environ`` holds torchrun's variables.
    """
    on_one_host, port = environ["WORLD_SIZE"] == environ["LOCAL_WORLD_SIZE"], int(environ["MASTER_PORT"])
    if serves_store(environ, int(environ["RANK"])):
        store = serve_store(port, on_one_host=on_one_host, timeout=timeout)
    else:
        store = join_store(LOOPBACK if on_one_host else environ["MASTER_ADDR"], port, timeout=timeout)
    return private(store, environ, "ranks")


def private(store: dist.Store, environ: Mapping[str, str], name: str) -> dist.PrefixStore:
    """The part of ``store`` whose keys belong to ``name``, this start of torchrun, and the run's rendezvous key."""
    # The store of torchrun's agent outlives a restart, and keeps the keys of the last one.
    start = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    secret = environ.get(KEY_VARIABLE, "")
    return dist.PrefixStore(hashlib.sha256("\0".join((secret, name, start)).encode()).hexdigest(), store)
