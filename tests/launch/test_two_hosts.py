"""Two hosts, each with a network of its own and a launcher that a user started there by hand; and their link.

The hosts are the network namespaces of `lightscale chaos --hosts`, without a rendezvous key.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.errors import UserError
from lightscale.launch.chaos.harness.hosts import NamespaceHost, namespace_hosts
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 400.0
STEPS = 60
COLLECTIVE_TIMEOUT_S = 20
SHORT = f"restart.collective_timeout_s={COLLECTIVE_TIMEOUT_S}"
# A cut is longer than any pause that a test may take for one.
CUT_S = 30.0
CONFIG = f"""
extends = ["{ROOT}/tests/helpers/small-run.toml"]
[model]
vocab_size = 512
num_layers = 4
[train]
steps = {STEPS}
[parallel]
sequence = 2
[checkpoint]
every = 5
"""
PORT = 29511
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TRAIN = ("-m", "lightscale", "train", "run.toml")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}

WriteStore = Callable[..., None]
WaitUntil = Callable[[Callable[[], bool]], None]


def start(
    host: NamespaceHost, command: Sequence[str], folder: Path, log: Path, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """`command` in `folder`, as a process of `host`; what it says goes to `log`."""
    environment = {**ENVIRONMENT, **(variables or {})}
    with log.open("wb") as file:
        return subprocess.Popen(host.inside(command), cwd=folder, env=environment, stdout=file, stderr=file)


@pytest.fixture
def hosts(needs: Callable[..., None]) -> Iterator[Sequence[NamespaceHost]]:
    needs("root", "ip", "tc", "unshare")
    with contextlib.ExitStack() as stack:
        try:
            pair = stack.enter_context(namespace_hosts(f"ls{os.getpid()}", 2))
        except UserError as error:
            pytest.skip(str(error))
        yield pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_store: WriteStore) -> Path:
    """With run.toml for two ranks, and its store."""
    folder = tmp_path_factory.mktemp("shared")
    write_store(folder / "store", 300, text=np.random.default_rng(0).integers(1, 300, 40_000))
    (folder / "run.toml").write_text(CONFIG)
    return folder


class Job:
    """Both hosts of a run, each with its launcher: our own, or torchrun."""

    def __init__(
        self,
        hosts: Sequence[NamespaceHost],
        folder: Path,
        run: str,
        *overrides: str,
        torchrun: bool = False,
        master: str | None = None,
        nodes: Sequence[int] = (0, 1),
        variables: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        """`master`: None for the first host's address; `nodes`: which are started; `variables`: of each node."""
        self.hosts, self.run = hosts, RunDirectory(folder / run)
        self.logs = [folder / f"{run}-{hosts[node].name}-{time.monotonic_ns()}.log" for node in nodes]
        self.processes = []
        for node, log in zip(nodes, self.logs, strict=True):
            options = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}"]
            options += [f"--master-addr={master or hosts[0].address}", f"--master-port={PORT}"]
            words = [*overrides, "--run-dir", run]
            ours = [sys.executable, *TRAIN, *words, *options]
            command = [*TORCHRUN, *options, *TRAIN, *words] if torchrun else ours
            self.processes.append(start(hosts[node], command, folder, log, (variables or {}).get(node)))

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

    def lines(self, number: int) -> list[str]:
        """What that launcher said, without what it says before it starts ranks; no stack is in it."""
        text = self.logs[number].read_text()
        assert "Traceback" not in text and "frame #" not in text, text
        return [line for line in text.splitlines() if not line.startswith(("loading ", "starting "))]

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


@pytest.mark.parametrize(
    "torchrun", [pytest.param(False, id="ours"), pytest.param(True, id="torchrun", marks=pytest.mark.soak)]
)
def test_a_run_over_a_link_that_is_cut_for_a_while(
    hosts: Sequence[NamespaceHost], folder: Path, reference: list[Any], torchrun: bool
) -> None:
    job = Job(hosts, folder, f"for-a-while-{torchrun}", torchrun=torchrun)
    job.reach(8)
    hosts[1].set_link(is_up=False)
    # What was on its way may still arrive.
    time.sleep(CUT_S / 6)
    before = job.steps()
    time.sleep(CUT_S - CUT_S / 6)
    assert job.steps() == before < STEPS, "nothing was cut"
    hosts[1].set_link(is_up=True)
    assert job.wait() == [0, 0], job.said()
    assert len(reference) == STEPS
    assert numbers(job.run) == reference
    assert len(events(job.run, "start")) == 1


@pytest.mark.parametrize(
    "torchrun", [pytest.param(False, id="ours"), pytest.param(True, id="torchrun", marks=pytest.mark.soak)]
)
def test_a_run_over_a_link_that_is_cut_for_good(
    hosts: Sequence[NamespaceHost], folder: Path, reference: list[Any], torchrun: bool
) -> None:
    name = f"for-good-{torchrun}"
    job = Job(hosts, folder, name, SHORT, torchrun=torchrun)
    job.reach(8)
    hosts[1].set_link(is_up=False)
    cut = time.monotonic()
    assert job.wait() == [1, 1], job.said()
    # Launchers notice, and end, some seconds later; on a busy machine more.
    assert time.monotonic() - cut < COLLECTIVE_TIMEOUT_S + 60
    for rank, (host, log) in enumerate(zip(hosts, job.logs, strict=True)):
        said = log.read_text()
        # The first rank to time out, of whichever host: the disk that both see is not cut.
        ours = rf"rank ({rank}|\d, on host {1 - rank},) failed: RuntimeError: .*\("
        where = rf"rank {rank} on {host.name}, at" if torchrun else ours
        assert re.search(rf"{where} ?step \d+, (forward and backward|optimizer|agreeing)", said), said
        # torchrun's ranks show their own stacks, and so does it.
        assert torchrun or "Traceback" not in said
        assert f"Timed out waiting {COLLECTIVE_TIMEOUT_S}000ms for" in said
        assert host.processes() == []
    status = job.run.read_status()
    assert status is not None and status.status == "resumable"
    assert re.search(r"^rank 0: RuntimeError: .*Timed out.* \(rank 0 on node-a, at step \d+, ", status.reason)
    newest = job.run.newest_checkpoint()
    assert newest >= 5

    hosts[1].set_link(is_up=True)
    again = Job(hosts, folder, name, torchrun=torchrun)
    assert again.wait() == [0, 0], again.said()
    (resumed,) = events(again.run, "resume")
    assert resumed["step"] == newest
    assert numbers(again.run) == reference


@pytest.mark.parametrize("mute", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_packets_that_are_lost_in_one_direction_for_a_while(
    hosts: Sequence[NamespaceHost], folder: Path, reference: list[Any], mute: int
) -> None:
    job = Job(hosts, folder, f"one-way-{mute}")
    job.reach(8)
    hosts[mute].lose([hosts[1 - mute]], is_on=True)
    time.sleep(CUT_S / 6)
    before = job.steps()
    time.sleep(CUT_S / 2)
    assert job.steps() == before < STEPS, "nothing was lost"
    hosts[mute].lose([hosts[1 - mute]], is_on=False)
    assert job.wait() == [0, 0], job.said()
    assert numbers(job.run) == reference
    assert len(events(job.run, "start")) == 1


def test_ctrl_c_on_one_host_saves_on_both(hosts: Sequence[NamespaceHost], folder: Path, reference: list[Any]) -> None:
    job = Job(hosts, folder, "stopped")
    job.reach(8)
    job.processes[1].send_signal(signal.SIGINT)
    assert job.wait() == [75, 75], job.said()
    for number in range(2):
        end, resume = job.lines(number)[-2:]
        assert re.match(r"resumable at step \d+, .* tokens: stopped by SIGINT", end), job.said()
        assert f"--nodes 2 --node-rank {number} --master-addr {hosts[0].address} --master-port {PORT}" in resume
    assert job.run.newest_checkpoint() == numbers(job.run)[-1][0] < STEPS
    again = Job(hosts, folder, "stopped")
    assert again.wait() == [0, 0], again.said()
    assert numbers(again.run) == reference


def test_a_host_that_is_lost(hosts: Sequence[NamespaceHost], folder: Path) -> None:
    job = Job(hosts, folder, "lost", SHORT)
    job.reach(3)
    hosts[1].kill_processes()
    lost = time.monotonic()
    assert job.processes[0].wait(timeout=TIMEOUT_S) == 1, job.said()
    assert time.monotonic() - lost < COLLECTIVE_TIMEOUT_S + 60
    said = job.logs[0].read_text()
    assert re.search(r"^rank 0 failed: .* \(step \d+, .*\(output of all ranks: ", said, re.MULTILINE), said
    assert said.splitlines()[-1].startswith("resume on all 2 hosts with: lightscale train run.toml ")
    status = job.run.read_status()
    assert status is not None and status.status == "resumable"
    assert hosts[0].processes() == []


def test_a_host_that_does_not_come(hosts: Sequence[NamespaceHost], folder: Path) -> None:
    place = f"{hosts[0].address}:{PORT}"
    for node, says in (
        (0, f"of 2 ranks, 1 did not come to {place} within"),
        (1, f"rank 0 of 2 cannot be reached at {place}"),
    ):
        job = Job(hosts, folder, "alone", SHORT, nodes=[node])
        assert job.wait() == [75], job.said()
        (line,) = job.lines(0)
        assert line.startswith(f"error: {says}"), line
        assert (
            "start the missing ranks with this address" if node == 0 else "MASTER_ADDR and MASTER_PORT (--master-addr"
        ) in line
    assert not job.run.path.exists()


def test_a_master_that_is_not_the_first_host(hosts: Sequence[NamespaceHost], folder: Path) -> None:
    job = Job(hosts, folder, "other-master", SHORT, master=hosts[1].address)
    assert job.wait() == [75, 75], job.said()
    place = f"{hosts[1].address}:{PORT}"
    first, second = (job.lines(number) for number in range(2))
    assert len(first) == len(second) == 1, job.said()
    assert first[0].startswith(f"error: rank 0 cannot reach itself at {place} (")
    assert first[0].endswith("set MASTER_ADDR (--master-addr) to node-a, the host of rank 0, or open the network there")
    assert second[0].startswith(f"error: rank 0 of 2 cannot be reached at {place} (")
    assert not job.run.path.exists()


SILENT = """
import socket, sys, time
server = socket.create_server(("", int(sys.argv[1])))
print(flush=True)
time.sleep(900)
"""


def test_a_port_that_something_has_which_does_not_answer(
    hosts: Sequence[NamespaceHost], folder: Path, wait_until: WaitUntil
) -> None:
    log = folder / "silent.log"
    silent = start(hosts[0], [sys.executable, "-c", SILENT, str(PORT)], folder, log)
    wait_until(lambda: log.stat().st_size > 0)
    try:
        job = Job(hosts, folder, "in-use", SHORT)
        assert job.wait() == [75, 75], job.said()
    finally:
        silent.kill()
        silent.wait()
    place = f"{hosts[0].address}:{PORT}"
    (first,), (second,) = (job.lines(number) for number in range(2))
    assert first.startswith(f"error: rank 0 cannot serve at {place}: port {PORT} of node-a is in use by process "), (
        first
    )
    assert first.endswith("end it, or set another MASTER_PORT (--master-port)")
    assert second.startswith(f"error: rank 0 of 2 cannot be reached at {place} (the program there does not answer)"), (
        second
    )
    assert "set another MASTER_PORT (--master-port)" in second
    assert not job.run.path.exists()


def test_an_interface_that_one_host_does_not_have(hosts: Sequence[NamespaceHost], folder: Path) -> None:
    job = Job(hosts, folder, "interface", variables={1: {"GLOO_SOCKET_IFNAME": "ib7"}})
    # At once, on both: nobody waits for the ten minutes that are the default.
    assert job.wait() == [78, 78], job.said()
    for number in range(2):
        text = "\n".join(job.lines(number))
        assert 'node-b (rank 1): GLOO_SOCKET_IFNAME = "ib7": node-b has no network interface ib7' in text, text
        assert "unset the variable, or use one of fabric, lo" in text
    assert not job.run.path.exists()


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
