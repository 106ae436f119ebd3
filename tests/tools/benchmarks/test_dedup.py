"""The benchmark of deduplication: its corpora have the duplicates that they should have, and its counts are true."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from benchmarks import dedup

    return dedup


def test_more_documents_and_more_units(benchmark: ModuleType) -> None:
    *_, figures = benchmark.run([1_005, 4_000])
    found = figures["documents"]
    assert [found[count]["key_files"] for count in ("1005", "4000")] == [4, 16]
    # A read of everything, some records more to find where a range begins, and the pairs.
    assert 224 <= found["1005"]["bytes_read_per_document"] < 400
    assert found["4000"]["opened"] > found["1005"]["opened"] >= 2
    each_us = [of["cpu_us_per_document"] for of in found.values()]
    assert figures["growth"] == max(each_us) / min(each_us) > 1
    assert "4,000" in str(benchmark.table(figures).columns[0]._cells)
    assert "benchmarks.dedup" in sys.modules
