"""Choice of the network interface to the other hosts of a run."""

import os
import socket
from collections.abc import Mapping

import psutil

from lightscale.errors import UserError
from lightscale.launch.environment import RankEnvironment
from lightscale.parallel.rendezvous.sockets import GLOO_VARIABLE, NCCL_VARIABLE, loopback_variables

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def choose_interface(environment: RankEnvironment) -> None:
    """Set gloo's interface to the one that reaches rank 0, and on one host NCCL's too, unless the user has set them.

    On one host that is the loopback, where no other host reaches it. By default gloo uses the address of this host's
    name. Often that is a loopback address, or none, and ranks of several hosts cannot connect. (NCCL inspects the
    interfaces.)
    """
    if environment.is_one_host:
        os.environ.update(loopback_variables(os.environ))
    elif not os.environ.get(GLOO_VARIABLE):
        name = interface_to(environment.master_address, environment.master_port)
        if name is not None:
            os.environ[GLOO_VARIABLE] = name


def interface_to(address: str, port: int) -> str | None:
    """The interface that reaches or has `address`; None: no route, or only loopback."""
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


def check_interfaces(environ: Mapping[str, str], *, uses_nccl: bool) -> None:
    """Raise UserError if `environ` names interfaces that do not exist on this host, or have no address."""
    here = sorted(
        name for name, addresses in psutil.net_if_addrs().items() if any(one.family in _FAMILIES for one in addresses)
    )
    text = environ.get(GLOO_VARIABLE, "")
    for name in filter(None, text.split(",")):
        if name not in here:
            raise _no_interface(GLOO_VARIABLE, text, name, here)
    text = environ.get(NCCL_VARIABLE, "")
    # Prefixes of names; behind "=" whole names, and behind "^" those that are not used.
    if uses_nccl and text and not text.startswith("^"):
        names = text.removeprefix("=").split(",")
        if not any(_fits(name, text, one) for name in filter(None, names) for one in here):
            raise _no_interface(NCCL_VARIABLE, text, names[0], here)


def _fits(name: str, text: str, interface: str) -> bool:
    return interface == name if text.startswith("=") else interface.startswith(name)


def _no_interface(variable: str, text: str, name: str, here: list[str]) -> UserError:
    return UserError(
        f'{variable} = "{text}": {socket.gethostname()} has no network interface {name} with an address; unset the '
        f"variable, or use one of {', '.join(here)}"
    )
