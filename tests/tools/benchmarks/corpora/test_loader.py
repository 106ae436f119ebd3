"""The loader's benchmark at a small size: every way reads, the ratios are those of its samples."""

import runpy
import statistics
from pathlib import Path

import pytest


def test_the_loader_beside_the_others(root: Path) -> None:
    run = runpy.run_path(str(root / "tools" / "benchmarks" / "corpora" / "loader.py"))["run"]
    found = run(lengths=(1024,), num_tokens=2**19, tokens_per_turn=2**17, repeats=3)
    result = found["lengths"]["1024"]
    samples = result["samples_s"]
    assert {"loader", "loader_positions", "memmap", "zarr"} <= samples.keys()
    assert len(samples) + len(found["notes"]) == 6, "what is not installed is named"
    median = {name: statistics.median(times) for name, times in samples.items()}
    assert all(len(times) == 3 for times in samples.values())
    assert result["of_memmap"] == pytest.approx(median["memmap"] / median["loader"])
    assert result["over"]["zarr"] == pytest.approx(median["zarr"] / median["loader"])
    assert result["tokens_per_s_per_core"]["loader"] == pytest.approx(2**17 / median["loader"])
    # Of windows of 1,024 tokens it is about fifty.
    assert result["over"]["zarr"] > 4
    checks = found["checks"]["1024"]
    assert all(len(times) == 3 for samples in checks["samples_s"].values() for times in samples.values())
    for turn, samples in checks["samples_s"].items():
        ratio = statistics.median(samples["format 1"]) / statistics.median(samples["format 2"])
        assert checks["share_of_unchecked"][turn] == pytest.approx(ratio)
    assert set(found["resume_s"]) == {"open_store", "concat", "whole"}
    assert all(seconds < 1 for seconds in found["resume_s"].values())
