"""What listens at rank 0's address, or does not: one line with host, port and remedy, within the time-out."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from lightscale.launch import meeting, meeting_place
from lightscale.launch.environment import RankEnvironment
from lightscale.launch.launcher.rendezvous import CannotStart
from lightscale.launch.meeting_place import MeetingPlace
from lightscale.launch.rank_facts import RankFacts
from lightscale.parallel.rendezvous.rank_store import gate_secret, join_store, private, serve_store

SHORT_S = 1.0
# What a busy machine may add.
PATIENCE_S = 10.0
HOST = socket.gethostname()

Talk = Callable[[socket.socket], object]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_place, "_ANSWER_S", 0.5)
    monkeypatch.setattr(meeting_place, "_ATTEMPT_S", 0.5)
    monkeypatch.setattr(meeting_place, "RELEASE_S", SHORT_S)


def place(rank: int, port: int, host: str = "127.0.0.1") -> RankEnvironment:
    return RankEnvironment(
        launcher="a test",
        rank=rank,
        world_size=2,
        # As on two hosts: those of one host meet on its loopback.
        local_rank=0,
        local_world_size=1,
        master_address=host,
        master_port=port,
    )


@contextlib.contextmanager
def listening(talk: Talk | None) -> Iterator[int]:
    """The port of a program that does `talk` with whoever connects; None: it accepts nobody."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(server.accept()[0])
                    assert talk is not None
                    talk(kept[-1])

        if talk is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        # Wakes the thread.
        server.shutdown(socket.SHUT_RDWR)
        for one in kept:
            one.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def refusal(rank: int, port: int, host: str = "127.0.0.1") -> str:
    began = time.monotonic()
    with pytest.raises(CannotStart) as caught:
        MeetingPlace(place(rank, port, host), began + SHORT_S).open()
    assert time.monotonic() - began < SHORT_S + PATIENCE_S
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    return said


@pytest.mark.parametrize(
    ("talk", "says"),
    [
        (None, "does not answer"),
        (lambda connection: None, "does not answer"),
        (lambda connection: connection.close(), "closes connections"),
        (lambda connection: connection.sendall(b"SSH-2.0-OpenSSH\r\n"), "is no rendezvous of lightscale"),
    ],
)
def test_a_port_that_something_else_has(talk: Talk | None, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    with listening(talk) as port:
        serving, joining = refusal(0, port), refusal(1, port)
    assert serving.startswith(f"rank 0 cannot serve at 127.0.0.1:{port}: port {port} of {HOST} is in use by process ")
    assert f"process {os.getpid()} (" in serving
    assert serving.endswith(f"(the program there {says}); end it, or set another MASTER_PORT (--master-port)")
    assert joining.startswith(f"rank 0 of 2 cannot be reached at 127.0.0.1:{port} (the program there {says}): end ")
    assert "MASTER_PORT" in joining
    # torch's own words about it are stacks.
    assert capfd.readouterr() == ("", "")


def test_nobody_there_and_names_without_address(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert "start it, set MASTER_ADDR and MASTER_PORT (--master-addr, --master-port) to its address" in refusal(1, port)
    for rank in (0, 1):
        said = refusal(rank, port, "no-such-host.invalid")
        assert f"no-such-host.invalid:{port} (" in said
        assert f"{HOST} cannot resolve that name; set MASTER_ADDR" in said
    # An address that is nobody's here: packets to it are refused, or answered by nobody.
    said = refusal(0, port, "192.0.2.1")
    assert said.startswith(f"rank 0 cannot reach itself at 192.0.2.1:{port} (")
    assert f"set MASTER_ADDR (--master-addr) to {HOST}" in said or "set another MASTER_PORT" in said
    assert capfd.readouterr() == ("", "")


def test_a_port_that_is_let_go_of_in_time() -> None:
    """As by a process of the start before, which is about to end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Timer(SHORT_S / 2, server.close).start()
        store = MeetingPlace(place(0, port), time.monotonic() + PATIENCE_S).open()
    store.set("key", "value")
    again = MeetingPlace(place(1, port), time.monotonic() + PATIENCE_S).open()
    assert again.get("key") == b"value"


def test_rank_0_is_stopped_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_VERDICT_S", "_FAREWELL_S"):
        monkeypatch.setattr(meeting, name, 0.5)
    port, (read, write) = free_port(), os.pipe()
    server = os.fork()
    if server == 0:
        store: Any = serve_store(port, secret=gate_secret(os.environ, on_one_host=False), timeout=timedelta(seconds=60))
        store.set("there", "")
        os.write(write, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(read, 1) == b"x"
        facts = RankFacts(rank=1, world_size=2, host="A", process=1, values={})
        # Not the first to come: it only waits.
        store = join_store(
            "127.0.0.1", port, secret=gate_secret(os.environ, on_one_host=False), timeout=timedelta(seconds=60)
        )
        private(store, os.environ, "meeting").add("arrived", 1)
        began = time.monotonic()
        threading.Timer(SHORT_S / 2, os.kill, (server, signal.SIGSTOP)).start()
        with pytest.raises(CannotStart) as caught:
            meeting.agree(place(1, port), facts, SHORT_S)
        assert time.monotonic() - began < SHORT_S + 4 * 0.5 + PATIENCE_S
        assert f"rank 0 at 127.0.0.1:{port} no longer answers: its process is stopped" in str(caught.value)
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
