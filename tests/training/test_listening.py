"""What a run on one host lets others reach: it listens on the loopback interface alone; no secret is in its files."""

import os
import socket
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from lightscale.parallel.mesh import start_mesh
from lightscale.parallel.rendezvous.sockets import GLOO_VARIABLE, NCCL_VARIABLE
from lightscale.runs.run_directory import RunDirectory

Running = Any
PATIENCE_S = 200.0
LOOPBACK = ("127.0.0.1", "::1")
SECRETS = {"WANDB_API_KEY": "a-key-of-wandb", "HF_TOKEN": "a-token-of-the-hub", "AWS_SECRET_ACCESS_KEY": "a-key-of-s3"}


def listening(process: psutil.Process) -> list[str]:
    """Addresses at which it and its children listen."""
    family = [process, *process.children(recursive=True)]
    found = [one for member in family for one in member.net_connections() if one.status == psutil.CONN_LISTEN]
    return [one.laddr.ip for one in found]


def test_launcher_and_ranks(start: Callable[..., Running], workplace: Any) -> None:
    words = ["run.toml", "parallel.sequence=2", "train.steps=100000", "--run", "runs/listening", "--processes", "2"]
    running = start(*words, 'metrics.sinks=["jsonl", "tensorboard"]', env=SECRETS)
    running.wait_for_step(RunDirectory(workplace / "runs/listening"), 1)
    found = listening(psutil.Process(running.process.pid))
    # The store of the ranks, and gloo's listener of each group.
    assert len(found) > 4
    assert set(found) <= set(LOOPBACK)
    files = [path for path in (workplace / "runs/listening").rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 5
    umask = os.umask(0)
    os.umask(umask)
    for path in files:
        content = path.read_bytes()
        assert not any(secret.encode() in content for secret in SECRETS.values()), path
        assert not path.stat().st_mode & umask, path


def test_ranks_by_hand(start: Callable[..., Running], workplace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rank 0's address is that of the host in its network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ["run.toml", "parallel.sequence=2", "train.steps=100000", "--run", "runs/by-hand"]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(port)}
    ranks = [start(*words, env={**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    ranks[0].wait_for_step(RunDirectory(workplace / "runs/by-hand"), 1)
    found = [listening(psutil.Process(rank.process.pid)) for rank in ranks]
    assert min(map(len, found)) > 2
    assert {one for each in found for one in each} <= set(LOOPBACK)


def addresses_of_one(rank: int, world_size: int, init_method: str) -> tuple[list[str], list[str | None]]:
    with start_mesh(device="cpu", timeout_s=60):
        found = listening(psutil.Process())
    return found, [os.environ.get(name) for name in (GLOO_VARIABLE, NCCL_VARIABLE)]


def test_a_single_process(run_ranks: Callable[..., list[Any]]) -> None:
    found, left = run_ranks(addresses_of_one, 1)[0]
    assert found
    assert set(found) <= set(LOOPBACK)
    # A program that uses lightscale as a library may have groups of its own.
    assert left == [None, None]
