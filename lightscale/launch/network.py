"""Which network interface leads to the other hosts of a run."""

import os
import socket

import psutil

from lightscale.launch.environment import RankEnvironment

_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


def choose_interface(environment: RankEnvironment) -> None:
    """On several hosts, have gloo use the interface that leads to rank 0's, unless the user has named one.

    By itself gloo takes the address that this host's name stands for. Often that is a loopback address, or none, and
    then no other host can reach this one. (NCCL looks at the interfaces themselves.)
    """
    if environment.world_size > environment.local_world_size and not os.environ.get(_GLOO_VARIABLE):
        name = interface_to(environment.master_address, environment.master_port)
        if name is not None:
            os.environ[_GLOO_VARIABLE] = name


def interface_to(address: str, port: int) -> str | None:
    """The interface over which `address` is reached, or that has it; None: no route, or only by loopback."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # Sends nothing: only the route is looked up.
            probe.connect(target)
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        # Addresses of IPv6 that hold on one link only have their interface behind a %.
        if any(one.address.partition("%")[0] == own for one in addresses):
            return None if own.startswith("127.") or own == "::1" else name
    return None
