"""Rounds of a campaign: which faults the next run begins with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale.launch.chaos.campaign import Campaign
from lightscale.launch.chaos.harness.trial import Trial

FAULTS = tuple("abcdefgh")


def campaign(directory: Path, takes: list[int], monkeypatch: pytest.MonkeyPatch) -> Campaign:
    """One whose runs are finished at once; ``takes``: faults that happen in each, the last number again and again."""
    made = Campaign(
        Path("tnl-tiny"),
        [],
        directory,
        processes=1,
        seed=0,
        report=lambda text, result: None,
        keep=lambda result: None,
    )

    def runner(name: str, queue: Any, program: str, more: Any) -> Any:
        trial = Trial(finished=True)

        def run() -> Trial:
            for _ in range(min(len(queue), takes.pop(0) if len(takes) > 1 else takes[0])):
                queue.popleft()
            return trial

        training = SimpleNamespace(lines=list, events=list)
        return SimpleNamespace(run=run, trial=trial, training=training, every=5)

    monkeypatch.setattr(made, "_runner", runner)
    # In place of the schedule's.
    faults = [SimpleNamespace(kind=kind) for kind in FAULTS]
    monkeypatch.setattr(
        "lightscale.launch.chaos.campaign.schedule", lambda *args, where, **more: faults if where == "ordinary" else []
    )
    for name in ("_run_reference", "_clear"):
        monkeypatch.setattr(made, name, lambda *args: None)
    monkeypatch.setattr("lightscale.launch.chaos.campaign.check_detection", lambda *args, **more: None)
    return made


def test_a_fault_that_comes_too_late_keeps_no_other_from_happening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = campaign(tmp_path, [3, 0, 2, 0, 9], monkeypatch).run({}, flips=0)
    assert [trial.too_late for trial in result.trials] == [[], ["d"], [], ["g"], []]
    assert result.skipped == ["d: all steps were done before it", "g: all steps were done before it"]


def test_runs_that_end_before_every_fault_end_the_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = campaign(tmp_path, [2, 0], monkeypatch).run({}, flips=0)
    late = [f"{kind}: all steps were done before it" for kind in "cdefg"]
    assert result.skipped == [*late, "h: the runs had ended or were given up before it"]
