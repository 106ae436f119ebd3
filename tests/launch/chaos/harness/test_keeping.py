"""Judged runs as JSON, and the steps that faults cost."""

import json
from pathlib import Path

import pytest

from lightscale.launch.chaos.faults.kills import Kill
from lightscale.launch.chaos.faults.lost_checkpoints import MissingCheckpoints
from lightscale.launch.chaos.harness.costs import over_bound
from lightscale.launch.chaos.harness.keeping import CampaignProgress, Judged
from lightscale.launch.chaos.harness.trial import Injected, Trial
from lightscale.launch.chaos.harness.verify import Verdict

KILL = Kill(victims=(0,), launcher=False, point="save:write")
VERDICT = Verdict(
    compared=70, mismatches=("one",), mismatched_lines=(3,), wrong_resumes=(), lost_steps=10, max_lost_steps=7
)


def judged(name: str, taken: int) -> Judged:
    trial = Trial(
        injected=[
            Injected(fault=KILL, during=("slow network",), recovered=True, recovery_s=2.5),
            Injected(fault=MissingCheckpoints(way="w"), sign=lambda since: "", missed="it went on", first_line=4),
        ],
        finished=True,
        seconds=9.0,
    )
    return Judged(name=name, taken=taken, trial=trial, verdict=VERDICT, over_bound=["too much"])


def test_what_is_kept_is_what_was_judged(tmp_path: Path) -> None:
    before = judged("round", 2)
    after = Judged.from_record(json.loads(json.dumps(before.to_record())))
    assert (after.name, after.taken, after.verdict, after.over_bound) == ("round", 2, VERDICT, ["too much"])
    assert after.trial.undetected == before.trial.undetected
    for one, other in zip(after.trial.injected, before.trial.injected, strict=True):
        assert (one.fault.kind, one.fault.bound, one.during) == (other.fault.kind, other.fault.bound, other.during)
        assert (one.recovered, one.recovery_s, one.missed) == (other.recovered, other.recovery_s, other.missed)
        assert (one.sign is None) == (other.sign is None)
    # Again, and it is the same.
    assert Judged.from_record(after.to_record()).to_record() == after.to_record()


def test_a_campaign_goes_on_only_with_its_own_question(tmp_path: Path) -> None:
    path, question = tmp_path / "progress.json", {"seed": 0, "amounts": {"kills": 3}}
    first = CampaignProgress(path, question)
    for name, taken in (("round", 2), ("guarded", 1), ("round", 3)):
        first.add(judged(name, taken))
    again = CampaignProgress(path, question)
    assert [one.name for one in again.judged] == ["round", "guarded", "round"]
    assert (again.taken("round"), again.taken("guarded"), again.taken("disk")) == (5, 1, 0)
    assert CampaignProgress(path, {**question, "seed": 1}).judged == []
    path.write_text("{", encoding="utf-8")
    assert CampaignProgress(path, question).judged == []
    again.finish()
    assert not path.exists()


@pytest.mark.parametrize(
    ("resumed", "first_line", "wrong"), [(6, 12, False), (2, 12, True), (6, 20, True), (12, 12, False)]
)
def test_a_loss_has_faults_that_may_have_caused_it(resumed: int, first_line: int, wrong: bool) -> None:
    """Two intervals of five steps for a kill, and nothing without one."""
    lines = [{"step": step, "attempt": 1} for step in range(1, 13)]
    lines += [{"step": step, "attempt": 2} for step in range(resumed, 25)]
    trial = Trial(injected=[Injected(fault=KILL, first_line=first_line, last_line=first_line)])
    found = over_bound(trial, lines, [], 5)
    assert bool(found) == wrong
    # A save that was still being written when the next one was due.
    skipped = [{"event": "checkpoint_skipped", "attempt": 1, "step": 10}]
    assert bool(over_bound(trial, lines, skipped, 5)) == (wrong and first_line != 12)
    if wrong:
        named = "at most 10 allowed by kill at save:write" if first_line == 12 else "at most 0 allowed by no fault"
        assert found == [f"attempt 2 began at step {resumed}: {13 - resumed} steps lost, {named}"]
