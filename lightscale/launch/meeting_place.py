"""The store in which ranks meet: opened at rank 0's address, or one line that reports what is there instead.

torch's client waits for ever for a program that accepts connections and does not answer, such as a hanging rank. It
prints stacks for other answers, or for no program. So the address is probed first.
"""

import contextlib
import os
import secrets
import socket
import struct
import time
from datetime import timedelta

import torch.distributed as dist

from lightscale.launch.environment import RankEnvironment
from lightscale.launch.launcher.rendezvous import (
    RELEASE_S,
    CannotStart,
    foreign_address,
    in_use,
    unknown_address,
)
from lightscale.parallel.rendezvous.gate import NoGate, WrongKey, pass_gate
from lightscale.parallel.rendezvous.rank_store import gate_secret, join_store, serve_store, serves_store
from lightscale.parallel.rendezvous.sockets import KEY_VARIABLE, LOOPBACK

# Of one attempt to connect, and of the answer.
_ATTEMPT_S, _ANSWER_S = 1.0, 5.0
_PAUSE_S = 0.2
# How torch's store is asked whether it is one: VALIDATE with its number, then PING, which it answers with our number.
_VALIDATE, _PING, _MAGIC = 0, 13, 0x3C85F7CE


class _Stranger(Exception):
    """What listens there is no store; the text says what it does."""


class _Silent(OSError):
    """What listens there does not answer, which may pass."""


class MeetingPlace:
    """Rank 0's address, for one rank; it waits until `deadline` of the monotonic clock."""

    def __init__(self, environment: RankEnvironment, deadline: float) -> None:
        self._environment, self.deadline, self.is_one_host = environment, deadline, environment.is_one_host
        self._host, self._port = environment.address, environment.master_port
        self.place = f"{self._host}:{self._port}"
        self._secret = gate_secret(os.environ, on_one_host=self.is_one_host)

    def open(self) -> dist.Store:
        """Open the store, served by rank 0 or by torchrun's agent. Raises CannotStart."""
        serves = serves_store(os.environ, self._environment.rank)
        store = self._serve() if serves else None
        self._await_server(serves)
        try:
            return store or join_store(self._host, self._port, secret=self._secret, timeout=self._timeout)
        except OSError as error:
            # It has just answered: rank 0 has ended since.
            raise CannotStart(self._unreachable(serves, error)) from None

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=max(_ATTEMPT_S, self._left_s()))

    def _serve(self) -> dist.Store | None:
        """The server, by this host's loopback: its own name may lead elsewhere. None: another rank 0 on it serves."""
        last = min(self.deadline, time.monotonic() + RELEASE_S)
        while True:
            with contextlib.suppress(OSError):
                return serve_store(self._port, secret=self._secret, timeout=self._timeout)
            try:
                self._ask(LOOPBACK)
                # It will say so.
                return None
            except (OSError, _Stranger) as error:
                if time.monotonic() > last:
                    raise CannotStart(in_use(self._port, self.place, f" ({error})")) from None
            time.sleep(_PAUSE_S)

    def _await_server(self, serves: bool) -> None:
        while True:
            try:
                return self._ask(self._host)
            except _Stranger as error:
                raise CannotStart(self._unreachable(serves, error)) from None
            except OSError as error:
                if self._left_s() <= 0:
                    raise CannotStart(self._unreachable(serves, error)) from None
            time.sleep(_PAUSE_S)

    def _unreachable(self, serves: bool, error: Exception) -> str:
        who = "rank 0 cannot reach itself" if serves else f"rank 0 of {self._environment.world_size} cannot be reached"
        if isinstance(error, socket.gaierror):
            why = unknown_address()
        elif isinstance(error, _Stranger | _Silent):
            why = (
                "end it if it is a hanging rank, set another MASTER_PORT (--master-port), or set MASTER_ADDR "
                "(--master-addr) to rank 0's host"
            )
        elif isinstance(error, WrongKey):
            why = f"set the same {KEY_VARIABLE} on all hosts, or another MASTER_PORT (--master-port)"
        elif serves:
            why = foreign_address()
        else:
            why = (
                "start it, set MASTER_ADDR and MASTER_PORT (--master-addr, --master-port) to its address, or open the "
                "network"
            )
            if self.is_one_host:
                why = f"start it on this host, where all {self._environment.world_size} ranks are by LOCAL_WORLD_SIZE"
        return f"{who} at {self.place} ({error}): {why}"

    def _ask(self, host: str) -> None:
        """Return if a store answers there. Raises OSError, which may pass, or _Stranger."""
        number = secrets.token_bytes(4)
        with self._connect(host) as connection:
            connection.settimeout(max(_ATTEMPT_S, min(_ANSWER_S, self._left_s())))
            answer = b""
            try:
                connection.sendall(struct.pack("=BIB", _VALIDATE, _MAGIC, _PING) + number)
                while len(answer) < len(number):
                    more = connection.recv(len(number) - len(answer))
                    if not more:
                        raise ConnectionResetError
                    answer += more
            except TimeoutError:
                raise _Silent("the program there does not answer") from None
            except ConnectionError:
                raise _Silent("the program there closes connections") from None
        if answer != number:
            raise _Stranger("the program there is no torch store")

    def _connect(self, host: str) -> socket.socket:
        """Connect to the store, through its gate where there is one."""
        if self._secret is None:
            return socket.create_connection((host, self._port), timeout=_ATTEMPT_S)
        try:
            return pass_gate(host, self._port, self._secret, max(_ATTEMPT_S, min(_ANSWER_S, self._left_s())))
        except NoGate as error:
            raise _Stranger(str(error)) from None
        except TimeoutError:
            raise _Silent("the program there does not answer") from None
        except ConnectionResetError:
            raise _Silent("the program there closes connections") from None

    def _left_s(self) -> float:
        return self.deadline - time.monotonic()
