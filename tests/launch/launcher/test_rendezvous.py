"""What a host says of rank 0's address before it starts ranks: one line with host, port and remedy, and no torch."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lightscale.launch.launcher import rendezvous as address
from lightscale.launch.launcher.rendezvous import CannotStart, Rendezvous
from lightscale.parallel.rendezvous.sockets import listen

SHORT_S = 1.0
# What a busy machine may add.
PATIENCE_S = 20.0
HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "RELEASE_S", SHORT_S)


def at(port: int, node: int = 0, address: str = "127.0.0.1") -> Rendezvous:
    return Rendezvous(address=address, port=port, node=node, num_nodes=2, of_agents=False)


@contextlib.contextmanager
def listening(backlog: int = 5) -> Iterator[socket.socket]:
    with socket.create_server(("", 0), backlog=backlog) as server:
        yield server


def free_port() -> int:
    with listening() as server:
        return int(server.getsockname()[1])


def refusal(place: Rendezvous) -> str:
    began = time.monotonic()
    with pytest.raises(CannotStart) as caught:
        place.check()
    assert time.monotonic() - began < SHORT_S + PATIENCE_S
    assert caught.value.EXIT_CODE == 75
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    return said


def test_a_port_that_something_has_which_does_not_answer() -> None:
    with listening(backlog=0) as server:
        port = server.getsockname()[1]
        said = refusal(at(port))
        # Other hosts have nothing to serve.
        at(port, node=1).check()
    assert said.startswith(f"rank 0 cannot serve at 127.0.0.1:{port}: port {port} of {HOST} is in use by process ")
    assert f"process {os.getpid()} (" in said
    assert said.endswith("; end it, or set another MASTER_PORT (--master-port)")


def test_a_port_that_is_let_go_of_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "RELEASE_S", PATIENCE_S)
    with listening() as server:
        threading.Timer(SHORT_S / 2, server.close).start()
        at(server.getsockname()[1]).check()


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b", "x" * 70])
def test_a_name_without_address(name: str, node: int) -> None:
    said = refusal(at(29500, node, name))
    assert f" cannot be found at {name}:29500 (" in said
    assert said.endswith(
        f"{HOST} cannot resolve that name; set MASTER_ADDR (--master-addr) to rank 0's host on all ranks"
    )


def test_an_address_of_another_host_on_the_first() -> None:
    port = free_port()
    # Of nobody: packets to it are refused, or answered by nobody, or by a proxy.
    said = refusal(at(port, address="192.0.2.1"))
    assert said.startswith(f"rank 0 cannot reach itself at 192.0.2.1:{port} (")
    assert said.endswith(f"set MASTER_ADDR (--master-addr) to {HOST}, the host of rank 0, or open the network there")
    # Not known there.
    at(port, node=1, address="192.0.2.1").check()


def test_another_host_that_listens_at_the_same_port() -> None:
    """By an address of its own: here another one of the loopback, which what listens on the other does not take."""
    with socket.create_server(("127.0.0.1", 0)) as other, socket.socket() as own:
        port = other.getsockname()[1]
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(("127.0.0.2", port))
        own.listen()
        with pytest.raises(ConnectionError, match="another host has that address"):
            address._come_back(own, "127.0.0.1", port)


def test_ranks_of_other_hosts_that_come_first_change_nothing() -> None:
    port, stopping = free_port(), threading.Event()

    def knock() -> None:
        while not stopping.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(b"\0hello")
                connection.recv(1)

    threads = [threading.Thread(target=knock, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            at(port).check()
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    listen(port, on_one_host=False).close()
