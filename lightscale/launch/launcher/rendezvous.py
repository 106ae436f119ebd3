"""The rendezvous of several hosts: rank 0's address, and its checks on this host before ranks start."""

import contextlib
import os
import secrets
import socket
import time
from dataclasses import dataclass

import psutil

from lightscale.errors import UserError
from lightscale.parallel.rendezvous.sockets import listen

# Of one attempt to connect.
_ATTEMPT_S = 1.0
_PAUSE_S = 0.2
RELEASE_S = 10.0
"""Time for an ending process to release the port, as after a restart."""


class CannotStart(UserError):
    """Ranks are missing or have failed without a mistake in the configuration; another start may succeed."""

    EXIT_CODE = os.EX_TEMPFAIL


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The rendezvous of several nodes, and the number of this node."""

    address: str
    """Address of the first node."""
    port: int
    node: int
    """Number of this node, from 0; its ranks precede those of the next."""
    num_nodes: int
    of_agents: bool
    """Whether the agents of the nodes meet there and find a port for their ranks; if not, the ranks meet there."""

    @property
    def place(self) -> str:
        """HOST:PORT"""
        return f"{self.address}:{self.port}"

    def check(self) -> None:
        """Raise CannotStart if this host cannot resolve the address, or, on node 0, if it is in use or another host's.

        Imports no torch: a fault is reported within a second, or after RELEASE_S if the port is in use.
        """
        try:
            socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            first = "node 0" if self.node else "rank 0"
            raise CannotStart(f"{first} cannot be found at {self.place} ({error}): {unknown_address()}") from None
        if self.node == 0:
            with _listen(self.port, self.place) as server:
                try:
                    _come_back(server, self.address, self.port)
                except OSError as error:
                    raise CannotStart(
                        f"rank 0 cannot reach itself at {self.place} ({error}): {foreign_address()}"
                    ) from None


def in_use(port: int, place: str, why: str = "") -> str:
    """Message that rank 0, at `place`, cannot use `port` of this host."""
    return (
        f"rank 0 cannot serve at {place}: port {port} of {socket.gethostname()} is in use by {_holder(port)}{why}; "
        "end it, or set another MASTER_PORT (--master-port)"
    )


def unknown_address() -> str:
    """Remedy for a MASTER_ADDR without an address."""
    return (
        f"{socket.gethostname()} cannot resolve that name; set MASTER_ADDR (--master-addr) to rank 0's host on all "
        "ranks"
    )


def foreign_address() -> str:
    """Remedy for a MASTER_ADDR that does not reach the host of rank 0."""
    return f"set MASTER_ADDR (--master-addr) to {socket.gethostname()}, the host of rank 0, or open the network there"


def _listen(port: int, place: str) -> socket.socket:
    last = time.monotonic() + RELEASE_S
    while True:
        try:
            return listen(port, on_one_host=False)
        except OSError as error:
            if isinstance(error, PermissionError) or time.monotonic() > last:
                raise CannotStart(in_use(port, place)) from None
        time.sleep(_PAUSE_S)


def _come_back(server: socket.socket, address: str, port: int) -> None:
    """Connect to `server`, of this process, by that address; OSError where that leads elsewhere, or nowhere."""
    token = secrets.token_bytes(16)
    deadline = time.monotonic() + RELEASE_S
    with socket.create_connection((address, port), timeout=_ATTEMPT_S) as connection:
        connection.sendall(token)
        while (left_s := deadline - time.monotonic()) > 0:
            server.settimeout(left_s)
            try:
                other, _ = server.accept()
            except TimeoutError:
                break
            with other, contextlib.suppress(OSError):
                other.settimeout(_ATTEMPT_S)
                # Ranks of other hosts may have come before; they try again.
                if other.recv(len(token)) == token:
                    return
    raise ConnectionError("another host has that address")


def _holder(port: int) -> str:
    """Who listens at `port` of this host, as far as this user may know."""
    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            # Only addresses of the internet have a port.
            is_it = one.status == psutil.CONN_LISTEN and getattr(one.laddr, "port", None) == port
            if is_it and one.pid is not None:
                return f"process {one.pid} ({psutil.Process(one.pid).name()})"
    return "a process of another user"
