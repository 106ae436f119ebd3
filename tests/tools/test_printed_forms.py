"""``tools/printed_forms.py``: the usual form is at no distance from itself, others are."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    yield
    if "printed_forms" not in before:
        sys.modules.pop("printed_forms", None)


def found_distances(rank: int, world_size: int, init_method: str) -> list[float]:
    tool = load("printed_forms")
    forms = [
        tool.Form(mixer="tnl", options={"gate_input": "normalised"}),
        tool.Form(mixer="tnl", options={"gate_input": "raw"}),
        tool.Form(mixer="tnl", joined=True),
    ]
    return [distance for _, distance in tool.distances(forms, init_std=0.1, num_tokens=10)]


def test_distances_are_from_the_usual_form(run_ranks: Callable[..., list[Any]]) -> None:
    ((same, other, joined),) = run_ranks(found_distances, 1)
    assert same == 0
    assert 0.01 < other < 2
    assert 0.01 < joined < 2
