"""The runner of cells: order, how many at a time, failures, stops; with a launcher that trains nothing."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightscale.errors import UserError
from lightscale.study.cells import Cell
from lightscale.study.launchers import CellLauncher
from lightscale.study.runner import Outcome, StudyRunner, recorded_failures, study_lock
from lightscale.study.study import Study
from tests.study.studies import TINY, pretend, write_study
from tests.study.test_study import SWEEP


class Pretending(CellLauncher):
    """Each run ends when it is asked about for the third time."""

    def __init__(self, study: Study, *, fails: str = "", cannot_start: str = "", endless: bool = False) -> None:
        super().__init__(study)
        self.fails, self.cannot_start, self.endless = fails, cannot_start, endless
        self.asked: dict[str, int] = {}
        self.started: list[str] = []
        self.most = 0
        self.stopped: list[str | None] = []

    def start(self, cell: Cell) -> None:
        if cell.name == self.cannot_start:
            raise UserError("no room")
        self.started.append(cell.name)
        self.asked[cell.name] = 0
        self.most = max(self.most, len(self.asked))

    def has_ended(self, cell: Cell) -> bool:
        self.asked[cell.name] += 1
        if self.endless or self.asked[cell.name] < 3:
            return False
        del self.asked[cell.name]
        if cell.name != self.fails:
            steps = cell.config.total_steps
            tried = cell.tried or 0.0
            pretend(self._study, cell, [5.0 - 0.01 * step - tried for step in range(steps)])
        return True

    def failure(self, cell: Cell) -> str | None:
        return None if self.endless else "it fell over"

    def stop(self, only: str | None = None) -> None:
        self.stopped.append(only)
        self.endless = True
        self.asked = dict.fromkeys(self.asked, 3)
        self.has_ended = lambda cell: True  # type: ignore[method-assign]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Study]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightscale.study.runner._POLL_S", 0.0)

    def make(text: str = TINY) -> Study:
        study = Study(write_study(tmp_path, text), tmp_path / "study")
        study.begin()
        return study

    return make


def run(
    study: Study,
    launcher: CellLauncher,
    *,
    jobs: int = 2,
    left_s: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    deadline_s = None if left_s is None else time.monotonic() + left_s
    runner = StudyRunner(study, launcher, jobs=jobs, is_wanted=lambda name: True, deadline_s=deadline_s, say=say)
    return runner.run()


def test_some_at_a_time_until_all_have_ended(make: Callable[..., Study]) -> None:
    study = make()
    launcher = Pretending(study)
    outcome = run(study, launcher)
    names = [cell.name for cell in study.cells()]
    assert launcher.started == names
    assert launcher.most == 2
    assert sorted(outcome.finished) == sorted(names)
    assert (outcome.failed, outcome.left) == ({}, [])
    # Again: nothing is left to do.
    again = Pretending(study)
    assert sorted(run(study, again).finished) == sorted(names)
    assert again.started == []


def test_the_sweep_comes_first_and_its_choice_is_trained(make: Callable[..., Study]) -> None:
    study = make(TINY + SWEEP)
    launcher = Pretending(study)
    outcome = run(study, launcher)
    assert len(outcome.finished) == 12
    # Cells of an architecture begin when all of its own sweep has ended.
    first = launcher.started.index("tnl-small")
    assert set(launcher.started[:first]) >= {f"sweep-tnl-lr{lr}" for lr in ("0.001", "0.003", "0.01")}
    assert {cell.config.optimizer.lr for cell in study.cells() if cell.part == "main"} == {1e-2}


def test_a_cell_that_fails_stops_no_other_and_is_tried_again(make: Callable[..., Study]) -> None:
    study = make()
    outcome = run(study, Pretending(study, fails="tnl-medium", cannot_start="llama-small"))
    assert outcome.failed == {"tnl-medium": "it fell over", "llama-small": "no room"}
    assert len(outcome.finished) == 4
    assert recorded_failures(study) == outcome.failed
    again = Pretending(study)
    assert len(run(study, again).finished) == 6
    assert again.started == ["tnl-medium", "llama-small"]


def test_cells_that_wait_for_a_failed_sweep_are_left(make: Callable[..., Study]) -> None:
    study = make(TINY + SWEEP)
    outcome = run(study, Pretending(study, fails="sweep-llama-lr0.01"))
    assert list(outcome.failed) == ["sweep-llama-lr0.01"]
    assert outcome.left == ["llama-small", "llama-medium", "llama-large"]


def test_a_deadline_stops_what_runs(make: Callable[..., Study]) -> None:
    study = make()
    outcome = run(study, Pretending(study, endless=True), left_s=0.05)
    assert len(outcome.left) == 6
    assert not outcome.failed


def test_a_signal_stops_what_runs(make: Callable[..., Study]) -> None:
    class Signalled(Pretending):
        def has_ended(self, cell: Cell) -> bool:
            os.kill(os.getpid(), signal.SIGINT)
            return super().has_ended(cell)

    study, said = make(), list[str]()
    outcome = run(study, Signalled(study, endless=True), jobs=1, say=said.append)
    assert len(outcome.left) == 6
    assert [line for line in said if line.startswith("stopping")] == ["stopping (SIGINT): saving 1 run"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_while_a_cell_starts_stops_it_too(make: Callable[..., Study]) -> None:
    class Slow(Pretending):
        def start(self, cell: Cell) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            super().start(cell)

    study = make()
    launcher = Slow(study)
    outcome = run(study, launcher, jobs=2)
    (first,) = launcher.started
    # The signal itself met no run yet.
    assert launcher.stopped == [None, first]
    assert first in outcome.left and not outcome.finished


def test_one_command_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match=rf"in use by `lightscale study run`, process {os.getpid()}")
    with study_lock(tmp_path), refused, study_lock(tmp_path):
        pass
    with study_lock(tmp_path):
        pass
