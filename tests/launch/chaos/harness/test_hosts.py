"""Hosts that are network namespaces: what reaches whom, and that nothing of them is left."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lightscale.errors import UserError
from lightscale.launch.chaos.harness.hosts import NamespaceHost, namespace_hosts, stem_of

STEM = f"lstest{os.getpid()}"
# Sends each connection a megabyte, and reads one byte of it before.
SERVER = """
import socket
server = socket.create_server(("", 9))
print(socket.gethostname(), flush=True)
while True:
    connection, _ = server.accept()
    connection.recv(1)
    connection.sendall(bytes(1 << 20))
    connection.close()
"""
CLIENT = """
import socket, sys, time
began = time.monotonic()
connection = socket.create_connection((sys.argv[1], 9), timeout=float(sys.argv[2]))
connection.sendall(b"a")
while connection.recv(1 << 16):
    pass
print(time.monotonic() - began)
"""


@pytest.fixture
def hosts(needs: Callable[..., None]) -> Iterator[Sequence[NamespaceHost]]:
    needs("root", "ip", "tc", "unshare")
    with contextlib.ExitStack() as stack:
        try:
            pair = stack.enter_context(namespace_hosts(STEM, 2))
        except UserError as error:
            pytest.skip(str(error))
        yield pair


def python(host: NamespaceHost, program: str, *words: str) -> subprocess.Popen[str]:
    command = host.inside([sys.executable, "-IS", "-c", program, *words])
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def reach(host: NamespaceHost, other: NamespaceHost, timeout_s: float) -> float | None:
    """Seconds in which a megabyte comes; None: a packet does not within the time-out."""
    said, _ = python(host, CLIENT, other.address, str(timeout_s)).communicate(timeout=60)
    return float(said) if said else None


def listed() -> list[str]:
    said = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in said.splitlines() if line.startswith(STEM)]


def test_links(hosts: Sequence[NamespaceHost]) -> None:
    first, second = hosts
    server = python(second, SERVER)
    assert server.stdout is not None and server.stdout.readline() == "node-b\n"
    assert server.pid in second.processes() and first.processes() == []
    assert reach(first, second, 20) is not None
    for begin, end in (
        (lambda: second.set_link(is_up=False), lambda: second.set_link(is_up=True)),
        # Either direction is enough: nobody answers.
        (lambda: first.lose([second], is_on=True), lambda: first.lose([second], is_on=False)),
        (lambda: second.lose([first], is_on=True), lambda: second.lose([first], is_on=False)),
    ):
        begin()
        assert reach(first, second, 0.5) is None
        end()
        assert reach(first, second, 20) is not None
    # A megabyte is 8.4 Mbit.
    second.slow(16.0)
    slow_s = reach(first, second, 20)
    assert slow_s is not None and slow_s > 0.4
    second.slow(None)
    second.kill_processes()
    assert server.wait(timeout=20) == -9 and second.processes() == []


def test_nothing_is_left(needs: Callable[..., None]) -> None:
    needs("root", "ip", "tc", "unshare")
    with contextlib.suppress(UserError, KeyboardInterrupt), namespace_hosts(STEM, 2) as hosts:
        assert len(listed()) == 3
        sleeper = python(hosts[0], "import time; time.sleep(900)")
        while sleeper.pid not in hosts[0].processes():
            time.sleep(0.02)
        # As a killed campaign would: the next one of the name begins with what it has left.
        with namespace_hosts(STEM, 2) as again:
            assert sleeper.wait(timeout=20) == -9
            assert again[0].processes() == [] and again[0].variables != hosts[0].variables
        assert listed() == []
        raise KeyboardInterrupt
    assert listed() == []


def test_names_are_those_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert stem_of(Path("runs/one")) == stem_of(tmp_path / "runs/one") != stem_of(Path("runs/two"))
