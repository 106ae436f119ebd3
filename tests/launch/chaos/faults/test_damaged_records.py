"""Damage to records, and whether a start says it."""

import random
from pathlib import Path
from typing import Any

import pytest

from lightscale.launch.chaos.faults import damaged_records
from lightscale.launch.chaos.faults.damaged_records import RECORDS, WAYS, damaged
from lightscale.records import read_records
from lightscale.runs.run_directory import RunDirectory, read_lines


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.begin_attempt(world_size=2)
    for step in (5, 10):
        run.event("checkpoint", step=step, checkpoint=f"step-{step:08d}")
    run.metrics.write_text("".join(f'{{"step": {step}, "attempt": 1, "loss": 0.5}}\n' for step in range(1, 9)))
    run.write_status("stopped", reason="it was stopped", step=10, tokens=100)
    return run


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("way", WAYS)
def test_one_more_line_cannot_be_read_and_that_is_said(run: RunDirectory, record: str, way: str) -> None:
    path = run.path / record
    for seed in range(4):
        # A line that a kill cut stays cut, and is no damage.
        before = (path.read_bytes() if path.exists() else b"") + (b'{"step"' if record == "metrics.jsonl" else b"")
        path.write_bytes(before)
        lines, count = read_lines(path), read_records(path).num_damaged
        num_events = len(read_lines(run.events))
        path.write_bytes(damaged(before, record, way, random.Random(seed)))
        assert path.read_bytes() != before
        if record.endswith(".jsonl"):
            assert read_records(path).num_damaged == count + 1
            assert len(lines) - len(read_lines(path)) in (0, 1)
        else:
            assert run.status_fault() is not None
        since = read_lines(run.events)[num_events:]
        assert damaged_records._missed(since, record) == f"no event reports the damage to {record}"
        run.recover_records()
        events: list[dict[str, Any]] = read_lines(run.events)
        assert damaged_records._missed(events[-1:], record) is None
        run.write_status("stopped", reason="it was stopped", step=10, tokens=100)


def test_another_record_is_not_this_one() -> None:
    event = {"event": "records_damaged", "attempt": 1, "damage": {"metrics.jsonl": "…"}, "set_aside": {}}
    assert damaged_records._missed([event], "metrics.jsonl") is None
    assert damaged_records._missed([event], "events.jsonl") is not None
