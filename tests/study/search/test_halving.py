"""Successive halving: which trials go on; a kill at any moment changes nothing. No run trains here."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.axes import Axes

from lightscale.cli import main
from lightscale.errors import UserError
from lightscale.launch.settings import LaunchSettings
from lightscale.runs.run_directory import GAVE_UP_EVENT, LineWriter
from lightscale.study.cells import Cell
from lightscale.study.fits.optimum import Optimum, optimum
from lightscale.study.launchers import CellLauncher, Here, Through
from lightscale.study.report.search import search_figure
from lightscale.study.runner import Outcome, StudyRunner
from lightscale.study.search import records as records_module
from lightscale.study.search.halving import Halving, TrialGroup
from lightscale.study.search.records import RungScore, SearchRecords
from lightscale.study.search_results import GroupResult, TrialResult, search_results
from lightscale.study.study import Study
from tests.study.studies import SMALL, write_study

SEARCH = """
[search]
method = "successive_halving"
trials = 4
reduction_factor = 2
rungs = [10, 20]
[search.parameters]
"optimizer.lr" = { min = 1e-4, max = 1e-1, log = true }
"""
BEST = 3e-3
Loss = Callable[[Cell, int], float]


class Killed(BaseException):
    """In place of kill -9."""


def loss_of(cell: Cell, step: int) -> float:
    """A parabola over log rate that falls by step, and a little by seed."""
    return 2.0 + 0.1 * math.log(cell.config.optimizer.lr / BEST) ** 2 + 1 / step + 0.01 * cell.config.train.seed


class Training(CellLauncher):
    """Trains each run at once from its last step to `until`, and counts the steps of each cell."""

    def __init__(self, study: Study, loss: Loss = loss_of, *, fails: str = "", gives_up: str = "") -> None:
        super().__init__(study)
        self.loss, self.fails, self.gives_up = loss, fails, gives_up
        self.trained: Counter[tuple[str, int]] = Counter()

    def start(self, cell: Cell) -> None:
        run, config = self._study.run(cell), cell.job
        run.create(config)
        before, _ = run.progress()
        attempt = run.begin_attempt(**({"world_size": 1} if not before else {}))
        if cell.name == self.fails:
            return
        if cell.name == self.gives_up:
            run.event(GAVE_UP_EVENT, step=0, reason="steps 1 to 3 were skipped, after 3 rollbacks")
            run.write_status("stopped", reason="after 3 rollbacks", step=3, tokens=0)
            return
        with LineWriter(run.metrics) as writer:
            for step in range(before + 1, config.last_step + 1):
                self.trained[cell.name, step] += 1
                writer.write({"step": step, "attempt": attempt, "loss": self.loss(cell, step), "step_s": 0.1})
            sets = {"held": {"loss": self.loss(cell, step)}}
            writer.write({"step": step, "attempt": attempt, "validation": sets})
        run.write_status("finished", reason="done", step=step, tokens=step)

    def has_ended(self, cell: Cell) -> bool:
        return True

    def failure(self, cell: Cell) -> str | None:
        return "its machine failed"

    def stop(self, only: str | None = None) -> None:
        pass


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightscale.study.runner._POLL_S", 0.0)


def begun(text: str = SEARCH, *, extend: bool = False, directory: str = "study") -> Study:
    study = Study(write_study(Path(), text, base=SMALL), Path(directory))
    study.begin(extend=extend)
    return study


def run(study: Study, launcher: CellLauncher, *, jobs: int = 2) -> Outcome:
    runner = StudyRunner(
        study, launcher, jobs=jobs, is_wanted=lambda name: True, deadline_s=None, say=lambda line: None
    )
    return runner.run()


def decided(study: Study) -> list[tuple[str, int, tuple[str, ...], dict[str, float]]]:
    records = SearchRecords(study.path / "search.jsonl")
    return [(one.group, one.step, one.kept, one.losses) for one in records.decisions.values()]


def test_the_best_go_on_from_their_own_steps() -> None:
    study = begun()
    launcher = Training(study)
    outcome = run(study, launcher)
    by_loss = sorted(study.cells(), key=lambda cell: loss_of(cell, 40))
    ranked = [cell.name for cell in by_loss]
    assert outcome.finished == ranked[:1]
    assert (outcome.failed, outcome.left) == ({}, [])
    assert outcome.stopped.keys() == set(ranked[1:])
    assert re.fullmatch(r"stopped at step 20: loss \d\.\d{4}, place 2 of 2", outcome.stopped[ranked[1]])
    assert re.fullmatch(r"stopped at step 10: loss \d\.\d{4}, place 4 of 4", outcome.stopped[ranked[3]])
    # No step twice, and no step too many.
    assert set(launcher.trained.values()) == {1}
    lasts = {name: max(step for cell, step in launcher.trained if cell == name) for name in ranked}
    assert [lasts[name] for name in ranked] == [40, 20, 10, 10]
    # The learning rate of a rung is that of the whole run.
    assert {study.run(cell).path.name for cell in by_loss} == set(ranked)
    assert all(cell.job.total_steps == 40 for cell in by_loss)


def test_decisions_do_not_depend_on_the_order_of_ends() -> None:
    first, second = begun(directory="a"), begun(directory="b")
    run(first, Training(first), jobs=1)
    run(second, Training(second), jobs=4)
    assert decided(first) == decided(second) and len(decided(first)) == 2


def test_a_kill_at_any_write_changes_no_decision_and_repeats_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = begun(directory="expected")
    run(expected, Training(expected))
    write = records_module.LineWriter.write
    # 7 scores and 2 decisions, each killed before and after its line.
    for kill in range(2 * 9):
        number = iter(range(100))

        def killed(self: LineWriter, value: dict[str, Any], kill: int = kill, number: Iterator[int] = number) -> None:
            place = next(number) if "kind" in value else None
            if place is not None and place == kill // 2 and kill % 2 == 0:
                raise Killed
            write(self, value)
            if place is not None and place == kill // 2:
                raise Killed

        study = begun(directory=f"killed-{kill}")
        first = Training(study)
        with monkeypatch.context() as patch:
            patch.setattr(records_module.LineWriter, "write", killed)
            with pytest.raises(Killed):
                run(study, first)
        again = Study(study.definition.path, study.path)
        second = Training(again)
        outcome = run(again, second)
        assert (outcome.failed, outcome.left) == ({}, [])
        assert decided(again) == decided(expected), kill
        assert set((first.trained + second.trained).values()) == {1}, kill


def test_a_failed_machine_is_tried_again_and_decides_nothing() -> None:
    study = begun()
    outcome = run(study, Training(study, fails="trial002"))
    assert outcome.failed == {"trial002": "its machine failed"}
    assert sorted(outcome.left) == ["trial000", "trial001", "trial003"]
    assert decided(study) == []
    launcher = Training(study)
    assert len(run(study, launcher).finished) == 1
    assert {cell for cell, step in launcher.trained if step <= 10} == {"trial002"}


def test_trials_that_diverge_are_worst_and_named() -> None:
    study = begun()
    best = min(study.cells(), key=lambda cell: loss_of(cell, 40)).name
    other = next(cell.name for cell in study.cells() if cell.name != best)

    def loss(cell: Cell, step: int) -> float:
        return math.nan if cell.name == other and step > 7 else loss_of(cell, step)

    launcher = Training(study, loss, gives_up=best)
    outcome = run(study, launcher)
    assert not outcome.failed and not outcome.left and len(outcome.finished) == 1
    assert outcome.stopped[best] == "diverged: steps 1 to 3 were skipped, after 3 rollbacks"
    assert outcome.stopped[other] == "diverged: the loss is not finite at step 10"
    # It is not tried again.
    again = Training(study)
    run(study, again)
    assert not again.trained
    (group,) = search_results(study)
    assert {one.name for one in group.trials if one.has_diverged} == {best, other}
    assert [one["losses"] for one in group.record()["trials"] if one["trial"] == best] == [{"10": [None]}]


def test_all_diverge() -> None:
    study = begun()
    outcome = run(study, Training(study, lambda cell, step: math.nan))
    assert len(outcome.stopped) == 4 and not outcome.finished and not outcome.left and not outcome.failed
    (group,) = search_results(study)
    assert group.best is None


def test_seeds_are_one_trial_and_mixers_are_apart() -> None:
    text = '[axes]\n"train.seed" = [0, 1]\n[axes.architecture]\ntnl = { extends = "arch/tnl" }\n'
    text += 'llama = { extends = "arch/llama" }\n' + SEARCH

    def loss(cell: Cell, step: int) -> float:
        worse = cell.architecture == "llama" and cell.config.optimizer.lr < 1e-2
        return loss_of(cell, step) + 5 * worse

    study = begun(text)
    outcome = run(study, Training(study, loss))
    assert len(outcome.finished) == 2 * 2
    chosen = {cell.architecture: cell.config.optimizer.lr for cell in study.cells() if cell.name in outcome.finished}
    assert chosen["llama"] >= 1e-2 > chosen["tnl"]
    tnl, _ = search_results(study)
    assert tnl.name == "tnl" and tnl.best is not None
    first, second = tnl.best.losses[40]
    assert second - first == pytest.approx(0.01, rel=0.01)


def test_more_trials_join_and_none_is_dropped() -> None:
    study = begun()
    run(study, Training(study))
    kept = {step: set(trials) for _, step, trials, _ in decided(study)}
    more = SEARCH.replace("trials = 4", "trials = 12")
    with pytest.raises(UserError, match=r"has 8 more: .*--extend"):
        begun(more)
    extended = begun(more, extend=True)
    launcher = Training(extended)
    outcome = run(extended, launcher)
    assert not outcome.left and not outcome.failed
    now = {step: (set(trials), losses) for _, step, trials, losses in decided(extended)}
    assert len(now[10][1]) == 12 and kept[10] <= now[10][0] and len(now[10][0]) >= 6
    assert kept[20] <= now[20][0]
    # What was trained stays, and the best of all 12 is found.
    assert not {(cell, step) for cell, step in launcher.trained if cell in kept[20]}
    best = min(extended.cells(), key=lambda cell: loss_of(cell, 40)).name
    (group,) = search_results(extended)
    assert group.best is not None and group.best.name == best


def validated(source: str) -> Study:
    text = SEARCH.replace("trials = 4", "trials = 4\nmetric = 'validation.held'")
    base = SMALL + f"[base.data.validation.held]\nsource = '{source}'\n"
    write_study(Path(), text, base=base.replace("steps = 40", "steps = 40, validate_every = 40"))
    study = Study(Path("tiny.toml"), Path("study"))
    study.begin()
    return study


def test_validation_decides() -> None:
    study = validated("held")
    run(study, Training(study))
    cell = next(one for one in study.cells() if one.stopped is None)
    score = study.score(cell)
    assert score is not None and score.loss == loss_of(cell, 40)


def test_the_validation_set_that_decides_stays() -> None:
    study = validated("held")
    run(study, Training(study, fails="trial002"))
    with pytest.raises(
        UserError, match=r'with tiny: data.validation.held = .*"source": "held".*restore it in tiny.toml'
    ):
        validated("other")
    assert len(run(validated("held"), Training(study)).finished) == 1


def test_no_seed_joins_trials_that_were_compared() -> None:
    axes = '[axes]\n"train.seed" = [0, 1]\n'
    study = begun(axes + SEARCH)
    run(study, Training(study))
    refused = r"trials would have more cells: seed2-trial000, .*; restore the seeds in tiny.toml, or use another"
    with pytest.raises(UserError, match=refused):
        begun(axes.replace("1]", "1, 2]") + SEARCH, extend=True)
    # Trials and combinations of other axes may join.
    more = begun(axes + SEARCH.replace("trials = 4", "trials = 6"), extend=True)
    assert len(run(more, Training(more)).finished) >= 2
    (group,) = search_results(more)
    assert group.best is not None


def test_a_search_and_an_axis_with_its_values_are_two_studies() -> None:
    values = '"optimizer.lr" = {}[0.001, 0.003, 0.01, 0.03]{}\n'
    search = SEARCH.partition("[search.parameters]")[0].replace("trials = 4\n", "")
    search += "[search.parameters]\n" + values.format("{ values = ", " }")
    axis = "[axes]\n" + values.format("", "")
    study = begun(search)
    run(study, Training(study))
    with pytest.raises(
        UserError, match=r"study holds a study with \[search\], and tiny.toml has none; restore the file"
    ):
        begun(axis)
    begun(axis, directory="other")
    with pytest.raises(UserError, match=r"other holds a study without \[search\], and tiny.toml has one; restore"):
        begun(search, directory="other")


def test_plan_of_a_search_on_its_way(capsys: pytest.CaptureFixture[str]) -> None:
    study = begun()
    run(study, Training(study, fails="trial002"))
    command = ["study", "plan", str(study.definition.path), "--dir", "study"]
    assert main([*command, "--json"]) == 0
    assert not any(one["waits_for_sweep"] for one in json.loads(capsys.readouterr().out)["cells"])
    assert main(command) == 0
    assert "wait for the sweep" not in capsys.readouterr().out


def test_damage_of_the_records_is_an_error_and_a_cut_line_is_none() -> None:
    study = begun()
    run(study, Training(study))
    path = study.path / "search.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:30])
    again = begun()
    assert again.halving is not None and len(again.halving.records.scores) == 6
    path.write_text(lines[0].replace('"loss": 2', '"loss": 3') + "".join(lines[1:]))
    for extend in (False, True):
        with pytest.raises(UserError, match=r"search.jsonl:1: differs from its hash.*; restore the file from a copy"):
            begun(extend=extend)


def test_a_run_without_its_last_step_fails_and_stops_no_other() -> None:
    class Losing(Training):
        def start(self, cell: Cell) -> None:
            super().start(cell)
            if cell.name == "trial001":
                metrics = self._study.run(cell).metrics
                metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:9]))

    study = begun()
    fault = "step 10 is not readable; restore the file"
    for launcher in (Losing(study), Training(study)):
        outcome = run(study, launcher)
        assert list(outcome.failed) == ["trial001"] and fault in outcome.failed["trial001"]
        assert outcome.left == ["trial000", "trial002", "trial003"]
        assert study.halving is not None and len(study.halving.records.scores) == 3
        assert set(launcher.trained.values()) <= {1}
    assert decided(study) == []


def test_a_search_keeps_its_rules_and_damaged_records_are_named() -> None:
    study = begun()
    run(study, Training(study))
    with pytest.raises(UserError, match=r"holds a search with search.rungs = \[10, 20\], by which it has chosen"):
        begun(SEARCH.replace("[10, 20]", "[10, 30]"))
    with pytest.raises(UserError, match=r"with another trial000"):
        begun(SEARCH.replace("trials = 4", "trials = 4\nseed = 1"))
    with LineWriter(study.path / "search.jsonl") as writer:
        writer.write({"kind": "score", "cell": "trial000"})
    with pytest.raises(UserError, match=r"search.jsonl: record 10 is none of a search; restore the file"):
        begun()


def test_a_job_of_a_scheduler_goes_to_its_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    study = begun()
    submitted = []
    monkeypatch.setattr("lightscale.study.launchers.submit_run", lambda config, *_, **__: submitted.append(config))
    Through(study, scheduler="local", settings=LaunchSettings()).start(study.cells()[0])
    assert submitted[0].train.stop_step == 10 and submitted[0].total_steps == 40


class _Process:
    """In place of a started one; nothing trains."""

    returncode: int | None = None

    def __init__(self, commands: list[list[str]], command: list[str]) -> None:
        commands.append(command)

    def poll(self) -> int | None:
        return self.returncode


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of local processes, which are not started."""
    found: list[list[str]] = []
    monkeypatch.setattr("lightscale.study.launchers.subprocess.Popen", lambda one, **_: _Process(found, one))
    return found


def test_a_local_process_goes_to_its_rung_and_at_last_to_the_end(commands: list[list[str]]) -> None:
    study = begun()
    launcher = Here(study, jobs=1, processes=None)
    launcher.start(study.cells()[0])
    run(study, Training(study))
    best = next(cell for cell in study.cells() if cell.stopped is None)
    launcher.start(best)
    first, last = commands
    assert "train.stop_step=10" in first and "train.stop_step=none" in last
    assert last[3:7] == ["train", str(study.run(best).config), "--run", str(study.run(best).path)]


def at_second_rung() -> tuple[Study, Cell]:
    """A study whose first rung is decided, and a trial that goes on from it."""
    study = begun()
    training = Training(study)
    for cell in study.cells():
        training.start(cell)
        study.add_score(cell)
    assert len(list(study.decide())) == 1
    return study, next(cell for cell in study.cells() if cell.stopped is None)


def test_a_process_that_is_about_to_end_at_a_rung_is_waited_for(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, cell = at_second_rung()
    is_held = True
    monkeypatch.setattr("lightscale.study.launchers.is_running", lambda run: is_held)
    launcher = Here(study, jobs=1, processes=None)
    launcher.start(cell)
    assert not launcher.has_ended(cell) and not commands
    is_held = False
    assert not launcher.has_ended(cell)
    (command,) = commands
    assert "train.stop_step=20" in command
    # That process ends there too: it is no reason to start a third.
    launcher._children[cell.name].returncode = 1  # type: ignore[union-attr]
    assert launcher.has_ended(cell) and len(commands) == 1


def test_a_job_that_is_about_to_end_at_a_rung_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    study, cell = at_second_rung()
    phases, submitted = ["running"], []
    state = "lightscale.study.launchers."
    monkeypatch.setattr(state + "recorded_jobs", lambda run: [])
    monkeypatch.setattr(state + "live_jobs", lambda records: phases[-1] == "running")
    monkeypatch.setattr(state + "job_states", lambda records: {0: SimpleNamespace(phase=phases[-1])})
    monkeypatch.setattr(state + "submit_run", lambda config, *_, **__: submitted.append(config.train.stop_step))
    monkeypatch.setattr(Through, "_ASK_EVERY_S", 0.0)
    launcher = Through(study, scheduler="local", settings=LaunchSettings())
    launcher.start(cell)
    assert not launcher.has_ended(cell) and not submitted
    phases.append("ended")
    assert not launcher.has_ended(cell) and submitted == [20]
    # The new job ends without a step: it failed.
    assert launcher.has_ended(cell) and submitted == [20]


def test_decisions_by_rank_with_ties_in_the_order_of_trials(tmp_path: Path) -> None:
    names = [f"t{number}" for number in range(7)]
    group = TrialGroup(name="g", cells={name: (name,) for name in names}, rungs=(1, 2, 9))
    halving = Halving([group], 3, SearchRecords(tmp_path / "search.jsonl"))
    for name, loss in zip(names, (3.0, 2.0, 2.0, math.inf, 2.0, 5.0, 4.0), strict=True):
        assert list(halving.decide()) == []
        halving.records.add_score(RungScore(cell=name, step=1, loss=loss, reason=""))
    (decision,) = halving.decide()
    assert (decision.kept, decision.step) == (("t1", "t2"), 1)
    assert list(halving.decide()) == []
    following = halving.next_of_cells()
    assert [name for name in names if following[name].stopped is None] == ["t1", "t2"]
    assert following["t6"].stopped == "stopped at step 1: loss 4.0000, place 5 of 7"
    # As read again.
    assert Halving([group], 3, SearchRecords(tmp_path / "search.jsonl")).next_of_cells() == following


def test_output(capsys: pytest.CaptureFixture[str]) -> None:
    study = begun(SEARCH.replace("trials = 4", "trials = 24").replace("[10, 20]", "[10]"))
    file, folder = str(study.definition.path), ["--dir", "study"]
    run(study, Training(study))
    assert main(["study", "search", file, *folder, "--json", "--plot", "search.png"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert len(group["trials"]) == 24 and group["key"] == "optimizer.lr"
    first, last = group["optima"]
    # Exact parabolas: the point is exact, too.
    assert first["value"] == pytest.approx(BEST, rel=1e-6) and last["value"] == pytest.approx(BEST, rel=1e-6)
    assert (first["step"], last["step"]) == (10, 40)
    assert Path("search.png").stat().st_size > 10_000
    assert main(["study", "search", file, *folder]) == 0
    text = capsys.readouterr().out
    assert "optimizer.lr at step 40: optimum 0.003 (0.003 to 0.003), loss 2.0" in text
    assert f"best trial: {group['best']}, optimizer.lr = " in text
    assert main(["study", "report", file, *folder]) == 0
    page = Path("study/report.html").read_text()
    assert "Search: successive_halving" in page and "<svg" in page
    assert main(["study", "status", file, *folder, "--json"]) == 0
    states = Counter(one["state"] for one in json.loads(capsys.readouterr().out.splitlines()[-1])["cells"])
    assert states == {"finished": 12, "lost": 12}
    assert main(["study", "fit", file, *folder]) == 78
    assert "has no laws; use `lightscale study search`" in " ".join(capsys.readouterr().err.split())


def drawn(losses: Mapping[float, tuple[float, ...]], found: Optimum | str) -> Axes:
    trials = [
        TrialResult(name=f"t{rate}", values={"optimizer.lr": rate}, losses=by_step, state="", is_over=True)
        for rate, by_step in ((rate, {40: seeds} if seeds else {}) for rate, seeds in losses.items())
    ]
    group = GroupResult(name="g", rungs=(40,), trials=trials, key="optimizer.lr", optima={40: found})
    figure = search_figure([group], "training")
    figure.canvas.draw()
    return figure.axes[0]


def test_a_wide_interval_stretches_no_picture() -> None:
    losses = {1e-3: (2.10,), 2e-3: (2.0,), 4e-3: (2.05,), 8e-3: (2.12,)}
    found = optimum(losses)
    assert isinstance(found, Optimum)
    axes = drawn(losses, replace(found, interval=(5.6e-5, 19.9)))
    low, high = axes.get_xlim()
    assert 5e-4 < low < 1e-3 and 8e-3 < high < 2e-2
    # The whole interval is in words.
    (legend,) = [text.get_text() for text in axes.get_legend().get_texts() if "optimum" in text.get_text()]
    assert "(5.6e-05 to 19.9)" in legend


@pytest.mark.filterwarnings("error")
def test_a_picture_before_the_first_loss_has_no_legend() -> None:
    assert drawn({1e-3: ()}, "a parabola needs the losses of 3 values").get_legend() is None


def test_with_more_trials_one_that_went_on_goes_on_and_one_that_lost_may_return(tmp_path: Path) -> None:
    losses = {"t0": 3.0, "t1": 3.1, "t2": 3.2, "t3": 2.0, "t4": 4.0, "t5": 4.1, "t6": 4.2, "t7": 4.3, "t8": 4.4}

    def halving(number: int) -> Halving:
        cells = {name: (name,) for name in list(losses)[:number]}
        records = SearchRecords(tmp_path / "search.jsonl")
        for name in cells:
            if (name, 1) not in records.scores:
                records.add_score(RungScore(cell=name, step=1, loss=losses[name]))
        return Halving([TrialGroup(name="g", cells=cells, rungs=(1, 9))], 3, records)

    assert [decision.kept for decision in halving(3).decide()] == [("t0",)]
    # One of four: the new one is better, and the old one is trained already.
    assert [decision.kept for decision in halving(4).decide()] == [("t3", "t0")]
    # Three of nine.
    nine = halving(9)
    assert nine.next_of_cells()["t1"].stopped is not None
    assert [decision.kept for decision in nine.decide()] == [("t3", "t0", "t1")]
    assert nine.next_of_cells()["t1"].stopped is None
