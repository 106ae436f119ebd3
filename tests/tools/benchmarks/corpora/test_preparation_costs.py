"""The benchmark of what a preparation costs beside its texts: it compares few and many of what it says."""

from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def benchmark(tools_path: Path) -> ModuleType:
    from benchmarks.corpora import preparation_costs

    return preparation_costs


def test_few_and_many_differ_in_one_thing(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (benchmark._prepared([8], unit_bytes=size) for size in (4000, 1000))
    assert (few["units"], many["units"]) == (2, 8)
    assert few["tasks"] == many["tasks"]
    one, ranges = (benchmark._prepared([8], unit_bytes=10**9, range_bytes=size) for size in (2000, 248))
    assert one["units"] == ranges["units"] == 1
    assert one["tasks"] == 2 + 2 and ranges["tasks"] == 8 + 1 + 2
    monkeypatch.setattr(benchmark, "_prepared", _made_up)
    *_, figures = benchmark.run(100, repeats=2)
    assert list(figures["seconds"]) == list(benchmark.COSTS)
    assert list(figures["seconds"].values()) == pytest.approx([4.0, 2.0, 3.0, 5.0, 7.0, 6.0])


def _made_up(documents: list[int], *, unit_bytes: int, range_bytes: int = 2**24) -> dict[str, float]:
    units = -(-sum(documents) * 1000 // unit_bytes)
    tasks = -(-sum(documents) * 248 // range_bytes)
    return {
        "read, filter, tokenize": 1 + 4 * units,
        "count kept documents": 2 * units,
        "write shards": 9 * units,
        "duplicates": 5 * tasks,
        "alone": 3 + 7 * units + 6 * (len(documents) if units == 1 else 1),
        "units": units,
        "tasks": tasks,
    }
