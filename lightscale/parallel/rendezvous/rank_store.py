"""The store that ranks share: who serves it, and which part of it is a run's own.

Ranks of one host listen on the loopback interface only. Ranks of several hosts meet behind a gate that asks for
LIGHTSCALE_RENDEZVOUS_KEY before a byte of torch's protocol (`gate.py`). torchrun's own agent serves its store itself,
without a gate: there, and on one host, the names of keys in the store begin with a hash of the secret, and a stranger
with another one reads and writes other names.
"""

import hashlib
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from lightscale.parallel.rendezvous.gate import Door, Gate, await_gate
from lightscale.parallel.rendezvous.sockets import GATED_VARIABLE, KEY_VARIABLE, LOOPBACK, listen


def serve_store(port: int, *, secret: str | None, timeout: timedelta) -> dist.TCPStore:
    """Serve a store at ``port`` of this host for as long as the result lives. Raises OSError if the port is in use.

    ``secret``: what a gate on all interfaces asks for; None: on the loopback only, without a gate.
    """
    public = listen(port, on_one_host=secret is None)
    # torch itself would listen on all interfaces.
    server = public if secret is None else listen(0, on_one_host=True)
    inner = server.getsockname()[1]
    store = dist.TCPStore(
        LOOPBACK,
        inner,
        is_master=True,
        # Nobody waits within the constructor, which could not tell who is missing.
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=server.detach(),
    )
    if secret is not None:
        Gate(public, inner, secret)
    return store


def join_store(address: str, port: int, *, secret: str | None = None, timeout: timedelta) -> dist.TCPStore:
    """Connect to the store at ``address``, by its gate where there is a ``secret``. Raises OSError or DistError."""
    if secret is not None:
        first = await_gate(address, port, secret, timeout.total_seconds())
        address, port = LOOPBACK, Door(address, port, secret, first).port
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def gate_secret(environ: Mapping[str, str], *, on_one_host: bool) -> str | None:
    """What the gate before the store asks for; None: there is none, on one host and before torchrun's own store."""
    if on_one_host or (_has_agent_store(environ) and environ.get(GATED_VARIABLE) != "1"):
        return None
    return environ.get(KEY_VARIABLE, "")


def serves_store(environ: Mapping[str, str], rank: int) -> bool:
    """Whether ``rank`` serves the store: rank 0, unless torchrun's agent does."""
    return rank == 0 and not _has_agent_store(environ)


def _has_agent_store(environ: Mapping[str, str]) -> bool:
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(environ: Mapping[str, str], timeout: timedelta) -> dist.Store:
    """The store for process groups of ranks that have not met before: served by rank 0, or by torchrun's agent.

    ``environ`` holds torchrun's variables.
    """
    on_one_host, port = environ["WORLD_SIZE"] == environ["LOCAL_WORLD_SIZE"], int(environ["MASTER_PORT"])
    secret = gate_secret(environ, on_one_host=on_one_host)
    if serves_store(environ, int(environ["RANK"])):
        store = serve_store(port, secret=secret, timeout=timeout)
    else:
        address = LOOPBACK if on_one_host else environ["MASTER_ADDR"]
        store = join_store(address, port, secret=secret, timeout=timeout)
    return private(store, environ, "ranks")


def private(store: dist.Store, environ: Mapping[str, str], name: str) -> dist.PrefixStore:
    """The part of ``store`` whose keys belong to ``name``, this start of torchrun, and the run's rendezvous key."""
    # The store of torchrun's agent outlives a restart, and keeps the keys of the last one.
    start = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    secret = environ.get(KEY_VARIABLE, "")
    return dist.PrefixStore(hashlib.sha256("\0".join((secret, name, start)).encode()).hexdigest(), store)
