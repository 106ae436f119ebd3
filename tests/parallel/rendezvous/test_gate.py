"""The gate before the store of several hosts, with real sockets: who passes, and who changes nothing."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from lightscale.parallel.rendezvous import gate
from lightscale.parallel.rendezvous.gate import (
    Door,
    Gate,
    NoGate,
    WrongKey,
    await_gate,
    is_own,
    pass_gate,
)
from lightscale.parallel.rendezvous.sockets import LOOPBACK, listen

KEY, TIMEOUT_S = "the key of the run", 60.0


class Echo:
    """Stands in for torch's store: it gives back what it gets, and counts connections and bytes."""

    def __init__(self) -> None:
        self.listener = listen(0, on_one_host=True)
        self.port = int(self.listener.getsockname()[1])
        self.connections: list[socket.socket] = []
        self.num_bytes = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.connections.append(connection)
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                self.num_bytes += len(data)
                connection.sendall(data)

    def end(self) -> None:
        # Not close alone: accept would keep it open.
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    one = Echo()
    yield one
    one.end()


@pytest.fixture
def port(echo: Echo) -> int:
    """Of a gate before the echo."""
    public = listen(0, on_one_host=True)
    Gate(public, echo.port, KEY)
    # The gate's own connection, which a slow machine accepts later than the gate has it.
    until(lambda: len(echo.connections) == 1)
    return int(public.getsockname()[1])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def exchange(connection: socket.socket, data: bytes) -> bytes:
    """Send and receive at once: more than all buffers hold."""
    sender = threading.Thread(target=connection.sendall, args=(data,))
    sender.start()
    found = bytearray()
    while len(found) < len(data):
        more = connection.recv(1 << 16)
        assert more, "the connection was closed"
        found += more
    sender.join()
    return bytes(found)


def test_who_has_the_key_passes(echo: Echo, port: int) -> None:
    # Larger than the buffers of sockets and gate, and sent faster than it is read.
    data = os.urandom(3 << 20)
    with pass_gate(LOOPBACK, port, KEY, TIMEOUT_S) as first, pass_gate(LOOPBACK, port, KEY, TIMEOUT_S) as second:
        assert exchange(first, data) == data
        assert exchange(second, b"x") == b"x"
    # The life line, and these two.
    assert len(echo.connections) == 3


def test_who_has_another_key_reaches_nothing(echo: Echo, port: int) -> None:
    for secret in ("another key", "", KEY + " "):
        with pytest.raises(WrongKey, match="another LIGHTSCALE_RENDEZVOUS_KEY"):
            pass_gate(LOOPBACK, port, secret, TIMEOUT_S)
    assert (len(echo.connections), echo.num_bytes) == (1, 0)


def test_a_proof_is_of_no_use_again(echo: Echo, port: int) -> None:
    """What a listener on the network has heard does not open the gate a second time."""

    def begin() -> tuple[socket.socket, bytes]:
        connection = socket.create_connection((LOOPBACK, port), timeout=TIMEOUT_S)
        gate._receive(connection, len(gate._GREETING))
        return connection, gate._receive(connection, 32)

    connection, nonce = begin()
    with connection:
        heard = bytes(32) + gate._proof(KEY, "door", nonce, bytes(32))
        connection.sendall(heard)
        answer = gate._receive(connection, 32)
        assert answer == gate._proof(KEY, "gate", nonce, bytes(32))
    connection, other = begin()
    with connection:
        assert other != nonce
        # Neither what the door has said, nor what the gate has.
        connection.sendall(heard)
        assert connection.recv(1) == b""
    connection, _ = begin()
    with connection:
        connection.sendall(bytes(32) + answer)
        assert connection.recv(1) == b""


def test_a_stranger_in_place_of_the_gate_gets_no_proof() -> None:
    with listen(0, on_one_host=True) as listener:
        port = listener.getsockname()[1]

        def pretend(answer: bytes) -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)
                with contextlib.suppress(ConnectionError):
                    connection.recv(1 << 10)
                    connection.sendall(bytes(32))

        for answer, error in ((b"HTTP/1.0 400 Bad Request\r\n\r\n", NoGate), (gate._GREETING + bytes(32), WrongKey)):
            thread = threading.Thread(target=pretend, args=(answer,))
            thread.start()
            with pytest.raises(error):
                pass_gate(LOOPBACK, port, KEY, TIMEOUT_S)
            thread.join()


def test_silent_and_noisy_strangers_hold_nothing(echo: Echo, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 40
    monkeypatch.setattr(gate, "MOST_PENDING", most)
    own = psutil.Process()
    noise = (b"", bytes(64), os.urandom(64), b"GET / HTTP/1.0\r\n\r\n", b"\x00\xce\xf7\x85\x3c\xff\xff")
    with pass_gate(LOOPBACK, port, KEY, TIMEOUT_S) as friend:
        before = own.num_fds()
        strangers = []
        for number in range(4 * most):
            strangers.append(socket.create_connection((LOOPBACK, port), timeout=TIMEOUT_S))
            strangers[-1].sendall(noise[number % len(noise)])
            if number % 50 == 0:
                assert exchange(friend, b"hello") == b"hello"
        # Ours, and those that the gate keeps.
        until(lambda: own.num_fds() - before - len(strangers) <= most)
        with pass_gate(LOOPBACK, port, KEY, TIMEOUT_S) as another:
            assert exchange(another, b"hello") == b"hello"
        for stranger in strangers:
            stranger.close()
    assert len(echo.connections) == 3


def test_more_ranks_at_once_than_may_be_pending(echo: Echo, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are dropped come again."""
    monkeypatch.setattr(gate, "MOST_PENDING", 1)
    with ThreadPoolExecutor(24) as pool:
        friends = list(pool.map(lambda _: await_gate(LOOPBACK, port, KEY, TIMEOUT_S), range(24)))
    for friend in friends:
        with friend:
            assert exchange(friend, b"hello") == b"hello"


def test_who_proves_nothing_in_time_is_dropped(echo: Echo, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_HANDSHAKE_S", 0.2)
    with socket.create_connection((LOOPBACK, port), timeout=TIMEOUT_S) as stranger:
        assert gate._receive(stranger, len(gate._GREETING) + 32)
        assert stranger.recv(1) == b""


def test_the_gate_ends_with_its_store(echo: Echo, port: int) -> None:
    friend = pass_gate(LOOPBACK, port, KEY, TIMEOUT_S)
    echo.end()
    assert friend.recv(1) == b""
    # The port is free for the next start.
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            listen(port, on_one_host=True).close()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_door_leads_through_the_gate(echo: Echo, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_GRACE_S", 0.1)
    door = Door(LOOPBACK, port, KEY, await_gate(LOOPBACK, port, KEY, TIMEOUT_S))
    dropped = iter([True])

    def passed(*where: Any) -> socket.socket:
        """The gate closes the second connection's first attempt, as with many ranks at once."""
        if next(dropped, False):
            raise ConnectionResetError
        return pass_gate(*where)

    monkeypatch.setattr(gate, "pass_gate", passed)
    data = os.urandom(1 << 20)
    with (
        socket.create_connection((LOOPBACK, door.port)) as first,
        socket.create_connection((LOOPBACK, door.port)) as two,
    ):
        assert exchange(first, data) == data
        assert exchange(two, data) == data
    until(lambda: not door._thread.is_alive())


def test_a_door_waits_for_its_gate(echo: Echo) -> None:
    with listen(0, on_one_host=True) as free:
        port = int(free.getsockname()[1])
    began = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        await_gate(LOOPBACK, port, KEY, 0.5)
    assert time.monotonic() - began >= 0.5
    threading.Timer(0.5, lambda: Gate(listen(port, on_one_host=True), echo.port, KEY)).start()
    await_gate(LOOPBACK, port, KEY, TIMEOUT_S).close()


CLIENT = """
import encodings.idna, os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60) as connection:
    try:
        connection.sendall(b"hello")
        print(connection.recv(5).decode() or "closed")
    except ConnectionError:
        print("closed")
"""


def test_a_door_is_its_users_own(echo: Echo, port: int, needs: Callable[..., None]) -> None:
    needs("root")
    door = Door(LOOPBACK, port, KEY, await_gate(LOOPBACK, port, KEY, TIMEOUT_S))
    found = []
    for user in (65534, 0):
        words = [sys.executable, "-c", CLIENT, str(door.port), str(user)]
        done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
        found.append(done.stdout.strip())
    assert found == ["closed", "hello"]


def test_whose_connection_it_is() -> None:
    with listen(0, on_one_host=True) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((LOOPBACK, port)) as connection:
            assert is_own(connection.getsockname()[1], port)
            assert not is_own(port, connection.getsockname()[1] ^ 1)
        # As torch's client does.
        with socket.socket(socket.AF_INET6) as connection:
            connection.connect((f"::ffff:{LOOPBACK}", port))
            assert is_own(connection.getsockname()[1], port)
