"""The harness on a stand-in for the training: it survives what it should, and mistakes of it are found."""

import sys
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lightscale.launch.chaos.schedule import Amounts, Damage, Fault, Kill, StopRank, schedule
from lightscale.launch.chaos.training import Training
from lightscale.launch.chaos.trial import Runner, Trial
from lightscale.launch.chaos.verify import Verdict, judge
from lightscale.runs.run_directory import RunDirectory, read_lines

PROGRAM = Path(__file__).with_name("fake_training.py")
REFERENCE = [
    {"step": step, "attempt": 1, "tokens": 8 * step, "loss": 10 / step, "grad_norm": 1.0} for step in range(1, 61)
]
# Behind the first checkpoint.
EVERYTHING = Kill(victims=(0, 1), launcher=True, delay_s=0.3)

# Processes that start and stop, on a machine that may be busy.
pytestmark = pytest.mark.timeout(400)

RunTrial = Callable[..., tuple[Trial, Verdict]]


@pytest.fixture
def run_trial(tmp_path: Path) -> RunTrial:
    """Run the stand-in with a BEHAVIOUR under the faults of a queue."""

    def run_trial(
        behaviour: str, queue: deque[Fault], name: str = "run", patience_s: float = 20
    ) -> tuple[Trial, Verdict]:
        run = RunDirectory(tmp_path / name)
        command = [sys.executable, str(PROGRAM), behaviour, str(run.path)]
        training = Training(command, run, faults_folder=tmp_path / "faults", log=tmp_path / "log")
        runner = Runner(training, queue, every=5, disk_bytes=1, patience_s=20, report=lambda trial, fault: None)
        trial = runner.run()
        lines, events = read_lines(run.metrics), read_lines(run.events)
        return trial, judge(REFERENCE, lines, events, trial.damaged, finished=trial.finished)

    return run_trial


def _kills_launcher(fault: Fault) -> bool:
    return isinstance(fault, Kill) and fault.launcher


def left_behind(tmp_path: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(tmp_path) in word for word in process.info["cmdline"] or ())
    ]


@pytest.mark.parametrize("behaviour", ["good", "restarts"])
def test_faults_are_survived_and_counted(run_trial: RunTrial, tmp_path: Path, behaviour: str) -> None:
    amounts = Amounts(kills=7, damages=1, stops=0, disk_faults=2, full_disks=0)
    faults = schedule(amounts, processes=2, seed=1)
    queue, injected, rounds = deque(faults), [], 0
    while queue:
        trial, verdict = run_trial(behaviour, queue, f"run-{rounds}")
        assert trial.finished
        if behaviour == "restarts":
            launchers = [isinstance(one.fault, Damage) or _kills_launcher(one.fault) for one in trial.injected]
            # Damage that came too late is done again.
            assert 1 + sum(launchers) <= trial.starts <= 2 + sum(launchers), launchers
        assert (trial.failures, trial.orphans, trial.unreached) == ([], [], [])
        assert (verdict.mismatches, verdict.wrong_resumes, verdict.undetected) == ((), (), ())
        assert verdict.compared >= 60
        assert all(one.recovered for one in trial.injected)
        assert len(trial.damaged) == sum(isinstance(one.fault, Damage) for one in trial.injected)
        injected += [one.fault for one in trial.injected]
        rounds += 1
        assert rounds < 40, "the stand-in's steps are over before the faults come"
    assert Counter(fault.kind for fault in injected) == Counter(fault.kind for fault in faults)
    assert left_behind(tmp_path) == []


def test_a_run_that_begins_anew_is_found(run_trial: RunTrial) -> None:
    _, verdict = run_trial("forgets", deque([EVERYTHING]))
    assert verdict.wrong_resumes == ("attempt 2 began again at step 1, though there were checkpoints",)
    assert verdict.lost_steps >= 5


def test_a_run_that_is_not_quite_the_same_is_found(run_trial: RunTrial) -> None:
    trial, verdict = run_trial("drifts", deque([EVERYTHING]))
    assert trial.finished
    assert verdict.mismatches and "attempt 2: loss" in verdict.mismatches[0]


def test_a_run_that_trusts_its_files_is_found(run_trial: RunTrial) -> None:
    # In one of the two tensor files: the manifest notices damage to itself even without a second look.
    for seed in range(10):
        trial, verdict = run_trial("trusts", deque([Damage(how="bit flipped", seed=seed)]), f"run-{seed}")
        if trial.damaged[0].file != "MANIFEST.json":
            assert verdict.undetected == (
                f"{trial.damaged[0].directory}/{trial.damaged[0].file}: attempt 2 resumed from it",
            )
            return
    raise AssertionError("the manifest was chosen ten times")


def test_a_run_that_gives_up_is_found(run_trial: RunTrial) -> None:
    trial, _ = run_trial("gives up", deque([EVERYTHING]))
    assert not trial.finished
    assert [one.recovered for one in trial.injected] == [False]
    assert trial.failures == ["the command ended 5 times without a step, last with 70"]


def test_a_run_that_fails_by_itself_is_not_started_for_ever(run_trial: RunTrial) -> None:
    trial, _ = run_trial("stumbles", deque())
    assert not trial.finished
    assert trial.failures == [
        *["the command ended with 1 without a fault"] * 3,
        "the command ended 3 times without a fault",
    ]


def test_ranks_that_outlive_their_launcher_are_found(
    run_trial: RunTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightscale.launch.chaos.trial.ORPHAN_S", 1.0)
    trial, _ = run_trial("orphans", deque([Kill(victims=(), launcher=True, delay_s=0.1)]))
    assert len(trial.orphans) == 2
    assert left_behind(tmp_path) == []


@pytest.mark.soak
def test_a_stopped_rank(run_trial: RunTrial, tmp_path: Path) -> None:
    trial, verdict = run_trial("watches", deque([StopRank(rank=1, delay_s=0.05)]))
    assert trial.finished and trial.failures == [] and verdict.mismatches == ()
    assert [one.recovered for one in trial.injected] == [True]


@pytest.mark.long
def test_a_stopped_rank_that_nobody_notices(run_trial: RunTrial, tmp_path: Path) -> None:
    trial, _ = run_trial("good", deque([StopRank(rank=1, delay_s=0.05)]))
    assert trial.finished
    assert trial.failures == ["rank 1 was stopped and not detected within 20 s; all were killed"]
    assert left_behind(tmp_path) == []
