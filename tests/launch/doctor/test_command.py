"""What is wrong with a machine or a rank is named, by real ranks over gloo; what is right passes."""

import contextlib
import ctypes
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightscale import cli
from lightscale.config.schema import RunConfig
from lightscale.launch.doctor import measure
from lightscale.launch.doctor.examine import DoctorReport
from lightscale.launch.doctor.measure import Product, judge_exchange, judge_products, pairings
from lightscale.parallel.device.fused import wrong_apex
from lightscale.training import preflight
from lightscale.training.health.check_result import CheckResult, where
from lightscale.training.health.machine import GPU, Machine, judge_machine
from lightscale.training.preflight import check_disk, judge_alike

pytestmark = pytest.mark.timeout(300)

RunRanks = Callable[..., list[Any]]
MB = 1 << 20
HOPPER = GPU(name="NVIDIA H100", capability=(9, 0), free_bytes=79 << 30, total_bytes=80 << 30)
VERSIONS = {"lightscale": "0.1.0", "torch": "2.13.0", "triton": "3.9.0", "megatron-core": "0.16.1", "CUDA": "13.0"}
MACHINE = Machine(
    host="gpu03",
    gpus=(HOPPER,),
    num_gpus=8,
    driver="560.35.03",
    versions=VERSIONS,
    apex=None,
)
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 1 << 14, 1 << 18


def bad(results: list[CheckResult]) -> list[tuple[str, str]]:
    return [(result.check, result.result) for result in results if result.result != "ok"]


def test_a_machine_as_it_should_be() -> None:
    results = judge_machine(MACHINE, processes=8, device="cuda")
    assert bad(results) == []
    assert results[0].found == "1 NVIDIA H100, driver 560.35.03"


@pytest.mark.parametrize(
    ("change", "device", "wrong", "words"),
    [
        ({"gpus": (), "num_gpus": 0}, "auto", ("GPUs", "failed"), "built for CUDA 13.0, finds no GPU"),
        ({"gpus": (), "num_gpus": 0, "driver": None}, "cuda", ("GPUs", "failed"), "no NVIDIA driver"),
        ({"num_gpus": 4}, "auto", ("GPUs", "failed"), "4 for at least 8 ranks"),
        ({"gpus": (replace(HOPPER, free_bytes=60 << 30),)}, "auto", ("GPU memory", "warning"), "64.4 GB of 85.9 GB"),
        (
            {"versions": VERSIONS | {"triton": "3.6.0"}},
            "auto",
            ("versions", "warning"),
            "triton 3.6.0 on Hopper",
        ),
        ({"versions": VERSIONS | {"torch": "2.9.1"}}, "auto", ("versions", "failed"), "torch 2.9.1"),
        ({"apex": "the installed package apex 0.9"}, "auto", ("apex", "warning"), "is not NVIDIA's apex"),
    ],
)
def test_what_is_wrong_with_a_machine(change: dict[str, Any], device: str, wrong: tuple[str, str], words: str) -> None:
    results = judge_machine(replace(MACHINE, **change), processes=8, device=device)
    assert bad(results) == [wrong]
    (result,) = [result for result in results if result.result != "ok"]
    assert words in result.found and result.right


def test_a_fault_of_hopper_is_none_elsewhere() -> None:
    ampere = replace(HOPPER, capability=(8, 0))
    old = replace(MACHINE, gpus=(ampere,), versions=VERSIONS | {"triton": "3.6.0"})
    assert bad(judge_machine(old, processes=8, device="auto")) == []


def test_without_gpus_cpus_will_do() -> None:
    laptop = replace(MACHINE, gpus=(), num_gpus=0, driver=None)
    assert bad(judge_machine(laptop, processes=8, device="auto")) == []
    hidden = replace(MACHINE, gpus=(), num_gpus=0)
    assert bad(judge_machine(hidden, processes=8, device="cpu")) == []


def test_a_rank_with_other_versions_is_named() -> None:
    other = replace(MACHINE, versions=VERSIONS | {"NCCL": "2.20.5"})
    (result,) = judge_alike([MACHINE, MACHINE, other, MACHINE])
    assert (result.result, result.ranks, result.blames_host) == ("failed", (2,), True)
    assert result.found == "NCCL 2.20.5, on most ranks none"
    (result,) = judge_alike([MACHINE, MACHINE, replace(MACHINE, driver="535.1")])
    assert (result.result, result.ranks) == ("warning", (2,))
    (result,) = judge_alike([MACHINE, other])
    assert not result.blames_host, "of two that differ, neither is known to be the wrong one"


def install(folder: Path, **files: str) -> None:
    """A package apex as pip leaves it; its modules fail when they are imported."""
    for name in ("__init__", *files):
        path = folder / "apex" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SystemError('nobody may import this')\n")
    (folder / "apex-0.9.10.dev0.dist-info").mkdir()
    (folder / "apex-0.9.10.dev0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\n"
    )


def test_the_apex_that_is_not_nvidias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_apex() is None
    # PyPI's: a web framework.
    install(tmp_path / "pypi", models="")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / "pypi"))
        assert wrong_apex() == "the installed package apex 0.9.10.dev0"
        results = judge_machine(Machine.read(), processes=1, device="auto")
        assert ("apex", "warning") in bad(results)
    install(tmp_path / "nvidia", optimizers="")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / "nvidia"))
        assert wrong_apex() is None
    (tmp_path / "checkout" / "apex").mkdir(parents=True)
    (tmp_path / "checkout" / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "checkout"))
    assert wrong_apex() == f"the package in {tmp_path}/checkout/apex/__init__.py"


def test_a_disk_too_small_for_the_next_checkpoints(
    make_disk: Callable[[int], Path],
    tiny_run: Path,
    tiny_config: Callable[..., RunConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    # 12 bytes for each of 213,760 parameters or so, and 16 MiB to spare; three at once, for two that are kept.
    config = tiny_config()
    results = []
    disks = [make_disk(megabytes << 20) for megabytes in (10, 30, 90)]
    for disk in disks:
        (result,) = check_disk(config, disk / "runs" / "mine")
        results.append(result.result)
        assert "MB free in" in result.found and "parameters)" in result.found
    assert results == ["failed", "warning", "ok"]
    assert cli.main(["doctor", str(tiny_run), "--run", str(disks[0] / "runs" / "mine"), "--json"]) == 78
    report = json.loads(capsys.readouterr().out)
    (failed,) = [result for result in report["findings"] if result["result"] == "failed"]
    assert failed["check"] == "disk" and failed["right"].endswith(" MB free, for 3 more")
    assert cli.main(["doctor", str(tiny_run), "--run", str(disks[-1])]) == 0
    assert "disk " in capsys.readouterr().out


def test_the_size_of_a_checkpoint_is_that_of_the_newest(tmp_path: Path, tiny_config: Callable[..., RunConfig]) -> None:
    from lightscale.runs.run_directory import RunDirectory
    from lightscale.training.checkpoints.manifest import FileRecord, write_manifest

    run = RunDirectory(tmp_path)
    for step, size in ((1, 7), (2, 40_000_000)):
        path = run.checkpoints / f"step-{step:08d}"
        path.mkdir(parents=True)
        write_manifest(path, {"rank-00000.safetensors": FileRecord(num_bytes=size, xxh3_128="0" * 32)}, {"step": step})
    (run.checkpoints / "step-00000003").mkdir()
    assert preflight.checkpoint_bytes(tiny_config(), run) == (40_000_000 + 16 * MB, "as step-00000002")


def test_everybody_meets_everybody_and_first_those_on_other_hosts() -> None:
    for size in (1, 2, 5, 8):
        rounds = pairings(["a"] * size)
        met = [(one, other) for partners in rounds for one, other in partners.items()]
        assert sorted(met) == [(a, b) for a in range(size) for b in range(size) if a != b]
    (partners,) = pairings(["a", "a", "b", "b"])
    assert partners == {0: 2, 1: 3, 2: 0, 3: 1}
    rounds = pairings(["a", "b", "c", "b"])
    assert {frozenset(pair) for partners in rounds for pair in partners.items()} == {
        frozenset(pair) for pair in ((0, 1), (0, 2), (1, 2))
    }


def test_a_slow_node_among_others_is_named_though_its_own_ranks_are_many() -> None:
    rates = [100.0] * 8 + [60.0] * 8 + [97.0] * 8
    results = judge_products([Product(flops=rate, digest="d") for rate in rates], ["H100"] * 24, "cuda")
    assert [result.ranks for result in results] == [(rank,) for rank in range(8, 16)]
    hosts = ["gpu1"] * 8 + ["gpu2"] * 8 + ["gpu3"] * 8
    assert DoctorReport(hosts=hosts, results=results).exclude == ["gpu2"]
    assert bad(judge_exchange([1e9, 1.2e9, 0.9e9])) == []
    (result,) = judge_exchange([1e9, 0.2e9, 0.9e9])
    assert result.found == "200 MB/s, 21% of the others' 950 MB/s"


def test_wrong_numbers_are_named_among_machines_of_one_kind() -> None:
    products = [Product(flops=1e9, digest=digest) for digest in ("a", "a", "b", "c")]
    (result,) = judge_products(products, ["H100", "H100", "H100", "H200"], "cuda")
    assert (result.ranks, result.result, result.blames_host) == ((2,), "failed", True)


def test_ranks_are_named_by_host() -> None:
    assert where((0, 1, 2, 5, 9), ["a"] * 6 + ["b"] * 4) == "a (ranks 0-2, 5), b (rank 9)"
    assert where((), ["a"]) == ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def doctor(
    rank: int, world_size: int, init_method: str, port: int, words: list[str], trouble: str
) -> tuple[int, dict[str, Any] | None]:
    """Exit code of `lightscale doctor` on this rank, and what it printed; `trouble` comes over rank 1 first."""
    variables: dict[str, int] = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world_size,
    }
    os.environ.update({name: str(number) for name, number in variables.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), SLURMD_NODENAME=f"node{rank}")
    if trouble != "throttled":
        # Other processes of the machine slow ranks down too.
        measure._SLOW["cpu"], measure._SLOW_EXCHANGE = 0.0, 0.0
    output = io.StringIO()
    with contextlib.redirect_stdout(output), TROUBLES[trouble]() if rank == 1 else contextlib.nullcontext():
        code = cli.main(["doctor", "--json", *words])
    return code, json.loads(output.getvalue()) if output.getvalue() else None


@contextlib.contextmanager
def throttled() -> Iterator[None]:
    """Another process stops this one three quarters of the time."""
    parent, child = os.getpid(), os.fork()
    if child == 0:
        while os.getppid() == parent:
            os.kill(parent, signal.SIGSTOP)
            time.sleep(0.15)
            os.kill(parent, signal.SIGCONT)
            time.sleep(0.05)
        os._exit(0)
    yield
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.kill(parent, signal.SIGCONT)


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """This process has another file system mounted where the others have theirs."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0
    assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
    assert libc.mount(b"tmpfs", os.fsencode(Path.cwd()), b"tmpfs", 0, None) == 0
    # The working directory is still that beneath.
    os.chdir(Path.cwd())
    yield


@contextlib.contextmanager
def early() -> Iterator[None]:
    """This process's clock is two minutes ahead."""
    real = time.time
    preflight.check_clocks.__defaults__ = (lambda: real() + 120,)
    yield


@contextlib.contextmanager
def miscalculating() -> Iterator[None]:
    """One bit of every product is wrong."""
    right = measure.torch.mm

    def wrong(a: Any, b: Any, *, out: Any) -> Any:
        right(a, b, out=out)
        out[7, 7] = -out[7, 7]

    measure.torch.mm = wrong  # type: ignore[assignment]
    yield


@contextlib.contextmanager
def hanging() -> Iterator[None]:
    """This process answers for a while, then no longer."""
    right = measure.measure_product

    def hang(*args: Any) -> Any:
        time.sleep(45)
        return right(*args)

    measure.measure_product = hang  # type: ignore[assignment]
    yield


@contextlib.contextmanager
def late() -> Iterator[None]:
    """This process comes when the others are gone."""
    time.sleep(30)
    yield


TROUBLES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    trouble.__name__: trouble for trouble in (throttled, elsewhere, early, miscalculating, hanging, late)
}
TROUBLES["none"] = contextlib.nullcontext


def failures(results: list[tuple[int, dict[str, Any]]]) -> list[tuple[str, list[int]]]:
    """Check and ranks of what failed; all ranks have the same exit code, and rank 0 prints the report."""
    codes = [code for code, _ in results]
    report = results[0][1]
    assert codes == [report["exit_code"]] * len(codes)
    assert [printed for _, printed in results[1:]] == [None] * (len(codes) - 1)
    return [(result["check"], result["ranks"]) for result in report["findings"] if result["result"] == "failed"]


def test_a_rank_that_is_slow_is_named_and_excluded(run_ranks: RunRanks, tmp_path: Path) -> None:
    excluded = tmp_path / "bad-hosts"
    words = ["--run", str(tmp_path), "--exclude", str(excluded)]
    # Other processes of the machine can slow another rank down once, but not each time.
    for _ in range(3):
        excluded.write_text("node7\n")
        results = run_ranks(doctor, 3, free_port(), words, "throttled")
        assert ("matrix product", [1]) in failures(results)
        blamed = {tuple(ranks) for _, ranks in failures(results)}
        if blamed == {(1,)}:
            break
    assert blamed == {(1,)}, "others are not slow"
    report = results[0][1]
    assert (report["exclude"], report["hosts"]) == (["node1"], ["node0", "node1", "node2"])
    assert excluded.read_text() == "node7\nnode1\n"


def test_a_directory_that_is_not_shared_is_named(
    run_ranks: RunRanks, tmp_path: Path, needs: Callable[..., None]
) -> None:
    needs("root that may mount")
    (tmp_path / "runs").mkdir()
    results = run_ranks(doctor_in, 3, str(tmp_path / "runs"), free_port(), ["--run", "mine"], "elsewhere")
    assert failures(results) == [("shared directory", [1])]
    report = results[0][1]
    (result,) = [one for one in report["findings"] if one["result"] == "failed"]
    assert result["found"] == f"{tmp_path}/runs is a different directory than on the other ranks"
    assert report["exclude"] == ["node1"]
    assert list((tmp_path / "runs").iterdir()) == [], "nothing is left there"


def doctor_in(rank: int, world_size: int, init_method: str, directory: str, *args: Any) -> Any:
    os.chdir(directory)
    return doctor(rank, world_size, init_method, *args)


def test_a_clock_that_is_wrong_is_named(run_ranks: RunRanks, tmp_path: Path) -> None:
    results = run_ranks(doctor, 3, free_port(), ["--run", str(tmp_path)], "early")
    assert failures(results) == [("clocks", [1])]
    report = results[0][1]
    (result,) = [one for one in report["findings"] if one["result"] == "failed"]
    assert result["found"].endswith("s ahead of others")


@pytest.mark.long
@pytest.mark.parametrize(
    ("trouble", "expected", "exclude"),
    [
        ("none", [], []),
        ("miscalculating", [("matrix product", [1])], ["node1"]),
        ("hanging", [("ranks", [1])], ["node1"]),
        ("late", [("ranks", [1])], ["unknown"]),
    ],
)
def test_more_troubles_of_a_rank(
    run_ranks: RunRanks, tmp_path: Path, trouble: str, expected: list[Any], exclude: list[str]
) -> None:
    words = ["--run", str(tmp_path), "--wait", "15" if trouble in ("hanging", "late") else "100"]
    results = run_ranks(doctor, 3, free_port(), words, trouble)
    assert failures(results) == expected
    assert results[0][1]["exclude"] == exclude


@pytest.mark.long
def test_the_clock_of_a_whole_process(tmp_path: Path, needs: Callable[..., None]) -> None:
    """As mpiexec would start them; one of them by faketime."""
    needs("faketime")
    port = free_port()
    processes = []
    for rank in range(3):
        variables = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 3}
        variables |= {"OMPI_COMM_WORLD_LOCAL_RANK": rank, "OMPI_COMM_WORLD_LOCAL_SIZE": 3, "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        environment |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "SLURMD_NODENAME": f"node{rank}"}
        skew = ["faketime", "-f", "-300s"] if rank == 2 else []
        command = [*skew, sys.executable, "-m", "lightscale", "doctor", "--json", "--run", str(tmp_path)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        output, _ = processes[0].communicate(timeout=200)
        assert [process.wait(timeout=60) for process in processes] == [78] * 3
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    report = json.loads(output)
    (result,) = [one for one in report["findings"] if one["result"] == "failed"]
    assert (result["check"], result["ranks"], report["exclude"]) == ("clocks", [2], ["node2"])
    assert result["found"].endswith("s behind others")
