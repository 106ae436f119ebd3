"""A study's directory: what is refused, what is finished, what a sweep chooses; and the command line around it."""

import json
import re
import shutil
from pathlib import Path

import pytest

from lightscale.cli import main
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.study.history import run_curve
from lightscale.study.study import Study
from tests.study.studies import TINY, pretend, write_store, write_study

SWEEP = """
[sweep]
key = "optimizer.lr"
values = [1e-3, 3e-3, 1e-2]
per = ["architecture"]
at = { size = "medium" }
set.train.steps = 3
"""
LOSSES = [5.0 * step**-0.2 for step in range(1, 41)]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def begun(text: str = TINY) -> Study:
    study = Study(write_study(Path(), text))
    study.begin()
    return study


def test_a_finished_cell_needs_its_run_no_more() -> None:
    study = begun()
    cell = study.cells()[0]
    assert not study.finish(cell)
    pretend(study, cell, LOSSES)
    run = study.run(cell)
    expected = run_curve(run, study.counts(cell), cell.config.step_tokens, smoothing=1.1)
    assert study.finish(cell)
    shutil.rmtree(run.path)
    assert study.finish(cell)
    found = study.curve(cell)
    assert found is not None and expected is not None
    assert found.step.tolist() == expected.step.tolist()
    assert found.smoothed == pytest.approx(expected.smoothed, rel=1e-6)
    record = study.finished_record(cell)
    assert record is not None
    assert (record["parameters"], record["step"]) == (study.counts(cell).parameters, 40)


def test_data_that_was_replaced_since_a_cell_finished_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where an axis is the data, and the file names another store: paths are not in a cell's digest."""
    write_store(Path("store"))
    study = begun()
    cell = study.cells()[0]
    pretend(study, cell, LOSSES)
    checkpoint = study.run(cell).path / "checkpoints" / "step-00000040"
    checkpoint.mkdir(parents=True)
    (checkpoint / "MANIFEST.json").write_text(json.dumps({"store": TokenStore(Path("store")).fingerprint()}))
    assert study.finish(cell)
    shutil.rmtree(study.run(cell).path)
    command = ["study", "run", str(study.definition.path), "--only", cell.name]
    assert main(command) == 0
    Path("store").rename("kept")
    assert main(command) == 0, "a finished cell needs its store no more"
    write_store(Path("store"), tokens=19_000)
    assert main(command) == 78
    message = " ".join(capsys.readouterr().err.split())
    assert f"{cell.name}: data.store = store: other data than the finished run was trained on" in message
    text = study.definition.path.read_text()
    study.definition.path.write_text(text.replace('"store"', '"kept"'))
    assert main(command) == 0, "moved, with the same content"


def test_a_sweep_chooses_when_all_of_its_runs_are_finished() -> None:
    study = begun(TINY + SWEEP)
    tried = [cell for cell in study.cells() if cell.part == "sweep" and cell.architecture == "tnl"]
    for cell, loss in zip(tried, (4.0, 3.0, 3.5), strict=True):
        assert all(one.is_pending for one in study.cells() if one.part == "main")
        pretend(study, cell, [5.0, 4.5, loss])
        assert study.finish(cell)
    main_cells = [cell for cell in study.cells() if cell.part == "main"]
    assert {cell.architecture: cell.is_pending for cell in main_cells} == {"tnl": False, "llama": True}
    assert {cell.config.optimizer.lr for cell in main_cells if cell.architecture == "tnl"} == {3e-3}
    tnl, llama = study.choices(study.cells())
    assert (tnl.value, tnl.warning) == (3e-3, None)
    assert (llama.value, len(llama.missing)) == (None, 3)


def test_the_best_at_an_edge_is_said() -> None:
    study = begun(TINY + SWEEP)
    for cell in study.cells():
        if cell.part == "sweep":
            assert cell.tried is not None
            pretend(study, cell, [5.0, 4.5, 4.0 - 10 * cell.tried])
            study.finish(cell)
    assert [one.warning for one in study.choices(study.cells())] == [
        "is the greatest value of the sweep: add values beyond it"
    ] * 2


def test_a_study_with_other_axes_is_refused() -> None:
    begun()
    smaller = write_study(Path(), TINY[: TINY.index("[axes.size.large]")])
    with pytest.raises(UserError, match=r"which is without tnl-large, llama-large; restore the axes"):
        Study(smaller).check()
    changed = write_study(Path(), TINY.replace("intermediate_size = 160", "intermediate_size = 128"))
    with pytest.raises(UserError, match=r"with another tnl-large, llama-large"):
        Study(changed).check()
    more = TINY + "[axes.size.huge]\nmodel = {num_layers=4, hidden_size=64, num_heads=2, intermediate_size=160}\n"
    extended = Study(write_study(Path(), more))
    with pytest.raises(UserError, match=r"has 2 more: tnl-huge, llama-huge; .*--extend"):
        extended.check()
    extended.begin(extend=True)
    Study(extended.definition.path).check()


def test_what_changes_no_run_is_no_other_study() -> None:
    begun()
    text = TINY.replace('extends = "arch/tnl"', 'extends = "arch/tnl"\ncheckpoint.every = 7')
    Study(write_study(Path(), text)).check()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("study.json", "{", "study.json: .*restore it"),
        ("study.json", '{"format": 9}', "study.json: not the record of a study"),
        ("cells/tnl-small.json", "[]", "tnl-small.json: not the record of a cell; remove it"),
        ("cells/tnl-small.json", "\x00", "tnl-small.json: .*remove it"),
        ("cells/tnl-small.json", '{"smoothed": 3.0, "digest": "0"}', "record of a run with another configuration"),
    ],
)
def test_damaged_records_are_named(capsys: pytest.CaptureFixture[str], file: str, content: str, message: str) -> None:
    study = begun()
    (study.path / file).write_text(content)
    assert main(["study", "status", str(study.definition.path)]) == 78
    output = " ".join(capsys.readouterr().err.split())
    assert re.search(message, output), output


def test_the_run_of_another_configuration_is_not_taken_for_a_cells() -> None:
    study = begun()
    small, medium = study.cells()[:2]
    pretend(study, medium, LOSSES)
    study.run(medium).path.rename(study.run(small).path)
    with pytest.raises(UserError, match=r"holds a run with another configuration"):
        study.finish(small)


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    path = write_study(Path(), TINY + SWEEP)
    assert main(["study", "plan", str(path), "--nodes", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    cells = {one["name"]: one for one in found["cells"]}
    assert len(cells) == 12
    assert cells["tnl-small"]["waits_for_sweep"]
    assert cells["tnl-small"]["tokens"] == 40 * 4 * 32
    assert found["total"]["flops"] == pytest.approx(sum(one["flops"] for one in cells.values()))
    assert found["total"]["hours"] == pytest.approx(sum(one["hours"] for one in cells.values()))
    # A step takes as long in the sweep: 3 steps of it, and 40 of the run.
    hours = {part: cells[name]["hours"] for part, name in (("sweep", "sweep-tnl-lr0.001"), ("run", "tnl-medium"))}
    assert hours["run"] / hours["sweep"] == pytest.approx(40 / 3)
    assert 0 < hours["run"] < 1


def test_status_counts_states(capsys: pytest.CaptureFixture[str]) -> None:
    study = begun()
    pretend(study, study.cells()[0], LOSSES)
    study.finish(study.cells()[0])
    assert main(["study", "status", "tiny.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["cells"]
    assert [one["state"] for one in found] == ["finished"] + ["new"] * 5
    assert main(["study", "status", "tiny.toml"]) == 0
    assert "6 cells: 1 finished, 5 new" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "tiny.toml"], "no study here; start it with `lightscale study run tiny.toml`"),
        (["run", "tiny.toml"], "store"),
        (["run", "tiny.toml", "--jobs", "0"], "--jobs 0: must be 1 to"),
        (["run", "tiny.toml", "--only", "huge*"], "no cell has such a name"),
        (["run", "tiny.toml", "--nodes", "2"], "--nodes: needs --scheduler"),
        (["run", "tiny.toml", "--scheduler", "pbs"], "unknown scheduler pbs"),
        (["plan", "nowhere"], "cannot read the study nowhere"),
        (["plan", "tiny.toml", "--nodes", "0"], "--nodes 0: must be"),
        (["fit"], "use either STUDY.toml or --points"),
        (["report", "tiny.toml", "--draws", "1"], "--draws 1: must be at least 2"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    write_study(Path())
    assert main(["study", *arguments]) == 78
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("studies").exists()


def test_a_store_that_is_there_lets_cells_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    write_store(Path("store"))
    write_study(Path(), TINY.replace("[axes.size.small]", "[axes.size.small]\ndata.sources = { missing = 1 }"))
    assert main(["study", "run", "tiny.toml"]) == 78
    output = " ".join(capsys.readouterr().err.split())
    assert "tnl-small, llama-small: data.sources.missing" in output
