import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.launch.commands import checks
from lightscale.launch.commands import train as train_command
from lightscale.launch.launcher import restart
from lightscale.launch.launcher.restart import NodesLost, RestartPolicy
from lightscale.launch.launcher.torchrun import ThisMachine
from lightscale.launch.scheduler import JobState, Phase
from lightscale.launch.slurm import allocation
from lightscale.launch.slurm.client import Node
from lightscale.runs.job_environment import JOB_ID
from lightscale.runs.jobs import JobRecord, record_job
from lightscale.runs.lock import RunLock
from lightscale.runs.run_directory import RunDirectory, read_lines

WriteStore = Callable[..., None]
SOURCES = {name: np.arange(1, 200) for name in ("text", "held")}


@pytest.fixture
def folder(tmp_path: Path, tiny_run: Path, monkeypatch: pytest.MonkeyPatch, write_store: WriteStore) -> Path:
    """The current directory, with tiny-run.toml and its store; outside of any job, and without GPUs."""
    assert tiny_run.parent == tmp_path
    write_store(tmp_path / "store", 300, **SOURCES)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(checks, "_num_gpus", lambda: 0)
    return tmp_path


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the command would have started."""
    # The command sets it in this process; set and removed here, it is removed again at the end.
    monkeypatch.setenv(JOB_ID, "none")
    monkeypatch.delenv(JOB_ID)
    calls: list[dict[str, Any]] = []

    def run_ranks(run: RunDirectory, command: list[str], **options: Any) -> int:
        calls.append({"run": run.path, "command": command, **options})
        return 75

    monkeypatch.setattr(restart, "run_ranks", run_ranks)
    return calls


def train(*words: str) -> int:
    parser = argparse.ArgumentParser()
    train_command.add_arguments(parser)
    return train_command.run(parser.parse_args(words))


def test_ranks_get_the_stored_configuration(folder: Path, launched: list[dict[str, Any]]) -> None:
    assert train("tiny-run.toml", "optimizer.lr=2e-4") == 75
    (call,) = launched
    assert call["run"] == Path("runs/tiny-run")
    assert call["processes"] == 1
    stored = Path("runs/tiny-run/config.toml")
    assert call["command"][1:] == ["-m", "lightscale", "train", str(stored), "--run", "runs/tiny-run"]
    assert load(stored) == load("tiny-run.toml", ["optimizer.lr=2e-4"])
    assert call["resume"] == "lightscale train tiny-run.toml optimizer.lr=2e-4 --run runs/tiny-run"
    assert call["policy"] == RestartPolicy(config=load(stored).restart)


def test_ranks_are_forks_of_the_launcher_where_there_is_no_gpu(
    folder: Path, launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    train("tiny-run.toml")
    monkeypatch.setattr(checks, "_num_gpus", lambda: 1)
    train("tiny-run.toml")
    assert [call["nodes"].forks for call in launched] == [True, False]


def test_options_of_restarts(folder: Path, launched: list[dict[str, Any]]) -> None:
    words = ["restart.max_cycles=7", "--no-restart", "--stop-after", "1h30m"]
    before = time.monotonic()
    train("tiny-run.toml", *words)
    (call,) = launched
    policy = call["policy"]
    assert (policy.again, policy.config.max_cycles) == (False, 7)
    assert before + 5400 <= policy.deadline_s <= time.monotonic() + 5400
    assert call["resume"].endswith("restart.max_cycles=7 --run runs/tiny-run --stop-after 1h30m --no-restart")


def test_one_run_is_for_one_job(folder: Path, launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    train("tiny-run.toml")
    with (
        RunLock(RunDirectory("runs/tiny-run")),
        pytest.raises(UserError, match=f"runs/tiny-run is in use by process {os.getpid()}"),
    ):
        train("tiny-run.toml", "checkpoint.every=2")
    assert len(launched) == 1
    assert load("runs/tiny-run/config.toml").checkpoint.every is None, "nothing was touched"
    train("tiny-run.toml")
    assert len(launched) == 2


def test_a_job_that_was_queued_again_waits_for_what_is_left_of_itself(
    folder: Path, launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    train("tiny-run.toml")
    monkeypatch.setattr(train_command, "_allocation", lambda *_: ThisMachine())
    monkeypatch.setattr(train_command, "_PAUSE_S", 0.05)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv(JOB_ID, "17")
    with contextlib.ExitStack() as held:
        held.enter_context(RunLock(RunDirectory("runs/tiny-run")))
        given_up = threading.Timer(0.5, held.close)
        given_up.start()
        assert train("tiny-run.toml", "--scheduler", "slurm") == 75
        given_up.join()
    assert len(launched) == 2
    with RunLock(RunDirectory("runs/tiny-run")):
        monkeypatch.setenv("SLURM_JOB_ID", "18")
        with pytest.raises(UserError, match="of job 17, since"):
            train("tiny-run.toml", "--scheduler", "slurm")


@pytest.mark.parametrize(("phase", "waits"), [("ended", True), ("running", False), ("unknown", False)])
def test_a_job_of_a_chain_waits_for_the_lock_of_one_that_has_ended(
    folder: Path, launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, phase: Phase, waits: bool
) -> None:
    train("tiny-run.toml")
    run = RunDirectory("runs/tiny-run")
    for number in (17, 18):
        record_job(run, JobRecord(number=number))
    monkeypatch.setattr(train_command, "_allocation", lambda *_: ThisMachine())
    monkeypatch.setattr(train_command, "_PAUSE_S", 0.05)
    states = {17: JobState(number=17, phase=phase)}
    monkeypatch.setattr(
        train_command, "job_states", lambda records: {record: states[record.number] for record in records}
    )
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv(JOB_ID, "17")
    with contextlib.ExitStack() as held:
        held.enter_context(RunLock(run))
        monkeypatch.setenv("SLURM_JOB_ID", "18")
        monkeypatch.setenv(JOB_ID, "18")
        if not waits:
            with pytest.raises(UserError, match="of job 17, since"):
                train("tiny-run.toml", "--scheduler", "slurm")
            return
        given_up = threading.Timer(0.5, held.close)
        given_up.start()
        assert train("tiny-run.toml", "--scheduler", "slurm") == 75
        given_up.join()
    assert len(launched) == 2


def test_the_nodes_of_a_job_are_shared_out_as_the_batch_allows(
    folder: Path, launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "require", lambda *_: None)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    train("tiny-run.toml", "--scheduler", "slurm")
    nodes = launched[0]["nodes"]
    assert (nodes.job, nodes.num_nodes, nodes.least_nodes) == (17, 4, 2)
    up = [Node(name=f"n{number}", address=f"10.0.0.{number}", is_up=number != 3) for number in range(1, 5)]
    monkeypatch.setattr(allocation, "nodes_of", lambda job: up)
    # A batch of 4 is not for 3.
    assert [node.name for node in nodes._usable()] == ["n1", "n2"]
    up[0] = dataclasses.replace(up[0], is_up=False)
    up[1] = dataclasses.replace(up[1], is_up=False)
    with pytest.raises(NodesLost, match="1 of the 4 nodes of job 17 are up"):
        nodes._usable()
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    with pytest.raises(UserError, match="global_batch_size = 4"):
        train("tiny-run.toml", "--scheduler", "slurm", "--run", "runs/other")
    with pytest.raises(UserError, match="--min-nodes 4: must be at least 1 and at most the 3 nodes"):
        train("tiny-run.toml", "--scheduler", "slurm", "--min-nodes", "4")
    monkeypatch.delenv("SLURM_JOB_NUM_NODES")
    with pytest.raises(UserError, match="--scheduler slurm: not inside a SLURM job"):
        train("tiny-run.toml", "--scheduler", "slurm")


def test_one_rank_per_gpu(folder: Path, launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_num_gpus", lambda: 4)
    train("tiny-run.toml")
    train("tiny-run.toml", "--processes", "2")
    train("tiny-run.toml", "train.device=cpu", "--run", "runs/other")
    assert [call["processes"] for call in launched] == [4, 2, 1]
    with pytest.raises(UserError, match="--processes 8: this machine has 4 GPUs"):
        train("tiny-run.toml", "--processes", "8")


def test_a_runs_own_configuration_stands_for_the_run(folder: Path, launched: list[dict[str, Any]]) -> None:
    train("tiny-run.toml", "--run", "elsewhere/mine")
    RunDirectory("elsewhere/mine").begin_attempt()
    train("elsewhere/mine/config.toml")
    assert [call["run"] for call in launched] == [Path("elsewhere/mine")] * 2
    # An average or an import has no events.
    written = RunDirectory("elsewhere/mean")
    written.create(load(Path("elsewhere/mine/config.toml")))
    written.write_status("finished", reason="mean of mine@1 and mine@2", step=2, tokens=512)
    assert checks.default_directory(written.config) == written.path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--processes", "3"], "global_batch_size = 4"),
        (["--processes", "0"], "--processes 0: must be at least 1"),
        (
            ["--stop-after", "soon"],
            '--stop-after soon: must be a time in days, hours, minutes and seconds, such as "23h30m"',
        ),
        (["parallel.tensor=2"], "parallel.tensor = 2"),
        (["train.device=cuda"], "torch sees no GPU"),
        (["model.vocab_size=299"], "model.vocab_size = 299 is less than the 300 tokens"),
        (["data.store=nowhere"], "nowhere"),
        (["model.grid={shape=[5,4]}"], "sequence_length = 64 cuts documents of 21 tokens (model.grid); use 63"),
        (["model.grid={shape=[7,9]}"], "document 0 has 200 tokens, but model.grid has 64"),
        (["model.grid={shape=[7,9]}", 'data.packing="joined"'], 'data.packing = "joined" with model.grid'),
        (
            [
                *('model.mixer="lightnet"', "model.grid={shape=[4,16],leading_tokens=0}"),
                *("parallel.sequence=8", "--processes", "8"),
            ],
            "parallel.sequence = 8 cuts sequences of 64 tokens into segments that are no multiples of the 16 tokens",
        ),
        (["data.sources={poems=1.0}"], "poems"),
        (['data.validation.books.source="books"'], "data.validation.books.source: no source 'books' in "),
        (
            ['data.validation.held={source="held", store="other"}'],
            "data.validation.held.store = other was written with another tokenizer",
        ),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    folder: Path, launched: list[dict[str, Any]], write_store: WriteStore, words: list[str], message: str
) -> None:
    write_store(folder / "other", 200, **SOURCES)
    with pytest.raises(UserError) as caught:
        train("tiny-run.toml", *words)
    assert message in str(caught.value)
    assert launched == []
    assert not (folder / "runs").exists()


def test_another_configuration_is_refused_before_ranks_start(folder: Path, launched: list[dict[str, Any]]) -> None:
    train("tiny-run.toml")
    with pytest.raises(UserError, match=r"optimizer\.lr: 0\.001 in the run, 0\.5 now"):
        train("tiny-run.toml", "optimizer.lr=0.5")
    assert len(launched) == 1


def test_a_finished_run_is_not_started_again_until_it_is_made_longer(
    folder: Path, launched: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    train("tiny-run.toml")
    RunDirectory("runs/tiny-run").write_status("finished", reason="all steps", step=4, tokens=1024)
    assert train("tiny-run.toml", "--json") == 0
    output = capsys.readouterr()
    assert "runs/tiny-run is finished: all 4 steps are done" in output.err
    record = json.loads(output.out)
    assert (record["run"], record["exit_code"], record["status"]) == ("runs/tiny-run", 0, "finished")
    assert len(launched) == 1
    train("tiny-run.toml", "train.steps=6")
    assert len(launched) == 2


# Stands in for the training loop: takes steps up to train.steps, and stops once on the way.
STUB = """
import os, sys, types

with open(os.environ["PROGRAMS"], "a") as file:
    file.write(f"{os.getpid()}\\n")

def train(config, run, allow, hold, planned_memory_bytes, begin_evaluation, store):
    assert not allow
    if os.environ["RANK"] == "0":
        attempt = run.begin_attempt(world_size=int(os.environ["WORLD_SIZE"]))
        print("attempt", attempt, "in", config.train.steps, "steps")
        if attempt == 1:
            run.write_status("resumable", reason="SIGTERM", step=2, tokens=512)
        else:
            run.write_status("finished", reason="all steps are done", step=4, tokens=1024)
    return "finished"

sys.modules["lightscale.training.train"] = types.SimpleNamespace(train=train, preload=lambda config: None)
"""


@pytest.fixture
def lightscale(folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The real command, whose ranks find the stub in place of the training loop."""
    (folder / "stub").mkdir()
    (folder / "stub" / "sitecustomize.py").write_text(STUB)
    environment = {**os.environ, "PYTHONPATH": str(folder / "stub"), "CUDA_VISIBLE_DEVICES": ""}
    environment["PROGRAMS"] = str(folder / "programs")

    def lightscale(*words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *launcher, "-m", "lightscale", *words]
        return subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=100, check=False
        )

    return lightscale


@pytest.mark.long
def test_the_whole_way_from_start_to_end(
    lightscale: Callable[..., subprocess.CompletedProcess[str]], folder: Path
) -> None:
    first = lightscale("train", "tiny-run.toml", "--processes", "2")
    resume = "resume with: lightscale train tiny-run.toml --run runs/tiny-run --processes 2"
    assert (first.returncode, first.stderr.splitlines()[-1]) == (75, resume), first.stderr
    assert first.stdout == "attempt 1 in 4 steps\n"
    # Python began once: what the launcher had imported, its ranks had too.
    assert len((folder / "programs").read_text().split()) == 1
    assert first.stderr.splitlines()[:2] == ["loading PyTorch and Megatron …", "starting 2 ranks"]
    # By torchrun itself, on one rank: the same run. Its ranks leave 0, and status.json says how it ended.
    second = lightscale("train", "tiny-run.toml", launcher=("-m", "torch.distributed.run", "--nproc-per-node=1"))
    assert second.returncode == 0, second.stderr
    assert "attempt 2 in 4 steps" in second.stdout


def test_a_harmless_change_of_the_configuration_is_recorded(folder: Path, launched: list[dict[str, Any]]) -> None:
    train("tiny-run.toml")
    shutil.copy("tiny-run.toml", "copy.toml")
    train("copy.toml", "checkpoint.every=2", "--run", "runs/tiny-run")
    (event,) = read_lines(RunDirectory("runs/tiny-run").events)
    assert event["event"] == "configuration_changed"
    assert event["changes"] == {"checkpoint.every": {"before": None, "now": 2}}
