"""The table of a study's last validation: means and ranges of seeds, by architecture and set."""

import json
import shutil
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def tools(tools_path: Path) -> None:
    """So that the tool can be imported."""


def write_cell(study: Path, name: str, architecture: str, validation: list[dict[str, float]]) -> None:
    (study / "cells").mkdir(parents=True, exist_ok=True)
    values = {"seed": name[:5], "architecture": architecture}
    (study / "cells" / f"{name}.json").write_text(json.dumps({"cell": name, "values": values}))
    run = study / "runs" / name
    run.mkdir(parents=True)
    lines = [
        {
            "step": 10 * (n + 1),
            "attempt": 1,
            "time": "2026-11-27T12:00:00Z",
            "validation": {key: {"loss": loss} for key, loss in one.items()},
        }
        for n, one in enumerate(validation)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_last_validation_of_each_cell_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from study_table import main

    write_cell(tmp_path, "seed0-a", "first_one", [{"text": 9.0}, {"text": 2.0, "recall": 1.0}])
    write_cell(tmp_path, "seed1-a", "first_one", [{"text": 3.0, "recall": 1.5}])
    write_cell(tmp_path, "seed0-b", "second", [{"text": 2.25}])
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| | text | recall |",
        "|---|---|---|",
        "| first-one | 2.500 (2.000 to 3.000) | **1.250** (1.000 to 1.500) |",
        "| second | **2.250** |  |",
    ]
    found = json.loads((tmp_path / "validation.json").read_text())
    assert found["text"] == {"first_one": {"seed0-a": 2.0, "seed1-a": 3.0}, "second": {"seed0-b": 2.25}}
    picture = (tmp_path / "validation.svg").read_text()
    assert picture.count('<g id="axes_') == 2
    # What was kept of a run that is gone still counts, beside new cells.
    shutil.rmtree(tmp_path / "runs" / "seed0-a")
    write_cell(tmp_path, "seed1-b", "second", [{"text": 2.75}])
    assert main([str(tmp_path)]) == 0
    found["text"]["second"]["seed1-b"] = 2.75
    assert json.loads((tmp_path / "validation.json").read_text()) == found
    (tmp_path / "validation.json").unlink()
    assert main([str(tmp_path)]) != 0
    assert "seed0-a: no validation; set data.validation" in capsys.readouterr().err


def test_studies_without_results_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from study_table import main

    assert main([str(tmp_path)]) != 0
    assert "no cell has finished; use `lightscale study run`" in capsys.readouterr().err
