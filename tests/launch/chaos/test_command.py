"""`lightscale chaos` on real runs: what it prints, what it leaves, and that it can be interrupted."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from lightscale.cli import main
from lightscale.errors import UserError
from lightscale.launch.chaos import campaign, command
from lightscale.launch.chaos.campaign import CampaignResult
from lightscale.launch.chaos.faults.damaged_checkpoint import DamageCheck
from lightscale.launch.chaos.faults.disks import FullDisk
from lightscale.launch.chaos.faults.kills import LOSS, Kill
from lightscale.launch.chaos.harness.hosts import namespace_hosts, stem_of
from lightscale.launch.chaos.harness.trial import Injected, Trial
from lightscale.launch.chaos.harness.verify import Verdict
from lightscale.launch.chaos.schedule import SORTS
from lightscale.runs.run_directory import RunDirectory, read_metrics

ROOT = Path(__file__).resolve().parents[3]

# The sorts of faults that somebody must notice.
WATCHED = ("changed_tokens", "lost_checkpoints", "damaged_records", "disagreements", "nans")

CONFIG = f"""
extends = ["{ROOT}/configs/arch/tnl.toml", "{ROOT}/configs/size/tiny.toml"]

[model]
vocab_size = 64
num_layers = 2
hidden_size = 32

[data]
store = "store"
sequence_length = 32

[data.validation.held]
source = "held"
sequences = 2

[optimizer]
lr = 1e-3
schedule = "cosine"
warmup_steps = 5

[train]
steps = 60
global_batch_size = 4
micro_batch_size = 1
validate_every = 20
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_store: Callable[..., None]) -> Path:
    """The current directory, with chaos.toml and its store."""
    generator = np.random.default_rng(0)
    (tmp_path / "chaos.toml").write_text(CONFIG, encoding="utf-8")
    text, held = (generator.integers(1, 64, size) for size in (20_000, 500))
    write_store(tmp_path / "store", 64, text=text, held=held)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def chaos(capsys: pytest.CaptureFixture[str], *words: str, **amounts: int) -> dict[str, Any]:
    """The record of a campaign with so many faults of each sort, by default none."""
    chosen = [f"--{name}={amounts.get(name.replace('-', '_'), 0)}" for name in SORTS]
    code = main(["chaos", "chaos.toml", "parallel.sequence=2", "--json", *chosen, *words])
    output = capsys.readouterr()
    record: dict[str, Any] = json.loads(output.out)
    assert code == 0, record
    assert record["passed"] and record["complete"]
    for name in ("mismatches", "undetected", "unrecoverable", "wrong_resumes", "failures", "orphans"):
        assert record[name] == 0, record
    assert record["recovered"] == record["faults"]
    assert json.loads(Path("runs/chaos-chaos/chaos.json").read_text()) == record
    assert record["goodput"] > 0
    assert record["steps_compared"] >= 60 * record["runs"]
    return record


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_real_run_under_faults(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = chaos(capsys, kills=2, damages=1)
    assert (record["kills"], record["kills_during_saves"], record["flips"]) == (2, 1, 300)
    assert record["faults"] == 3
    assert len(read_metrics(RunDirectory("runs/chaos-chaos/reference").metrics)) == 60


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_rank_that_computes_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = chaos(capsys, "parallel.sequence=1", "--flips=0", wrong_ranks=1)
    (found,) = record["kinds"].items()
    assert found[0] == "rank that computes slightly wrong" and found[1]["detected"] == 1


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("processes", [2, 4])
def test_every_fault_on_a_real_run(folder: Path, capsys: pytest.CaptureFixture[str], processes: int) -> None:
    amounts = dict.fromkeys(WATCHED, 2) | {"kills": 10, "damages": 6, "disk_faults": 3, "full_disks": 1}
    record = chaos(capsys, "train.steps=100", "--processes", str(processes), **amounts)
    assert record["kills"] == 10
    assert record["kills_during_saves"] >= 5
    # Its disk can only be mounted by root, where mounting is allowed.
    assert record["faults"] == 30 - any(text.startswith("full disk") for text in record["left_out"])


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_what_a_run_must_notice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in Path("store").rglob("*") if path.is_file()}
    record = chaos(capsys, "--flips=0", **dict.fromkeys(WATCHED, 1))
    assert record["faults"] == 5
    # What was seen of each is in the events, or was said where a start was refused.
    assert [kind["detected"] for kind in record["kinds"].values()] == [1] * 5
    assert RunDirectory("runs/chaos-chaos/peaceful-0001").read_status() is not None
    assert before == {path: path.read_bytes() for path in Path("store").rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_faults_on_two_hosts(folder: Path, capsys: pytest.CaptureFixture[str], needs: Callable[..., None]) -> None:
    needs("root", "ip", "tc", "unshare")
    amounts = {"lost_hosts": 1, "links": 1, "changed_tokens": 1, "second_jobs": 1}
    # Of this seed the link is cut for five seconds: the steps cannot be over before it is mended.
    record = chaos(capsys, "train.steps=100", "--flips=0", "--hosts=2", "--seed=45", **amounts)
    detected = {kind: one["detected"] for kind, one in record["kinds"].items()}
    assert detected == {
        "changed tokens under a job": 1,
        "link cut": 0,
        f"{LOSS}save:retention": 0,
        "second job on the run": 1,
    }
    # The undisturbed run, whose losses all of these have, was one of this machine.
    logs = [Path(f"runs/chaos-chaos/{name}.log").read_text() for name in ("reference", "round-0001.node-b")]
    assert ["rank 1 of 2, rendezvous at 10.231.0.1:" in log for log in logs] == [False, True]
    assert not namespaces()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_interrupted_campaign_leaves_no_host(folder: Path, needs: Callable[..., None]) -> None:
    needs("root", "ip", "tc", "unshare")
    words = [sys.executable, "-m", "lightscale", "chaos", "chaos.toml", "--hosts=2", "--kills=9", "--flips=0"]
    words += [f"--{name}=0" for name in SORTS if name != "kills"]
    below: set[int] = set()
    try:
        for signum, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
            process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
            deadline, before = time.monotonic() + 120, below
            # Launchers and ranks of its own, after those that the killed one has left.
            while len(below := {one for name in namespaces() for one in processes_in(name)} - before) < 4:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.1)
            assert not any(psutil.pid_exists(one) for one in before)
            process.send_signal(signum)
            process.communicate(timeout=60)
            assert process.returncode == code
            assert bool(namespaces()) == (signum == signal.SIGKILL)
        assert not any(psutil.pid_exists(one) for one in below)
    finally:
        with namespace_hosts(stem_of(Path("runs/chaos-chaos")), 1):
            pass


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"{stem_of(Path('runs/chaos-chaos'))}-")]


def processes_in(namespace: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False).stdout
    return [int(one) for one in listed.split()]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_campaign_leaves_no_process(folder: Path, signum: signal.Signals) -> None:
    words = [sys.executable, "-m", "lightscale", "chaos", "chaos.toml", "--processes", "2"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(below := psutil.Process(process.pid).children(recursive=True)) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.endswith("interrupted\n")
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in below)
    # What was begun is not taken for an undisturbed run.
    assert not RunDirectory("runs/chaos-chaos/reference").read_status()


VERDICT = Verdict(compared=70, mismatches=(), mismatched_lines=(), wrong_resumes=(), lost_steps=10, max_lost_steps=7)


def result(**changes: Any) -> CampaignResult:
    kill = Kill(victims=(0,), launcher=False, point="save:write")
    trial = Trial(injected=[Injected(fault=kill, recovered=True)], finished=True, seconds=20.0)
    return CampaignResult(reference_s=6.0, trials=[trial], verdicts=[VERDICT], finished_s=[12.0], **changes)


def test_the_summary() -> None:
    record = command.summary(result(detection=DamageCheck(flips=300, others=20)))
    assert record["passed"]
    assert (record["faults"], record["recovered"], record["unrecoverable"]) == (1, 1, 0)
    assert (record["kills"], record["kills_during_saves"], record["seconds_per_fault"]) == (1, 1, 20.0)
    assert (record["goodput"], record["lost_steps"], record["max_lost_steps"]) == (0.5, 10, 7)
    nothing = {"mismatches": 0, "detected": 0, "undetected": 0}
    assert record["kinds"] == {"kill at save:write": {"faults": 1, "recovered": 1, **nothing}}
    assert command.summary(CampaignResult())["goodput"] is None


def test_what_counts_for_which_fault() -> None:
    bad = result()
    trial = bad.trials[0]
    disk = FullDisk(free_share=0.5, delay_s=0.0)
    trial.injected += [
        Injected(fault=disk, first_line=10, sign=lambda events: None, recovered=True),
        Injected(fault=disk, first_line=20, sign=lambda events: "", missed="it went on"),
    ]
    values = {**VERDICT.__dict__, "mismatches": ("one", "two", "no step"), "mismatched_lines": (9, 10)}
    bad.verdicts[0] = Verdict(**values)
    assert command.summary(bad)["kinds"] == {
        "full disk": {"faults": 2, "detected": 1, "recovered": 1, "mismatches": 1, "undetected": 1},
        "kill at save:write": {"faults": 1, "detected": 0, "recovered": 1, "mismatches": 1, "undetected": 0},
    }


def test_an_interrupted_campaign_is_not_judged_by_what_it_had_no_time_for() -> None:
    stopped = result()
    stopped.trials[0].finished, stopped.trials[0].interrupted = False, True
    assert command.summary(stopped)["passed"]
    stopped.trials[0].interrupted = False
    assert not command.summary(stopped)["passed"]


@pytest.mark.parametrize("what", ["mismatches", "wrong_resumes", "undetected", "failures", "orphans", "lost", "over"])
def test_whatever_is_wrong_fails_the_campaign(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    bad = result()
    trial = bad.trials[0]
    if what in ("failures", "orphans"):
        getattr(trial, what).append("something is wrong")
    elif what == "undetected":
        trial.injected[0].missed = "something is wrong"
    elif what == "lost":
        trial.injected[0].recovered = trial.finished = False
    elif what == "over":
        trial.finished = False
    else:
        values = {**VERDICT.__dict__, what: ("something is wrong",)}
        bad.verdicts[0] = Verdict(**values)
    record = command.summary(bad)
    assert not record["passed"]
    assert record["unrecoverable"] == int(what in ("lost", "over"))
    command._show(record)
    shown = capsys.readouterr().out
    assert shown.endswith("FAILED\n")
    assert ("something is wrong" in shown) == (what not in ("lost", "over"))


@pytest.mark.parametrize("word", ["--kills=-1", "--processes=0", "--full-disks=-2"])
def test_amounts_are_checked(folder: Path, capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert main(["chaos", "chaos.toml", word]) == UserError.EXIT_CODE
    assert f"{word.replace('=', ' ')}: must be at least" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts=0"], "--hosts 0: must be from 1 to 26"),
        (["--hosts=27", "--processes=27"], "--hosts 27: must be from 1 to 26"),
        (["--hosts=2", "--processes=3"], "--processes 3: must be a multiple of --hosts 2; use 4"),
        (["--hosts=2", "--processes=1"], "--processes 1: must be a multiple of --hosts 2; use 2"),
        (["--lost-hosts=3"], "--lost-hosts 3: one host has no other; use --hosts 2, or remove it"),
        (["--links=1", "--hosts=1"], "--links 1: one host has no other"),
        (["--link-pairs=-1"], "--link-pairs -1: must be at least 0"),
        (["--hosts=2"], "--hosts 2: network namespaces need root, tc; use --hosts 1"),
    ],
)
def test_hosts_are_checked_before_anything_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/sbin/{name}")
    assert main(["chaos", "chaos.toml", *words]) == UserError.EXIT_CODE
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def test_hosts_do_not_share_gpus(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "missing_for_hosts", list)
    monkeypatch.setattr(campaign, "num_gpus", lambda config: 8)
    assert main(["chaos", "chaos.toml", "--hosts=2"]) == UserError.EXIT_CODE
    assert "--hosts 2: they would share the GPUs of this machine; set train.device=cpu" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_what_is_between_hosts_is_only_tried_with_several(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for words, hosts in (([], 1), (["--hosts=2"], 2)):
        args = parser.parse_args(["chaos.toml", *words])
        amounts = {name: command._amount(args, name) for name in SORTS}
        between = {name: amount for name, amount in amounts.items() if SORTS[name].between_hosts}
        assert len(between) == 5 and all((amount > 0) == (hosts > 1) for amount in between.values())
        assert f"--hosts={hosts}" in command._command_line(args, Path("runs"))


def test_no_store_is_said_before_anything_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "chaos.toml", "data.store=nowhere"]) == UserError.EXIT_CODE
    assert "nowhere: no token store" in capsys.readouterr().err
    assert not Path("runs").exists()


def campaign_of(*overrides: str, processes: int = 2) -> campaign.Campaign:
    return campaign.Campaign(
        Path("chaos.toml"),
        overrides,
        Path("runs/large"),
        processes=processes,
        seed=0,
        report=lambda *_: None,
        keep=lambda _: None,
    )


@pytest.mark.parametrize(("processes", "axis"), [(2, "tensor"), (2, "pipeline"), (4, "sequence")])
def test_one_data_rank_has_no_other_to_compare_with(folder: Path, processes: int, axis: str) -> None:
    amounts = {"wrong-ranks": 2, "wrong-rank-pairs": 1, "memory-flips": 3}
    one = campaign_of(f"parallel.{axis}={processes}", processes=processes)
    assert one._with_data_ranks(amounts) == {"wrong-ranks": 0, "wrong-rank-pairs": 0, "memory-flips": 3}
    assert [text.split(":")[0] for text in one.result.skipped] == ["wrong-ranks", "wrong-rank-pairs"]
    two = campaign_of(f"parallel.{axis}={processes}", processes=2 * processes)
    assert two._with_data_ranks(amounts) == amounts and two.result.skipped == []


def test_a_store_too_large_to_be_copied(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "LARGEST_STORE_BYTES", 1000)
    one = campaign_of()
    amounts = one._with_stores({"changed-tokens": 2, "disagreements": 1, "nans": 3})
    assert amounts == {"changed-tokens": 0, "disagreements": 0, "nans": 3}
    assert [text.split(" bytes ")[1] for text in one.result.skipped] == ["is too large to copy"] * 2
    assert not Path("runs").exists()
