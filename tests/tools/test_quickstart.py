"""``tools/quickstart.py``: the table of where the time went; the whole way is `make quickstart`."""

import json
import os
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def quickstart(tools_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With the run and the installation in a folder of this test."""
    import quickstart

    monkeypatch.setattr(quickstart, "RUN", tmp_path)
    monkeypatch.setattr(quickstart, "STAMP", tmp_path / "installed")
    return quickstart


def at(second: int) -> str:
    return f"2026-11-23T05:00:{second:02d}.000+00:00"


def test_every_second_of_training_has_a_name(quickstart: ModuleType, tmp_path: Path) -> None:
    """Two attempts of 20 and 10 s, with two steps each; the first begins one second after the minute."""
    steps = [(1, 8, 2.0), (2, 11, 3.0), (3, 35, 2.0), (4, 38, 3.0)]
    lines = [
        {"step": step, "attempt": 1 + step // 3, "time": at(second), "step_s": step_s, "loss": 1.0}
        for step, second, step_s in steps
    ]
    lines.append({"step": 4, "attempt": 2, "time": at(39), "validation": {"stdlib": {"loss": 1.0}}})
    save = {"event": "checkpoint", "attempt": 1, "step": 2, "time": at(12), "stall_s": 0.5}
    events = [{"event": "start", "attempt": 1, "time": at(5)}, save]
    for name, records in (("metrics", lines), ("events", events)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    minute_s = quickstart.seconds(at(0))
    spent = quickstart.training_times([(minute_s + 1, minute_s + 21), (minute_s + 30, minute_s + 40)])
    assert spent == pytest.approx(
        {"starts of the ranks": 5 + 3, "training steps": 10, "saving": 0.5, "validation and shutdown": 11.5}
    )


def test_an_installation_counts_if_it_was_just_now(quickstart: ModuleType) -> None:
    assert quickstart.installation_s() is None
    quickstart.STAMP.write_text("83\n")
    assert quickstart.installation_s() == 83
    before_s = quickstart.STAMP.stat().st_mtime - 3600
    os.utime(quickstart.STAMP, (before_s, before_s))
    assert quickstart.installation_s() is None
