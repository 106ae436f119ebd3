"""``tools/bench.py optimizers``: figures of every optimizer, with the bytes that a plan counts."""

import json
import sys
from pathlib import Path

import pytest

from lightscale.config.optimizers import OPTIMIZERS


def test_figures_of_every_optimizer(tools_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import bench

    assert bench.main(["optimizers", "--size", "tiny", "--repeats", "1", "--moments-steps", "3", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [line["optimizer"] for line in figures["lines"]] == [*OPTIMIZERS]
    for line in figures["lines"]:
        assert line["state_bytes_per_parameter"] == line["planned_bytes_per_parameter"]
        (step,) = line["samples_s"]
        assert line["ns_per_parameter"] == pytest.approx(1e9 * step / figures["parameters"])
    assert sys.modules["benchmarks.optimizers"].table(figures).row_count == len(OPTIMIZERS)
    moments = {one["optimizer"]: one for one in figures["moments"]}
    assert moments.keys() == {"adamw", "lion", "muon", "soap"}
    for one in moments.values():
        assert one["losses"][0] == pytest.approx(one["losses"][1], rel=1e-2)
        assert 0 < one["distance"] < 0.2
