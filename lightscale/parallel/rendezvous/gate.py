"""A challenge before the store of ranks on several hosts: who has not the key reaches no byte of torch's protocol.

torch's store has no keys. Here it listens on the loopback of rank 0's host, and this gate on all interfaces:

    a rank's torch client -> its loopback: `Door` ==> network ==> `Gate`: rank 0's loopback -> torch's store

Gate and door prove to each other that they have the key: the gate sends a nonce, the door its own and an HMAC-SHA256
over both, the gate another one. Only then bytes pass. They are not encrypted: who can change packets of the network can
change them. A door serves its own user only, whose sockets the kernel names in /proc.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lightscale.parallel.rendezvous.sockets import KEY_VARIABLE, LOOPBACK, listen

_GREETING = b"lightscale gate 1\n"
_NONCE_BYTES = _PROOF_BYTES = 32
# For the whole exchange, on a loaded machine over a slow network.
_HANDSHAKE_S = 10.0
_ATTEMPT_S, _PAUSE_S = 5.0, 0.2
# Connections that have proved nothing: beyond this number the oldest is closed. Ranks that lose theirs, of very many at
# once, come again.
MOST_PENDING = 512
_BUFFER_BYTES = 1 << 18
# Between the last connection's end and the door's: a rank's client may be connecting.
_GRACE_S = 5.0


class NoGate(OSError):
    """What listens there is no gate."""


class WrongKey(OSError):
    """The gate there has another key."""


def _proof(secret: str, role: str, gate_nonce: bytes, door_nonce: bytes) -> bytes:
    key = hashlib.sha256(secret.encode()).digest()
    return hmac.digest(key, role.encode() + gate_nonce + door_nonce, "sha256")


def pass_gate(address: str, port: int, secret: str, timeout_s: float) -> socket.socket:
    """Connect to the store behind the gate at ``address``. Raises NoGate, WrongKey, or another OSError."""
    connection = socket.create_connection((address, port), timeout=min(_ATTEMPT_S, timeout_s))
    try:
        connection.settimeout(timeout_s)
        greeting = b""
        while greeting != _GREETING:
            # A program that greets otherwise may say less, and then wait.
            greeting += _receive(connection, 1)
            if not _GREETING.startswith(greeting):
                raise NoGate("the program there is no rendezvous of lightscale")
        gate_nonce, door_nonce = _receive(connection, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(door_nonce + _proof(secret, "door", gate_nonce, door_nonce))
        try:
            proof = _receive(connection, _PROOF_BYTES)
        except ConnectionError:
            proof = b""
        if not hmac.compare_digest(proof, _proof(secret, "gate", gate_nonce, door_nonce)):
            raise WrongKey(f"the rendezvous there has another {KEY_VARIABLE}")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def await_gate(address: str, port: int, secret: str, timeout_s: float) -> socket.socket:
    """As ``pass_gate``, again and again for ``timeout_s``: rank 0 may begin later, or another gate be there yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return pass_gate(address, port, secret, _ATTEMPT_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the program there closes connections")
        data += more
    return data


@dataclass(eq=False)
class _End:
    """One socket of a pair whose bytes go to the other."""

    connection: socket.socket
    waiting: bytearray = field(default_factory=bytearray)
    """To be sent to it."""
    other: "_End | None" = None
    has_ended: bool = False
    """Whether it sends no more."""
    wanted: int = 0
    """Events that are waited for."""


@dataclass(eq=False)
class _Pending:
    """A connection that has proved nothing yet."""

    connection: socket.socket
    nonce: bytes
    until_s: float
    data: bytearray = field(default_factory=bytearray)


class _Relay(ABC):
    """A thread that passes bytes between pairs of sockets, as long as `runs`."""

    def __init__(self, listener: socket.socket, name: str) -> None:
        self._listener, self._selector = listener, selectors.DefaultSelector()
        self._ends: set[_End] = set()
        self.is_closed = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    @abstractmethod
    def _accept(self) -> None:
        """A connection waits at the listener."""

    @abstractmethod
    def _look(self) -> None:
        """Called at least once a second."""

    def _work(self) -> None:
        try:
            while not self.is_closed:
                for key, events in self._selector.select(1.0):
                    handler: Callable[[], None] | _End = key.data
                    if isinstance(handler, _End):
                        self._pass(handler, events)
                    else:
                        handler()
                self._look()
        finally:
            # Also the pairs that wait for nothing just now.
            for end in list(self._ends):
                self._part(end)
            for key in list(self._selector.get_map().values()):
                with contextlib.suppress(OSError):
                    socket.socket.close(key.fileobj)  # type: ignore[arg-type]
            self._selector.close()

    def _join(self, first: socket.socket, second: socket.socket) -> None:
        """Pass bytes between two connected sockets from now on."""
        ends = _End(first), _End(second)
        for end, other in (ends, ends[::-1]):
            end.other = other
            end.connection.setblocking(False)
            with contextlib.suppress(OSError):
                # Requests of a few bytes, each of which is waited for.
                end.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends.add(end)
            self._watch(end)

    def _watch(self, end: _End) -> None:
        """Wait for what can be done with it: reading, as long as the other side takes it, and sending what waits."""
        assert end.other is not None, "ends come in pairs"
        reads = not end.has_ended and len(end.other.waiting) < _BUFFER_BYTES
        wanted = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if end.waiting else 0)
        if wanted == end.wanted:
            return
        # Selectors do not take 0.
        if not wanted:
            self._selector.unregister(end.connection)
        elif end.wanted:
            self._selector.modify(end.connection, wanted, end)
        else:
            self._selector.register(end.connection, wanted, end)
        end.wanted = wanted

    def _pass(self, end: _End, events: int) -> None:
        other = end.other
        assert other is not None, "ends come in pairs"
        if end not in self._ends:
            return
        try:
            if events & selectors.EVENT_READ:
                data = end.connection.recv(_BUFFER_BYTES)
                end.has_ended = not data
                other.waiting += data
            for one in (end, other):
                if one.waiting:
                    with contextlib.suppress(BlockingIOError):
                        del one.waiting[: one.connection.send(one.waiting)]
        except BlockingIOError:
            return
        except OSError:
            self._part(end)
            return
        if any(one.has_ended and not to.waiting for one, to in ((end, other), (other, end))):
            self._part(end)
            return
        self._watch(end)
        self._watch(other)

    def _part(self, end: _End) -> None:
        for one in (end, end.other):
            if one is not None and one in self._ends:
                self._ends.remove(one)
                if one.wanted:
                    self._selector.unregister(one.connection)
                one.connection.close()


class Gate(_Relay):
    """The gate at ``listener``, before the store at ``port`` of the loopback; it ends when that store does."""

    def __init__(self, listener: socket.socket, port: int, secret: str) -> None:
        super().__init__(listener, "rendezvous gate")
        self._port, self._secret = port, secret
        self._pending: dict[_Pending, None] = {}
        # The store closes it at its end, and never sends anything by itself.
        self._life_line = socket.create_connection((LOOPBACK, port), timeout=_ATTEMPT_S)
        self._life_line.setblocking(False)
        self._selector.register(self._life_line, selectors.EVENT_READ, self._end)
        self._thread.start()

    def _end(self) -> None:
        self.is_closed = True

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            pending = _Pending(connection, secrets.token_bytes(_NONCE_BYTES), time.monotonic() + _HANDSHAKE_S)
            self._pending[pending] = None
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(pending))
            if len(self._pending) > MOST_PENDING:
                self._drop(next(iter(self._pending)))
            # A new connection has room for it.
            connection.send(_GREETING + pending.nonce)

    def _hear(self, pending: _Pending) -> None:
        if pending not in self._pending:
            return
        size = _NONCE_BYTES + _PROOF_BYTES
        try:
            data = pending.connection.recv(size - len(pending.data))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        pending.data += data
        if data and len(pending.data) < size:
            return
        door_nonce, proof = bytes(pending.data[:_NONCE_BYTES]), bytes(pending.data[_NONCE_BYTES:])
        if not data or not hmac.compare_digest(proof, _proof(self._secret, "door", pending.nonce, door_nonce)):
            self._drop(pending)
            return
        self._admit(pending, _proof(self._secret, "gate", pending.nonce, door_nonce))

    def _admit(self, pending: _Pending, proof: bytes) -> None:
        try:
            pending.connection.send(proof)
            inside = socket.create_connection((LOOPBACK, self._port), timeout=_ATTEMPT_S)
        except OSError:
            self._drop(pending)
            return
        del self._pending[pending]
        self._selector.unregister(pending.connection)
        self._join(pending.connection, inside)

    def _drop(self, pending: _Pending) -> None:
        del self._pending[pending]
        self._selector.unregister(pending.connection)
        pending.connection.close()

    def _look(self) -> None:
        now = time.monotonic()
        for pending in [one for one in self._pending if one.until_s < now]:
            self._drop(pending)


class Door(_Relay):
    """A port of the loopback that leads through the gate at ``address``, for processes of this user.

    ``first`` has passed the gate, for the first client. The door ends when the clients that used it have.
    """

    def __init__(self, address: str, port: int, secret: str, first: socket.socket) -> None:
        super().__init__(listen(0, on_one_host=True), "rendezvous door")
        self.port = int(self._listener.getsockname()[1])
        self._where, self._first = (address, port, secret), [first]
        self._alone_since_s: float | None = None
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, peer = self._listener.accept()
            if not is_own(peer[1], self.port):
                connection.close()
                return
            try:
                outside = self._first.pop() if self._first else await_gate(*self._where, _HANDSHAKE_S)
            except OSError:
                connection.close()
                raise
            self._join(connection, outside)
            self._alone_since_s = time.monotonic()

    def _look(self) -> None:
        if self._ends:
            self._alone_since_s = time.monotonic()
        elif self._alone_since_s is not None and time.monotonic() > self._alone_since_s + _GRACE_S:
            self.is_closed = True


def is_own(peer_port: int, port: int) -> bool:
    """Whether the connection from ``peer_port`` to ``port`` of the loopback is this user's, as the kernel says."""
    address = bytes(reversed(socket.inet_aton(LOOPBACK))).hex().upper()
    # torch's client has a socket of IPv6, with the address in its last part.
    hosts = address, f"0000000000000000FFFF0000{address}"
    ends = {(f"{host}:{peer_port:04X}", f"{host}:{port:04X}") for host in hosts}
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    # Without them nobody can tell, as on other systems than Linux.
    if not tables[0].exists():
        return True
    for table in tables:
        lines = table.read_text(encoding="ascii").splitlines() if table.exists() else []
        for words in map(str.split, lines[1:]):
            if (words[1], words[2]) in ends:
                return int(words[7]) == os.getuid()
    return False
