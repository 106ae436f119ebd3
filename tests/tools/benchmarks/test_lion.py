"""The benchmark of LION: its full matrix is the operator's, and its figures are those of the medians."""

import json
import statistics
from types import ModuleType

import pytest
import torch

from lightscale.kernels.lion import lion


@pytest.mark.parametrize("decays", ["none", "by head", "by token"])
def test_the_full_matrix_computes_the_same(bench_in_process: ModuleType, decays: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.rand(3, 1, 50, 2, 8, generator=generator, dtype=torch.float64)
    drawn = -torch.rand(1, 50, 2, generator=generator, dtype=torch.float64)
    log_decay = {"none": None, "by head": drawn[0, 0], "by token": drawn}[decays]
    found = bench_in_process.lion.full_matrix(q, k, v, log_decay)
    assert torch.allclose(found, lion(q, k, v, log_decay)[0], rtol=1e-10)


def test_figures(bench_in_process: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Generous limits at a small size: the command's own sizes are measured by hand."""
    arguments = ["lion", "--tokens", "512", "2048", "--heads", "1", "--width", "16", "--repeats", "3", "--json"]
    assert bench_in_process.main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["targets"] == {"growth_limit": 1.5, "speedup": 5.0}
    assert list(result["forms"]) == ["lion-lit", "lion-retnet", "lion-s", "lion-s-vector"]
    for name, found in result["forms"].items():
        samples = {work: statistics.median(taken) for work, taken in result["samples_s"][name].items()}
        # A sample of the short row is as many rows as make a long one.
        assert found["growth"] == pytest.approx(samples["2048"] / samples["512"])
        assert found["speedup"] == pytest.approx(samples["full matrix"] * 4 / samples["512"])
        assert found["reached"] == (found["growth"] <= 1.5 and found["speedup"] >= 5)
        assert found["growth"] < 2.5


def test_table_for_people(bench_in_process: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_in_process.main(["lion", "--tokens", "40", "--heads", "1", "--width", "4", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("lion on ")
    assert all(any(name in line for line in lines[2:]) for name in ("lion-lit", "lion-s", "growth", "speed-up"))
