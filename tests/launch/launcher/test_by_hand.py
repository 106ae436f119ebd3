"""The launchers of two hosts, here two processes of one machine; their ranks are those of `ranks.py`, one on each."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.cli import main
from lightscale.runs.run_directory import RunDirectory

# A machine that others use too is slow at times.
pytestmark = pytest.mark.timeout(300)

Launcher = Any  # conftest.py
Hosts = Callable[[str], list[Launcher]]
HOST = socket.gethostname()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def hosts(start: Callable[..., Launcher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """``hosts(behaviour)``: both launchers, which keep the output of ranks in the folder `temporary`."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    # Through which the ranks agree.
    (tmp_path / "hosts" / "logs" / "launch-0001").mkdir(parents=True)

    def hosts(behaviour: str) -> list[Launcher]:
        port = free_port()
        return [start(behaviour, place={"port": port, "node": node, "num_nodes": 2}) for node in range(2)]

    return hosts


def test_ranks_of_two_hosts_finish_together(hosts: Hosts, tmp_path: Path) -> None:
    for launcher in (launchers := hosts("finished")):
        ended = launcher.wait()
        assert ended.code == 0, ended.output
        assert ended.output.splitlines()[-1] == "finished at step 5, 500 tokens: as asked"
    first, second = (launcher.wait().output.splitlines()[:-1] for launcher in launchers)
    # Output of rank 0 is shown, on its host.
    assert first == [f"rank 0 step {step}" for step in range(1, 6)]
    assert second == []
    for rank in range(2):
        text = (tmp_path / "hosts" / f"environment-{rank}").read_text().splitlines()
        assert {f"RANK={rank}", "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", f"GROUP_RANK={rank}"} <= set(text)
        assert "MASTER_ADDR=127.0.0.1" in text
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.long
def test_a_stop_on_one_host_stops_and_saves_on_both(hosts: Hosts, wait_until: Callable[..., None]) -> None:
    launchers = hosts("endless")
    run = launchers[0].run
    wait_until(lambda: all((run / f"pid-{rank}").exists() for rank in range(2)))
    launchers[1].process.send_signal(signal.SIGINT)
    for rank, launcher in enumerate(launchers):
        ended = launcher.wait()
        assert ended.code == 75, ended.output
        assert re.search(
            r"^resumable at step \d+, .*SIGINT\nresume with: the same command$", ended.output, re.MULTILINE
        )
        assert (run / f"saved-{rank}").exists()
    # Passed on once, and only there.
    assert (launchers[0].signals(0), launchers[1].signals(1)) == ([], ["SIGINT"])


@pytest.mark.long
def test_a_rank_that_is_killed_ends_both_hosts(hosts: Hosts, tmp_path: Path) -> None:
    first, second = (launcher.wait() for launcher in hosts("killed"))
    assert (first.code, second.code) == (1, 1)
    cause = r"failed: killed by SIGKILL.*\(step 5, reading data\) \(output of.*: (.*)\)$"
    assert re.search(rf"^rank 1, on host 1, {cause}", first.output, re.M), first.output
    said = re.search(rf"^rank 1 {cause}", second.output, re.M)
    assert said is not None, second.output
    # Kept, as the message says.
    assert (Path(said[1]) / "rank-1.out").read_text().startswith("rank 1 step 1\n")
    assert Path(said[1]).parent == tmp_path / "temporary"
    # What a stack would say is in the files.
    assert "Traceback" not in first.output
    for ended in (first, second):
        assert ended.output.splitlines()[-1] == "resume on all 2 hosts with: the same command"


@pytest.mark.long
@pytest.mark.parametrize("behaviour", ["refused", "refused_deaf"])
def test_what_one_rank_refuses_ends_all_hosts(hosts: Hosts, tmp_path: Path, behaviour: str) -> None:
    """Whether the ranks of the other host notice the loss, or wait for them as in a collective."""
    for again in range(2):
        # A report that is left of the start before must not be taken for one of this.
        first, second = (launcher.wait() for launcher in hosts(behaviour))
        says = "block 3 is not what was prepared"
        assert (first.code, second.code) == (78, 78), (again, first.output, second.output)
        assert first.output.splitlines()[-1] == f"error: rank 1, on host 1: {says}"
        assert second.output == f"error: {says}\n"
        status = RunDirectory(first.run).read_status()
        assert status is not None and (status.status, status.reason) == ("stopped", f"rank 1: {says}")
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.long
def test_a_host_that_is_told_nothing_waits_for_nobody(hosts: Hosts, tmp_path: Path) -> None:
    """The report of the other host cannot be written: a folder has its name."""
    (tmp_path / "hosts" / "logs" / "hosts" / "node-1.json").mkdir(parents=True)
    first, second = (launcher.wait() for launcher in hosts("killed"))
    assert (first.code, second.code) == (1, 1)
    assert re.search(r"^rank 0 failed: ConnectionError: lost rank 1 \(step 5, agreeing\)", first.output, re.M)


@pytest.mark.long
@pytest.mark.parametrize(
    ("behaviour", "code", "says"),
    [("mistake", 78, "data.store = nowhere: no such store"), ("absent", 75, "rank 1 did not come")],
)
def test_what_ranks_refuse_is_said_once_on_each_host(
    hosts: Hosts, tmp_path: Path, behaviour: str, code: int, says: str
) -> None:
    for launcher in hosts(behaviour):
        ended = launcher.wait()
        assert (ended.code, ended.output) == (code, f"error: {says}\n")
    # The run may be that of another job.
    assert not (tmp_path / "hosts" / "logs" / "hosts").exists()
    assert not (tmp_path / "hosts" / "status.json").exists()
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--node-rank", "1"], "--node-rank 1: needs --nodes"),
        (["--master-port", "29500"], "--master-port 29500: needs --nodes"),
        (["--nodes", "2"], "--nodes 2: set --node-rank and --master-addr too"),
        (["--nnodes", "2", "--node-rank", "0"], "--nodes 2: set --master-addr too"),
        (["--nodes", "0"], "--nodes 0: must be at least 1"),
        (["--nodes", "2", "--node-rank", "2", "--master-addr", "a"], "--node-rank 2: must be from 0 to 1"),
        (["--nodes", "2", "--node-rank", "-1", "--master-addr", "a"], "--node-rank -1: must be from 0 to 1"),
        (
            ["--nodes", "2", "--node-rank", "0", "--master-addr", "a", "--master-port", "70000"],
            "--master-port 70000: must be from 1 to 65535",
        ),
        (["--nodes", "2", "--scheduler", "local"], "--nodes 2 and --scheduler local: remove --nodes, the job"),
    ],
)
def test_options_that_do_not_fit(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert main(["train", "quickstart", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {says}")
    assert len(said.splitlines()) == 1


def test_a_process_that_is_a_rank_starts_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "a")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert main(["train", "quickstart", "--nodes", "2", "--node-rank", "0", "--master-addr", "a"]) == 2
    assert capsys.readouterr().err.startswith("error: --nodes 2: torchrun has already started this process as a rank")


@pytest.mark.long
def test_addresses_are_refused_before_torch_is_imported(tiny_run: Path) -> None:
    """One line with host, port and remedy, as the whole output of the command."""
    with socket.create_server(("", 0), backlog=0) as server:
        port = server.getsockname()[1]
        cases = {
            (0, "127.0.0.1"): f"port {port} of {HOST} is in use by process {os.getpid()} (",
            (1, "no-such-host.invalid"): f"cannot be found at no-such-host.invalid:{port} (",
        }
        for (node, host), says in cases.items():
            words = ["train", str(tiny_run), "--nodes", "2", "--node-rank", str(node), "--master-addr", host]
            code = (
                "import sys; from lightscale.cli import main; code = main(sys.argv[1:]); "
                "assert 'torch' not in sys.modules; sys.exit(code)"
            )
            ended = subprocess.run(
                [sys.executable, "-c", code, *words, "--master-port", str(port)],
                cwd=tiny_run.parent,
                capture_output=True,
                text=True,
                timeout=140,
                check=False,
            )
            assert ended.returncode == 75, ended.stderr
            assert ended.stderr.startswith("error: ") and says in ended.stderr
            assert len(ended.stderr.splitlines()) == 1
            assert "--master-" in ended.stderr
    assert not (tiny_run.parent / "runs").exists()
