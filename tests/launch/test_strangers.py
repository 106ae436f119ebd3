"""Programs that reach the address of a rendezvous without its key: they change nothing, and nothing waits for them.

The gate alone, with a stand-in for torch's store, is tested in tests/parallel/rendezvous.
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

from lightscale.errors import UserError
from lightscale.launch.environment import RankEnvironment
from lightscale.launch.launcher.agents import BACKEND, AgentRendezvous
from lightscale.launch.launcher.rendezvous import CannotStart
from lightscale.launch.meeting import agree
from lightscale.launch.rank_facts import RankFacts
from lightscale.launch.slurm.allocation import step_environment
from lightscale.parallel.rendezvous.gate import WrongKey, await_gate
from lightscale.parallel.rendezvous.rank_store import gate_secret, join_store, private
from lightscale.parallel.rendezvous.sockets import GATED_VARIABLE, KEY_VARIABLE, listen

TIMEOUT_S = 120.0
KEY = "the key of the run"
# To torch's store: its greeting and a command that there is not, a key that is longer than all memory, and no greeting.
GARBAGE = [
    b"\x00\xce\xf7\x85\x3c\xff\xff",
    b"\x00\xce\xf7\x85\x3c\x01" + b"\xff" * 64,
    b"GET / HTTP/1.0\r\n\r\n",
    bytes(range(256)),
]


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with listen(0, on_one_host=True) as free:
        return int(free.getsockname()[1])


def rank(number: int, port: int, timeout_s: float = TIMEOUT_S) -> dist.Store:
    """A rank on a host of its own meets the other one."""
    environment = RankEnvironment(
        launcher="a test",
        rank=number,
        world_size=2,
        local_rank=0,
        local_world_size=1,
        master_address="127.0.0.1",
        master_port=port,
    )
    facts = RankFacts(rank=number, world_size=2, host="AB"[number], process=number, values={"lr": "1"})
    return agree(environment, facts, timeout_s)


def forge(port: int, key: str) -> None:
    """Give a verdict of its own to all who have that key, as the first who arrives would."""
    server = join_store("127.0.0.1", port, secret=key, timeout=timedelta(seconds=1 if key != KEY else TIMEOUT_S))
    store = private(server, {KEY_VARIABLE: key}, "meeting")
    store.add("arrived", 1)
    store.set("facts-1", "no facts")
    store.set("verdict", json.dumps({"error": "a stranger was here", "is_mistake": True}))


@contextlib.contextmanager
def strangers(port: int) -> Iterator[Callable[[], int]]:
    """Connections that send garbage, and some that send nothing, again and again; gives their number so far."""
    is_over, silent, count = threading.Event(), [], 0

    def knock() -> None:
        nonlocal count
        while not is_over.wait(0.05):
            for garbage in (*GARBAGE, b""):
                with contextlib.suppress(OSError):
                    connection = socket.create_connection(("127.0.0.1", port), timeout=1)
                    connection.sendall(garbage)
                    count += 1
                    if garbage or len(silent) > 20:
                        connection.close()
                    else:
                        silent.append(connection)

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        yield lambda: count
    finally:
        is_over.set()
        thread.join()
        for connection in silent:
            connection.close()


def test_ranks_meet_among_strangers(port: int) -> None:
    with ThreadPoolExecutor(2) as threads, strangers(port) as count:
        first = threads.submit(rank, 0, port)
        # Once it is there: none of these gets as far as torch's protocol.
        await_gate("127.0.0.1", port, KEY, TIMEOUT_S).close()
        for key in ("another key", ""):
            with pytest.raises(WrongKey):
                forge(port, key)
        with pytest.raises(dist.DistError):
            join_store("127.0.0.1", port, timeout=timedelta(seconds=1))
        seen = count()
        second = threads.submit(rank, 1, port)
        stores = [first.result(TIMEOUT_S), second.result(TIMEOUT_S)]
        while count() < seen + 2 * len(GARBAGE):
            stores[1].add("asked", 1)
        stores[1].set("still", "there")
        assert stores[0].get("still") == b"there"


@pytest.mark.long
def test_a_rank_with_another_key_is_told(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(rank, 0, port, 20.0)
        await_gate("127.0.0.1", port, KEY, TIMEOUT_S).close()
        monkeypatch.setenv(KEY_VARIABLE, "another key")
        with pytest.raises(CannotStart, match=f"another {KEY_VARIABLE}.*set the same {KEY_VARIABLE} on all hosts"):
            rank(1, port, 1.0)
        assert "1 did not come" in str(first.exception(TIMEOUT_S))


@pytest.mark.long
def test_who_has_the_key_is_believed(port: int) -> None:
    """What the test above rests on: the same words with the key end the meeting."""
    with ThreadPoolExecutor(1) as threads:
        # It may wait in vain for the other one, which has left.
        first = threads.submit(rank, 0, port, 30.0)
        forge(port, KEY)
        with pytest.raises(UserError, match=r"a stranger was here|no facts"):
            rank(1, port)
        first.exception(TIMEOUT_S)


def agent(node: int, port: int, timeout_s: float = TIMEOUT_S) -> RendezvousInfo:
    params = RendezvousParameters(
        BACKEND, f"127.0.0.1:{port}", "logs/launch-0001", 2, 2, node=node, timeout=int(timeout_s)
    )
    handler = AgentRendezvous(params)
    assert handler.use_agent_store
    return handler.next_rendezvous()


def test_agents_meet_among_strangers(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GATED_VARIABLE, raising=False)
    with ThreadPoolExecutor(1) as threads, strangers(port):
        joining = threads.submit(agent, 1, port)
        serving = agent(0, port)
        serving.store.set("key", "value")
        assert joining.result(TIMEOUT_S).store.get("key") == b"value"
        # Their ranks ask for the key as well.
        ranks = {"TORCHELASTIC_USE_AGENT_STORE": "True", KEY_VARIABLE: KEY, GATED_VARIABLE: os.environ[GATED_VARIABLE]}
        assert gate_secret(ranks, on_one_host=False) == KEY
        monkeypatch.setenv(KEY_VARIABLE, "another key")
        with pytest.raises(WrongKey):
            agent(1, port, 1.0)
        assert serving.store.get("key") == b"value"


def test_where_there_is_a_gate() -> None:
    theirs = {"TORCHELASTIC_USE_AGENT_STORE": "True", KEY_VARIABLE: KEY}
    assert gate_secret({KEY_VARIABLE: KEY}, on_one_host=False) == KEY
    assert gate_secret({}, on_one_host=False) == ""
    # torchrun serves its store itself; and on one host nothing listens beyond the loopback.
    assert gate_secret(theirs, on_one_host=False) is None
    assert gate_secret({KEY_VARIABLE: KEY}, on_one_host=True) is None


def test_the_agent_of_one_node_listens_nowhere() -> None:
    handler = AgentRendezvous(RendezvousParameters(BACKEND, "", "logs/launch-0001", 1, 1, node=0, timeout=1))
    found = handler.next_rendezvous()
    assert isinstance(found.store, dist.HashStore)
    assert found.bootstrap_store_info.master_addr == "127.0.0.1"
    assert not handler.use_agent_store


def test_every_step_of_a_job_has_a_key_of_its_own() -> None:
    first, second = (step_environment({"PATH": "/bin", "SLURM_NTASKS": "3"}) for _ in range(2))
    assert first.keys() == {"PATH", "PYTHONSAFEPATH", KEY_VARIABLE}
    assert len(first[KEY_VARIABLE]) == 64
    assert first[KEY_VARIABLE] != second[KEY_VARIABLE]
    # The user's own counts.
    assert step_environment({KEY_VARIABLE: KEY})[KEY_VARIABLE] == KEY
    assert os.environ.get(KEY_VARIABLE) is None
