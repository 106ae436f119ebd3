"""The interfaces on which a run listens: the loopback, where all its ranks are on one host."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping

import psutil

LOOPBACK = "127.0.0.1"
GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
KEY_VARIABLE = "LIGHTSCALE_RENDEZVOUS_KEY"
"""Secret that all ranks of a run on several hosts share."""
GATED_VARIABLE = "LIGHTSCALE_RENDEZVOUS_GATED"
"""1: the agents' store is behind a gate. lightscale's agents set it for their ranks; torchrun's own have none."""


def listen(port: int, *, on_one_host: bool) -> socket.socket:
    """Listen at ``port`` (0: any free one) of the loopback, or of all interfaces. Raises OSError if it is in use."""
    if on_one_host:
        return socket.create_server((LOOPBACK, port))
    # Of both kinds of addresses, where there are two.
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)


def loopback_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with which gloo and NCCL listen on the loopback only; none for those that the user has set."""
    addresses = psutil.net_if_addrs().items()
    name = next((name for name, found in addresses if any(one.address == LOOPBACK for one in found)), None)
    # Without a loopback, as in some network namespaces, they choose.
    found = {} if name is None else {GLOO_VARIABLE: name, NCCL_VARIABLE: f"={name}"}
    return {variable: value for variable, value in found.items() if not environ.get(variable)}


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Within the context, groups of this process listen on the loopback only."""
    variables = loopback_variables(os.environ)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        # Programs that use lightscale as a library may have groups of their own.
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
