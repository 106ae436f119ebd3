"""Two hosts, each with a network of its own and a torchrun that a user started there by hand; and their cable.

The hosts are network namespaces with names and addresses of their own, joined by a bridge in a third one, the switch.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 400.0
STEPS = 60
COLLECTIVE_TIMEOUT_S = 20
# A cut is longer than any pause that a test may take for one.
CUT_S = 30.0
CONFIG = f"""
extends = ["{ROOT}/configs/arch/tnl.toml", "{ROOT}/configs/size/tiny.toml"]
[model]
vocab_size = 512
[data]
store = "store"
sequence_length = 64
[optimizer]
lr = 1e-3
[train]
steps = {STEPS}
global_batch_size = 4
[parallel]
sequence = 2
[checkpoint]
every = 5
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}

WriteStore = Callable[..., None]
WaitUntil = Callable[[Callable[[], bool]], None]


@dataclass(frozen=True, kw_only=True)
class Host:
    """One of the two."""

    namespace: str
    switch: str
    name: str
    address: str

    def start(self, command: Sequence[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
        """`command` in `folder`, as a process of this host; what it says goes to `log`."""
        words = 'hostname "$0"; exec "$@"'
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", words, self.name, *command]
        with log.open("wb") as file:
            return subprocess.Popen(inside, cwd=folder, env=ENVIRONMENT, stdout=file, stderr=file)

    def processes(self) -> list[str]:
        return ip("netns", "pids", self.namespace).split()

    def plug(self, *, is_in: bool) -> None:
        """The cable at the switch."""
        ip("-n", self.switch, "link", "set", self.name, "up" if is_in else "down")


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("two hosts on one machine need root, iproute2 and util-linux")
    stem = f"ls{os.getpid()}"
    switch = f"{stem}s"
    number = os.getpid() % 250
    pair = tuple(
        Host(namespace=f"{stem}{letter}", switch=switch, name=f"node-{letter}", address=f"10.231.{number}.{index}")
        for index, letter in enumerate("ab", start=1)
    )
    try:
        try:
            ip("netns", "add", switch)
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"two hosts on one machine need network namespaces and bridges: {error.stderr.strip()}")
        ip("-n", switch, "link", "set", "bridge", "up")
        for host in pair:
            ip("netns", "add", host.namespace)
            ip("-n", host.namespace, "link", "set", "lo", "up")
            ip("-n", host.namespace, "link", "add", "fabric", "type", "veth", "peer", host.name, "netns", switch)
            ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "fabric")
            ip("-n", host.namespace, "link", "set", "fabric", "up")
            ip("-n", switch, "link", "set", host.name, "master", "bridge", "up")
        yield pair[0], pair[1]
    finally:
        for namespace in (*(host.namespace for host in pair), switch):
            if namespace in ip("netns", "list").split():
                for process in ip("netns", "pids", namespace).split():
                    subprocess.run(["kill", "-9", process], check=False)
                ip("netns", "delete", namespace)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_store: WriteStore) -> Path:
    """With run.toml for two ranks, and its store."""
    folder = tmp_path_factory.mktemp("shared")
    write_store(folder / "store", 300, text=np.random.default_rng(0).integers(1, 300, 40_000))
    (folder / "run.toml").write_text(CONFIG)
    return folder


class Job:
    """The torchruns of both hosts."""

    def __init__(self, hosts: Sequence[Host], folder: Path, run: str, *overrides: str) -> None:
        self.hosts, self.run = hosts, RunDirectory(folder / run)
        self.logs = [folder / f"{run}-{host.name}-{time.monotonic_ns()}.log" for host in hosts]
        self.processes = []
        for node, (host, log) in enumerate(zip(hosts, self.logs, strict=True)):
            options = ("--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", f"--master-addr={hosts[0].address}")
            train = ("-m", "lightscale", "train", "run.toml", *overrides, "--run-dir", run)
            command = [*TORCHRUN, *options, "--master-port=29511", *train]
            self.processes.append(host.start(command, folder, log))

    def reach(self, step: int) -> None:
        """Wait until that many steps are done."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.steps() < step:
            assert time.monotonic() < deadline and [one.poll() for one in self.processes] == [None, None], self.said()
            time.sleep(0.05)

    def steps(self) -> int:
        return len(read_lines(self.run.metrics))

    def wait(self) -> list[int]:
        return [process.wait(timeout=TIMEOUT_S) for process in self.processes]

    def said(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in self.logs)


@pytest.fixture(scope="module")
def reference(folder: Path) -> list[tuple[int, float, float]]:
    """The same run on one host that nothing happens to."""
    command = [sys.executable, "-m", "lightscale", "train", "run.toml", "--run", "reference", "--processes", "2"]
    ended = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return numbers(RunDirectory(folder / "reference"))


def numbers(run: RunDirectory) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in read_metrics(run.metrics) if "loss" in line]


def events(run: RunDirectory, name: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run.events) if event["event"] == name]


def test_a_run_over_a_link_that_is_cut_for_a_while(
    hosts: tuple[Host, Host], folder: Path, reference: list[Any]
) -> None:
    job = Job(hosts, folder, "for-a-while")
    job.reach(8)
    hosts[1].plug(is_in=False)
    # What was on its way may still arrive.
    time.sleep(CUT_S / 6)
    before = job.steps()
    time.sleep(CUT_S - CUT_S / 6)
    assert job.steps() == before < STEPS, "nothing was cut"
    hosts[1].plug(is_in=True)
    assert job.wait() == [0, 0], job.said()
    assert len(reference) == STEPS
    assert numbers(job.run) == reference
    assert len(events(job.run, "start")) == 1


def test_a_run_over_a_link_that_is_cut_for_good(hosts: tuple[Host, Host], folder: Path, reference: list[Any]) -> None:
    job = Job(hosts, folder, "for-good", f"restart.collective_timeout_s={COLLECTIVE_TIMEOUT_S}")
    job.reach(8)
    hosts[1].plug(is_in=False)
    cut = time.monotonic()
    assert job.wait() == [1, 1], job.said()
    # torchrun notices, and ends, some seconds later; on a busy machine more.
    assert time.monotonic() - cut < COLLECTIVE_TIMEOUT_S + 60
    for rank, (host, log) in enumerate(zip(hosts, job.logs, strict=True)):
        said = log.read_text()
        assert re.search(rf"rank {rank} on {host.name}, at step \d+, (forward and backward|optimizer|agreeing)", said)
        assert f"Timed out waiting {COLLECTIVE_TIMEOUT_S}000ms for" in said
        assert host.processes() == []
    status = job.run.read_status()
    assert status is not None and status.status == "resumable"
    assert re.search(r"^rank 0: RuntimeError: .*Timed out.* \(rank 0 on node-a, at step \d+, ", status.reason)
    newest = job.run.newest_checkpoint()
    assert newest >= 5

    hosts[1].plug(is_in=True)
    again = Job(hosts, folder, "for-good")
    assert again.wait() == [0, 0], again.said()
    (resumed,) = events(again.run, "resume")
    assert resumed["step"] == newest
    assert numbers(again.run) == reference


def test_a_second_torchrun_on_the_same_run_is_refused_on_all_ranks(folder: Path, wait_until: WaitUntil) -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", "lightscale", "train", "run.toml"]
    command += ["--run-dir", "held"]
    run = RunDirectory(folder / "held")
    slow = ENVIRONMENT | {"LIGHTSCALE_FAULT": "slow=2@step:begin"}
    with (folder / "first.log").open("wb") as log:
        first = subprocess.Popen(command, cwd=folder, env=slow, stdout=log, stderr=log)
    try:
        wait_until(lambda: len(read_lines(run.metrics)) >= 1 or first.poll() is not None)
        holder = json.loads((run.path / "lock" / "000001").read_text())
        config = run.config.read_text()
        second = subprocess.run(
            command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert second.returncode == 1
        words = f"error: held is in use by process {holder['process']} on {os.uname().nodename}"
        assert second.stderr.count(words) == 2, second.stderr
        assert run.config.read_text() == config
        assert len(events(run, "start")) == 1, "the first one's records were touched"
        assert run.read_status() is None
        assert first.poll() is None
        assert (run.path / "lock" / "000001").exists()
    finally:
        first.terminate()
        first.wait(timeout=TIMEOUT_S)
