import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightscale.training.profile import StepProfiler


def work(profiler: StepProfiler, steps: range, *, fail_at: int | None = None) -> None:
    for number in steps:
        with profiler.step(number):
            x = torch.ones(100 + number, 7)
            torch.mm(x, x.T)
            if number == fail_at:
                raise ZeroDivisionError


def mesh(rank: int = 3) -> Any:
    return SimpleNamespace(device=torch.device("cpu"), rank=rank)


def multiplied(trace: Path) -> list[int]:
    """Rows of the matrices that were multiplied, in order of time."""
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "aten::mm"]
    return [event["args"]["Input Dims"][0][0] for event in sorted(events, key=lambda event: event["ts"])]


def test_the_chosen_steps_are_traced_and_no_others(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "profile"
    with StepProfiler((3, 4), directory, mesh()) as profiler:
        work(profiler, range(1, 7))
    assert sorted(path.name for path in directory.iterdir()) == ["rank-00003.memory.txt", "rank-00003.trace.json"]
    assert multiplied(directory / "rank-00003.trace.json") == [103, 104]
    text = (directory / "rank-00003.memory.txt").read_text()
    assert "aten::mm" in text
    assert "CPU Mem" in text
    peak = int(text.rsplit("peak of the process: ", 1)[1].split(" ")[0].replace(",", ""))
    assert peak > 50 << 20


def test_without_chosen_steps_nothing_is_recorded(tmp_path: Path) -> None:
    with StepProfiler(None, tmp_path / "profile", mesh()) as profiler:
        work(profiler, range(1, 5))
    assert not (tmp_path / "profile").exists()


def test_a_run_that_ends_in_between_leaves_what_it_has(tmp_path: Path) -> None:
    with StepProfiler((3, 9), tmp_path, mesh()) as profiler:
        work(profiler, range(1, 5))
    assert multiplied(tmp_path / "rank-00003.trace.json") == [103, 104]
    # The attempt that resumes it records the rest.
    with StepProfiler((3, 9), tmp_path, mesh(0)) as profiler:
        work(profiler, range(5, 12))
    assert multiplied(tmp_path / "rank-00000.trace.json") == [105, 106, 107, 108, 109]


def test_a_step_that_fails_is_in_the_trace(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), StepProfiler((2, 3), tmp_path, mesh()) as profiler:
        work(profiler, range(1, 5), fail_at=3)
    assert multiplied(tmp_path / "rank-00003.trace.json") == [102, 103]
