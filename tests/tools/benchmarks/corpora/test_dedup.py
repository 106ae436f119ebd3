"""The benchmark of deduplication: its corpora have the duplicates that they should have, and its counts are true."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from benchmarks.corpora import dedup

    return dedup


def test_more_documents_and_more_units(benchmark: ModuleType) -> None:
    *_, figures = benchmark.run([1_005, 4_000], repeats=3)
    found = figures["documents"]
    for of in found.values():
        assert sorted(of["samples_us"])[1] == of["cpu_us_per_document"] and len(of["samples_us"]) == 3
    assert [found[count]["key_files"] for count in ("1005", "4000")] == [4, 16]
    # A read of everything, some records more to find where a range begins, and the pairs.
    assert 224 <= found["1005"]["bytes_read_per_document"] < 400
    assert found["4000"]["opened"] > found["1005"]["opened"] >= 2
    for of in found.values():
        assert of["cpu_us_per_document"] == pytest.approx(sum(of["cpu_us_per_document_of"].values()))
    first_us, second_us = (found[count]["cpu_us_per_document"] for count in ("1005", "4000"))
    # Whichever took longer.
    assert figures["growth"] in (pytest.approx(first_us / second_us), pytest.approx(second_us / first_us))
    assert figures["growth"] >= 1 and figures["reached"] == (figures["growth"] <= 1.3)


def test_the_duplicates_are_those_that_were_meant(benchmark: ModuleType) -> None:
    """Of each pair of documents: an exact copy shares all bands, a near one ten, and no other pair shares any."""
    keys = benchmark._keys(np.arange(105, dtype=np.uint64), 105)
    same = {(a, b): int((keys[a] == keys[b]).sum()) for b in range(105) for a in range(b)}
    num_bands = keys.shape[1]
    expected = {(n, 90 + n): num_bands for n in range(10)} | {(10 + n, 80 + n): 10 for n in range(10)}
    assert {pair: bands for pair, bands in same.items() if bands} == expected


def test_table_for_people(bench_in_process: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_in_process.main(["dedup", "--documents", "1005", "--repeats", "1"]) == 0
    said = capsys.readouterr().out
    assert "1,005" in said and "CPU time grows 1.00 times (at most 1.3)" in " ".join(said.split())
