"""``tools/mutants.py``: its table is true of the code of today, and a mutant is found from end to end."""

import ast
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def mutants(tools_path: Path) -> Iterator[ModuleType]:
    import mutants

    yield mutants
    del sys.modules["mutants"]


def test_every_mutant_has_one_place_and_is_python(mutants: ModuleType, root: Path) -> None:
    every = mutants.read_mutants()
    assert len({mutant.name for mutant in every}) == len(every) >= 40
    for mutant in every:
        text = (root / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, f"{mutant.name}: {mutant.file} has its text {text.count(mutant.old)} times"
        mutated = text.replace(mutant.old, mutant.new)
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text)), f"{mutant.name} changes nothing"


def test_every_mutant_names_tests_that_are_there(mutants: ModuleType, root: Path) -> None:
    for mutant in mutants.read_mutants():
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            assert mutants.has_test(root, test), f"{mutant.name}: {test}"
    assert not mutants.has_test(root, "tests/tools/test_mutants.py::test_of_no_name")
    assert not mutants.has_test(root, "tests/tools/test_no_mutants.py")


def test_the_table_has_all_runs(mutants: ModuleType) -> None:
    first, second, *others = mutants.read_mutants()
    facts = {"commit": "a1b2c3d", "date": "2026-11-27", "machine": "a CPU, 2 cores"}
    found = {"status": "found", "test": "tests/test_x.py::test_y[a|b]", "seconds": 1.5}
    runs = {
        mutants.WORKING_TREE: facts | {"mutants": {first.name: {"status": "not found", "seconds": 2.0}}},
        "old": facts | {"mutants": {first.name: found, second.name: {"status": "not there"}}},
    }
    lines = mutants.table(json.loads(json.dumps(runs)), [first, second, *others]).splitlines()
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[3:] for line in lines if line.startswith("| ")}
    assert rows[first.name] == [r"`test_x.py::test_y[a\|b]`", "1.5", "not found", "2.0 |"]
    assert rows[second.name][0] == "not there"
    assert rows[second.name][2] == "not run"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_mutant_is_found(
    mutants: ModuleType, tmp_path: Path, needs: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """In a copy of the working tree; what its place is tested by passes without it."""
    needs("git")
    (chosen,) = (mutant for mutant in mutants.read_mutants() if mutant.name == "warm-up")
    kept = tmp_path / "found.json"
    assert mutants.run(None, [chosen], kept, mutants.WORKING_TREE), capsys.readouterr().out
    (result,) = json.loads(kept.read_text())[mutants.WORKING_TREE]["mutants"].values()
    assert result["status"] == "found"
    assert result["test"].startswith("tests/config/test_schedules.py::")
