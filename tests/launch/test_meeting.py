"""Ranks started by hand that would train different runs are refused, all in the same words; nothing is written."""

import dataclasses
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lightscale
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.launch import rank_facts
from lightscale.launch.environment import RankEnvironment
from lightscale.launch.launcher.rendezvous import CannotStart
from lightscale.launch.meeting import agree, meet
from lightscale.launch.rank_facts import RankFacts, disagreement
from lightscale.runs.run_directory import RunDirectory

WriteStore = Callable[..., None]
RunRanks = Callable[..., list[Any]]
TIMEOUT_S = 60.0
# Of those that are meant to run out.
SHORT_S = 1.0


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def place(rank: int, port: int, world_size: int = 2) -> RankEnvironment:
    return RankEnvironment(
        launcher="a test",
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        master_address="127.0.0.1",
        master_port=port,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_store: WriteStore, tiny_run_text: str) -> Path:
    """run.toml; `store`, and what differs from it: `other/store` has other text, `words/store` another tokenizer."""
    folder = tmp_path_factory.mktemp("meeting")
    for name, seed, words in ((".", 0, 300), ("other", 1, 300), ("words", 0, 301)):
        text = np.random.default_rng(seed).integers(1, 300, 4000)
        (folder / name).mkdir(exist_ok=True)
        write_store(folder / name / "store", words, text=text)
    for name, layers in (("one", "1"), ("two", "2")):
        manifest = folder / name / "runs/first/checkpoints/step-00000010/MANIFEST.json"
        manifest.parent.mkdir(parents=True)
        manifest.write_text(layers)
    (folder / "run.toml").write_text(tiny_run_text)
    return folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is other on rank 1, and what the message says of it."""

    says: str
    both: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    directory: str = "."
    run: str = "runs/mine"
    allow: tuple[str, ...] = ()
    variable: tuple[str, str] | None = None
    package: str | None = None
    version: tuple[str, str] | None = None


CASES = {
    "nothing": Case(says=""),
    "learning rate": Case(overrides=("optimizer.lr=2e-3",), says=r"optimizer.lr: 0.002 on B \(rank 1\), 0.001 on A"),
    "seed": Case(overrides=("train.seed=7",), says=r"train.seed: 7 on B \(rank 1\), \d+ on A \(rank 0\)$"),
    "layout": Case(overrides=("parallel.sequence=2",), says=r"parallel.sequence: 2 on B \(rank 1\), 1 on A"),
    "operators": Case(overrides=("train.kernels=reference",), says=r'train.kernels: "reference" on B \(rank 1\), "'),
    "content": Case(directory="other", says=r"content of data.store: sha256 \w+ on B \(rank 1\), sha256 \w+ on A"),
    "tokenizer": Case(directory="words", says=r"tokenizer of data.store: words, 301 tokens, .* words, 300 tokens, "),
    "validation": Case(
        both=("data.validation.held.source=text", "data.validation.held.store=store"),
        overrides=("data.validation.held.store=other/store",),
        says=r"content of data.validation.held.store: sha256 \w+ on B",
    ),
    "no store": Case(directory="one", says=r"B \(rank 1\): store: no token store"),
    "no configuration": Case(overrides=("optimizer.rate=1",), says=r"B \(rank 1\): .*optimizer.rate"),
    "first weights": Case(
        both=("train.init_from=one/runs/first@10",),
        overrides=("train.init_from=two/runs/first@10",),
        says=r"full checkpoint train.init_from: \w+ on B",
    ),
    "run": Case(run="runs/other", says=r"--run: /.*/runs/other on B \(rank 1\), /.*/runs/mine on A \(rank 0\)$"),
    "allowed changes": Case(allow=("data",), says=r"--allow-change: data on B \(rank 1\), none on A"),
    "variable": Case(variable=("NVIDIA_TF32_OVERRIDE", "1"), says=r"\$NVIDIA_TF32_OVERRIDE: 1 on B \(rank 1\), none"),
    "code": Case(package="copy", says=r"lightscale's code: \w{32} on B \(rank 1\), \w{32} on A"),
    "version": Case(version=("numpy", "1.0"), says=r"version of numpy: 1.0 on B \(rank 1\), \S+ on A \(rank 0\)$"),
}


def try_cases(rank: int, world_size: int, init_method: str, folder: str, ports: list[int]) -> dict[str, str]:
    """The message of each case; "" where there is none."""
    rank_facts.host_name = lambda: "AB"[rank]
    return {name: try_case(CASES[name], rank, Path(folder), port) for name, port in zip(CASES, ports, strict=True)}


def try_case(case: Case, rank: int, folder: Path, port: int) -> str:
    other = rank == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / case.directory if other else folder)
        if other and case.variable:
            patch.setenv(*case.variable)
        if other and case.package:
            patch.setattr(lightscale, "__file__", str(folder / case.package / "__init__.py"))
        if other and case.version:
            versions = dict([case.version])
            patch.setattr(rank_facts, "package_versions", lambda: {**ORIGINAL_VERSIONS(), **versions})
        overrides = (*case.both, *(case.overrides if other else ()))
        # Absolute, because a rank may be in another directory than its run.
        run = folder / (case.run if other else "runs/mine")
        try:
            meet(
                place(rank, port),
                lambda: load(folder / "run.toml", overrides),
                RunDirectory(run),
                case.allow if other else (),
            )
        except UserError as error:
            return f"{error.EXIT_CODE} {error}"
        return ""


ORIGINAL_VERSIONS = rank_facts.package_versions


def test_each_difference_is_named_on_all_ranks(run_ranks: RunRanks, folder: Path) -> None:
    package = Path(lightscale.__file__).parent
    shutil.copytree(
        package,
        folder / "copy",
        ignore=lambda _, names: [one for one in names if "." in one[-5:] and not one.endswith(".py")],
    )
    changed = folder / "copy/kernels/norm/reference.py"
    changed.write_text(changed.read_text() + "\n")
    first, second = run_ranks(try_cases, 2, str(folder), free_ports(len(CASES)))
    assert first == second
    assert first.pop("nothing") == ""
    for name, said in first.items():
        head, *lines = said.splitlines()
        assert head == "78 the ranks cannot train one run together; nothing was started:", name
        assert any(re.search(CASES[name].says, line) for line in lines), (name, said)
    # Nothing else is taken for a difference: here one key differs and no more.
    for name in (
        "learning rate",
        "seed",
        "layout",
        "operators",
        "run",
        "allowed changes",
        "variable",
        "code",
        "version",
        "content",
    ):
        assert len(first[name].splitlines()) == 2, first[name]
    assert not (folder / "runs").exists()


def try_numbers(rank: int, world_size: int, init_method: str, ports: list[int]) -> list[str]:
    """Rank numbers that are wrong in several ways; this process is `rank` of three."""
    said = []
    for (number, size), port in zip(NUMBERS[rank], ports, strict=True):
        facts = RankFacts(rank=number, world_size=size, host="ABC"[rank], process=100 + rank, values={})
        began = time.monotonic()
        try:
            agree(place(number, port, size), facts, TIMEOUT_S)
            said.append("")
        except UserError as error:
            said.append(str(error))
        # Known at once, not when the time is over.
        assert time.monotonic() - began < TIMEOUT_S / 2
    return said


# By process: its number and WORLD_SIZE in each of the attempts.
NUMBERS = [
    [(0, 3), (0, 3), (0, 4)],
    [(1, 3), (0, 3), (1, 3)],
    [(1, 3), (1, 3), (2, 3)],
]


def test_numbers_that_are_given_twice_or_do_not_fit(run_ranks: RunRanks) -> None:
    said = run_ranks(try_numbers, 3, free_ports(3))
    twice, two_servers, sizes = zip(*said, strict=True)
    assert len(set(twice)) == 1
    assert re.search(
        r"at 127.0.0.1:\d+: rank 1 is assigned to process 10[12] on [BC], process 10[12] on [BC]; ", twice[0]
    )
    assert len(set(two_servers)) == 1
    assert re.search(r"rank 0 is assigned to process 10[01] on [AB], process 10[01] on [AB]", two_servers[0])
    assert all(re.search(r"WORLD_SIZE: [34] on .*rank.*, [34] on ", one) for one in sizes)


def facts(rank: int, world_size: int, error: str | None = None, **values: str) -> RankFacts:
    return RankFacts(
        rank=rank, world_size=world_size, host=f"node{rank // 8}", process=rank, values=values, error=error
    )


def test_ranks_that_do_not_come_are_named() -> None:
    (port,) = free_ports(1)
    with pytest.raises(CannotStart) as caught:
        agree(place(1, port), facts(1, 2), SHORT_S)
    assert f"rank 0 of 2 cannot be reached at 127.0.0.1:{port}" in str(caught.value)
    with pytest.raises(CannotStart) as caught:
        agree(place(0, port, 4), facts(0, 4, error="data.store: not there"), SHORT_S)
    assert f"of 4 ranks, 1, 2, 3 did not come to 127.0.0.1:{port} within 1 s" in str(caught.value)
    assert "rank 0 on node0: data.store: not there" in str(caught.value)
    # The launcher starts the ranks again; a scheduler may.
    assert caught.value.EXIT_CODE == 75


def test_the_usual_value_of_many_ranks_is_right_and_few_of_the_others_are_named() -> None:
    ranks = [facts(rank, 64, lr="2" if 3 <= rank < 23 else "1", seed="5") for rank in range(64)]
    said = str(disagreement(ranks))
    assert said.splitlines()[1] == (
        "lr: 2 on node0 (ranks 3-7), node1 (ranks 8-10) and 12 more ranks, 1 on the other 44 ranks"
    )
    assert len(said.splitlines()) == 2
    assert disagreement([facts(rank, 64, lr="1") for rank in range(64)]) is None


def test_one_mistake_of_all_ranks_is_said_as_by_one() -> None:
    ranks = [facts(rank, 4, error="optimizer.lr = -1: must be positive") for rank in range(4)]
    assert disagreement(ranks) == "optimizer.lr = -1: must be positive"
    many = [facts(0, 2, **{f"key{n}": "0" for n in range(30)}), facts(1, 2, **{f"key{n}": "1" for n in range(30)})]
    assert str(disagreement(many)).splitlines()[-1] == "and 10 more keys"


def start_by_hand(folder: Path, command: Callable[[int], list[str]], variables: Callable[[int], dict[str, str]]) -> Any:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    processes = [
        subprocess.Popen(
            command(rank),
            cwd=folder,
            env=environment | variables(rank),
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=110)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], said


@pytest.mark.long
def test_ranks_started_by_hand_with_another_learning_rate(folder: Path) -> None:
    (port,) = free_ports(1)

    def command(rank: int) -> list[str]:
        other = ["optimizer.lr=2e-3"] if rank == 1 else []
        return [sys.executable, "-m", "lightscale", "train", "run.toml", *other, "--run", "runs/by-hand"]

    codes, said = start_by_hand(folder, command, lambda rank: place(rank, port).variables())
    assert codes == [78, 78], said
    assert said[0] == said[1]
    assert re.fullmatch(
        r"error: the ranks cannot .*:\n +optimizer.lr: 0.002 on \S+ \(rank 1\), 0.001 on \S+ \(rank 0\)\n", said[0]
    )
    assert not (folder / "runs/by-hand").exists()


@pytest.mark.long
def test_ranks_started_by_hand_look_at_the_store_too(folder: Path) -> None:
    """What the launcher would refuse: here an embedding without a row for the mask."""
    (port,) = free_ports(1)
    task = ["task.name=masked", "model.mixer=llama", "model.mixer_options.llama.causal=false", "model.vocab_size=300"]
    command = [sys.executable, "-m", "lightscale", "train", "run.toml", *task, "--run", "runs/masked"]
    codes, said = start_by_hand(folder, lambda rank: command, lambda rank: place(rank, port).variables())
    assert codes == [78, 78], said
    assert said[0] == said[1]
    assert "model.vocab_size = 300 leaves no id for the mask" in said[0]
    assert not (folder / "runs/masked").exists()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train.seed=7"], "train.seed: 7 on"),
        (["data.store=other/store"], "content of data.store: sha256"),
        (["parallel.sequence=2"], "parallel.sequence: 2 on"),
        (["--run-dir", "runs/elsewhere"], "--run: "),
    ],
)
def test_torchruns_of_two_nodes_that_disagree(folder: Path, words: list[str], says: str) -> None:
    (port,) = free_ports(1)

    def command(node: int) -> list[str]:
        options = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", "--master-addr=127.0.0.1"]
        train = ["-m", "lightscale", "train", "run.toml", "--run-dir", "runs/nodes", *(words if node else [])]
        return [sys.executable, "-m", "torch.distributed.run", *options, f"--master-port={port}", *train]

    codes, said = start_by_hand(folder, command, lambda rank: {})
    assert codes == [1, 1], said
    for one in said:
        assert "error: the ranks cannot train one run together" in one
        assert says in one
        assert "exitcode  : 78" in one
        assert "Traceback" not in one.partition("ChildFailedError")[0].partition("error: the ranks")[0]
    assert not (folder / "runs/nodes").exists()
