"""The harness on a stand-in for the training: it survives what it should, and mistakes of it are found."""

import sys
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lightscale.config.schema import RunConfig
from lightscale.launch.chaos.faults.conditions import Alone, Pair
from lightscale.launch.chaos.faults.damaged_checkpoint import Damage
from lightscale.launch.chaos.faults.damaged_records import RECORDS, DamagedRecord
from lightscale.launch.chaos.faults.kills import Kill, StopRank
from lightscale.launch.chaos.faults.lost_checkpoints import WAYS, MissingCheckpoints
from lightscale.launch.chaos.faults.processes import SlowRank
from lightscale.launch.chaos.harness.training import Training
from lightscale.launch.chaos.harness.trial import Fault, Runner, Subject, Trial
from lightscale.launch.chaos.harness.verify import Verdict, judge
from lightscale.launch.chaos.schedule import schedule
from lightscale.runs.run_directory import RunDirectory

PROGRAM = Path(__file__).with_name("fake_training.py")
REFERENCE = [
    {"step": step, "attempt": 1, "tokens": 8 * step, "loss": 10 / step, "grad_norm": 1.0} for step in range(1, 61)
]
# Behind the first checkpoint.
EVERYTHING = Kill(victims=(0, 1), launcher=True, delay_s=0.3)

# Processes that start and stop, on a machine that may be busy.
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

RunTrial = Callable[..., tuple[Trial, Verdict]]


@pytest.fixture
def run_trial(tmp_path: Path, tiny_config: Callable[..., RunConfig]) -> RunTrial:
    """Run the stand-in with a BEHAVIOUR under the faults of a queue."""

    subject = Subject(
        config=tiny_config("checkpoint.every=5"), processes=2, checkpoint_bytes=1, other_store=tmp_path / "other"
    )

    def run_trial(
        behaviour: str, queue: deque[Fault], name: str = "run", patience_s: float = 20
    ) -> tuple[Trial, Verdict]:
        run = RunDirectory(tmp_path / name)
        command = [sys.executable, str(PROGRAM), behaviour, str(run.path)]
        training = Training(command, run, faults_folder=tmp_path / "faults", log=tmp_path / "log")
        trial = Runner(training, queue, subject, patience_s=patience_s, report=lambda trial, fault: None).run()
        lines, events = training.lines(), training.events()
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
    faults = schedule({"kills": 7, "damages": 1, "disk-faults": 2}, processes=2, seed=1)
    queue, injected, rounds = deque(faults), [], 0
    while queue:
        trial, verdict = run_trial(behaviour, queue, f"run-{rounds}")
        assert trial.finished
        if behaviour == "restarts":
            launchers = [isinstance(one.fault, Damage) or _kills_launcher(one.fault) for one in trial.injected]
            # Damage that came too late is done again; a launcher killed after its last step has nothing left to start.
            assert max(1, sum(launchers)) <= trial.starts <= 2 + sum(launchers), launchers
        assert (trial.failures, trial.orphans, trial.unreached) == ([], [], [])
        assert (verdict.mismatches, verdict.wrong_resumes, trial.undetected) == ((), (), [])
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
        fault = Damage(how="bit flipped", seed=seed)
        trial, _ = run_trial("trusts", deque([fault]), f"run-{seed}")
        if trial.damaged[0].file != "MANIFEST.json":
            where = f"{trial.damaged[0].directory}/{trial.damaged[0].file}"
            assert trial.undetected == [f"{fault}: {where}: attempt 2 resumed from it"]
            return
    raise AssertionError("the manifest was chosen ten times")


def test_what_is_lost_and_damaged_is_noticed(run_trial: RunTrial) -> None:
    metrics, events, jobs, status = (DamagedRecord(record=name, way="zeros", seed=0) for name in RECORDS)
    put_back, begun_again = MissingCheckpoints(way=WAYS[0]), MissingCheckpoints(way=WAYS[3])
    # Records whose lines were destroyed are still compared, and one that is damaged keeps no run from being refused.
    queue: deque[Fault] = deque([metrics, put_back, status, events, begun_again, jobs])
    trial, verdict = run_trial("good", queue)
    assert trial.finished and not queue
    assert (trial.undetected, trial.failures) == ([], [])
    assert (verdict.mismatches, verdict.wrong_resumes) == ((), ())
    assert [one.recovered for one in trial.injected] == [True] * 6


def test_a_run_that_does_not_look_is_found(run_trial: RunTrial) -> None:
    faults: list[Fault] = [DamagedRecord(record="metrics.jsonl", way="zeros", seed=0), MissingCheckpoints(way=WAYS[0])]
    trial, verdict = run_trial("careless", deque(faults))
    assert [text.rpartition("): ")[2] for text in trial.undetected] == [
        "no event reports the damage to metrics.jsonl",
        "it took 1 steps",
    ]
    assert verdict.mismatches == (), "it began again at step 1"
    assert "began again at step 1, though there were checkpoints" in verdict.wrong_resumes[-1]


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
    monkeypatch.setattr("lightscale.launch.chaos.faults.kills.ORPHAN_S", 1.0)
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


def test_a_fault_comes_while_a_condition_lasts(run_trial: RunTrial, tmp_path: Path) -> None:
    slow = SlowRank(rank=1)
    kill = Kill(victims=(0,), launcher=False, delay_s=0.1)
    pair, alone = Pair(first=slow, seconds=0.8, delay_s=0.1, second=kill), Alone(second=SlowRank(rank=0), seconds=0.3)
    queue: deque[Fault] = deque([pair, alone])
    injected, rounds = [], 0
    while queue and rounds < 10:
        trial, verdict = run_trial("restarts", queue, f"run-{rounds}", 150)
        assert (trial.finished, trial.failures, trial.orphans) == (True, [], [])
        assert (verdict.mismatches, verdict.wrong_resumes) == ((), ())
        assert all(one.recovered and one.recovery_s is not None for one in trial.injected)
        injected += trial.injected
        rounds += 1
    assert not queue
    assert [one.during for one in injected if one.fault is kill] == [("slow rank",)]
    assert {one.during for one in injected if one.fault is not kill} == {()}
    # Its end counts, not its beginning.
    assert all(one.last_line >= one.first_line for one in injected)
    assert left_behind(tmp_path) == []
