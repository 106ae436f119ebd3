"""The benchmark of Pathfinder: its run fits its stores, and all of it at a small size."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from lightscale.config.files import load
from lightscale.data_pipeline.generators.pathfinder import Pathfinder


@pytest.fixture(scope="module")
def pathfinder(tools_path: Path) -> ModuleType:
    return importlib.import_module("benchmarks.learning.pathfinder")


def test_the_run_reads_the_stores(pathfinder: ModuleType) -> None:
    config = load(pathfinder.RUN)
    assert config.model.head is not None
    assert config.model.head.num_labels == len(Pathfinder(traced=0.5).classes)
    assert config.model.image_shape == Pathfinder().image_shape
    assert list(config.data.stores) == [f"traced-{length}" for length in pathfinder.LENGTHS]
    assert list(config.data.validation) == [f"length-{length}" for length in pathfinder.LENGTHS]
    assert {one.sequences for one in config.data.validation.values()} == {pathfinder.HELD_OUT}


@pytest.mark.long
def test_whole_at_a_small_size(bench_in_process: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    words = ["pathfinder", "train.steps=4", "train.validate_every=2", "optimizer.warmup_steps=1"]
    words += ["optimizer.decay_steps=1", "train.global_batch_size=4", "train.micro_batch_size=4"]
    words += ["--first-steps", "3", "--documents", "12", "--held-out", "8", "--folder", "work", "--save", "kept"]
    assert bench_in_process.main(words) == 0
    (found,) = (json.loads(path.read_text()) for path in (tmp_path / "kept").glob("pathfinder_*.json"))
    assert [one["step"] for one in found["curve"]] == [2, 4]
    assert all(0 <= one[f"length-{length}"] <= 1 for one in found["curve"] for length in (5, 8, 14))
    # Nothing is done again.
    before = (tmp_path / "work/run/metrics.jsonl").read_bytes()
    assert bench_in_process.main(words) == 0
    assert (tmp_path / "work/run/metrics.jsonl").read_bytes() == before
