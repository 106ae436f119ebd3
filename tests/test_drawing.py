"""The drawing of cases (tests/helpers/drawing.py): all pairs occur, seeds repeat, and nothing is dropped on demand."""

import itertools
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parent / "helpers" / "drawing.py")))
AXES = ["abcde", "fgh", "ijkl", "mn"]
PRODUCT = set(itertools.product(*AXES))


@pytest.mark.parametrize("seed", ["0", "1", "2"])
@pytest.mark.parametrize("strength", [1, 2, 3])
def test_all_combinations_of_that_strength_occur(monkeypatch: pytest.MonkeyPatch, seed: str, strength: int) -> None:
    monkeypatch.setenv(drawing.SEED, seed)
    cases = drawing.covering("test", *AXES, strength=strength)
    assert set(cases) < PRODUCT and len(set(cases)) == len(cases)
    for axes in itertools.combinations(range(len(AXES)), strength):
        wanted = set(itertools.product(*(AXES[axis] for axis in axes)))
        assert {tuple(case[axis] for axis in axes) for case in cases} == wanted
    assert len(cases) <= {1: 8, 2: 30, 3: 90}[strength]


def test_a_seed_repeats_and_another_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed in ("5", "5", "6"):
        monkeypatch.setenv(drawing.SEED, seed)
        found.append((drawing.covering("test", *AXES), drawing.some("test", range(100), 5)))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0] and found[0][1] != found[2][1]
    assert drawing.covering("other", *AXES) != found[2][0]
    assert [len(chosen) for _, chosen in found] == [5, 5, 5]


def test_nothing_is_dropped_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(drawing.SEED, drawing.ALL)
    assert set(drawing.covering("test", *AXES)) == PRODUCT
    assert drawing.some("test", range(9), 2) == list(range(9))


def test_a_share_is_one_in_so_many_of_each_file(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[1]
    items = [
        SimpleNamespace(path=root / "tests" / file, number=number)
        for file, count in (("a.py", 10), ("b.py", 3))
        for number in range(count)
    ]
    share = runpy.run_path(str(root / "tests" / "conftest.py"))["_share"]
    seen = set()
    for seed in range(40):
        monkeypatch.setenv(drawing.SEED, str(seed))
        kept = share(items, 4)
        assert kept == share(items, 4) and len(kept) in (2, 3, 4)
        seen |= {(item.path.name, item.number) for item in kept}
    assert len(seen) == 13
