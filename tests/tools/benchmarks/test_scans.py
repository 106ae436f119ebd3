"""The benchmark of one scan and two: its ways compute what they are named for, and its figures are the medians'."""

import json
import statistics
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.long
TOKENS, HEADS, WIDTH = 150, 3, 6


def test_the_ways_compute_their_formulas(bench_in_process: ModuleType) -> None:
    """Of whole matrices in fp64, with gradients; 150 tokens are two chunks and a part of one."""
    scans = bench_in_process.scans
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(4, 1, TOKENS, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    *leaves, do = drawn[0].requires_grad_(), drawn[1].requires_grad_(), drawn[2].requires_grad_(), drawn[3]
    log_decay = -torch.tensor([0.01, 0.3, 2.0], dtype=torch.float64)
    q, k, v = leaves
    distance = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).abs()
    decayed = torch.einsum("bihk,bjhk->bhij", q, k) * (log_decay[:, None, None] * distance).exp()
    twice = decayed * (1 + torch.eye(TOKENS, dtype=torch.float64))
    averaged = torch.einsum("bihk,bjhk->bhij", q, k.exp() / k.exp().sum(1, keepdim=True))
    pairs = {
        scans.ONE: averaged,
        scans.TWO: twice,
        scans.FUSED: decayed,
        scans.PLAIN_ONE: averaged,
        scans.PLAIN_TWO: twice,
        scans.PLAIN_PRODUCT: torch.einsum("bihk,bjhk->bhij", q, k),
    }
    assert pairs.keys() == scans.WAYS.keys()
    for way, weights in pairs.items():
        expected = torch.einsum("bhij,bjhv->bihv", weights, v)
        found = scans.WAYS[way](q, k, v, log_decay)
        gradients = (torch.autograd.grad(o, leaves, do, retain_graph=True) for o in (found, expected))
        for one, other in zip((found, *next(gradients)), (expected, *next(gradients)), strict=True):
            assert float((one - other).norm() / other.norm()) < 1e-10, way


def test_figures_and_picture(
    bench_in_process: ModuleType,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_in_process.scans, "JUDGED_TOKENS", 96)
    arguments = ["--tokens", "64", "96", "--heads", "1", "--width", "4", "--repeats", "3"]
    assert bench_in_process.main(["scans", *arguments, "--json", "--save", str(tmp_path)]) == 0
    figures = json.loads(capsys.readouterr().out)
    scans = bench_in_process.scans
    ms = {(x["way"], x["passes"], x["tokens"]): x["ms"] for x in figures["lines"]}
    assert set(ms) == {(way, name, n) for way in scans.WAYS for name in ("forward", "backward") for n in (64, 96)}
    for line in figures["lines"]:
        assert len(line["samples_ms"]) == 3 and line["ms"] == statistics.median(line["samples_ms"]) > 0
        assert line["times_one_scan"] == line["ms"] / ms[scans.ONE, line["passes"], line["tokens"]]
    assert figures["targets"] == {"two_scans_times_one": 2.0, "at_tokens": 96}
    # Judged at the longest row alone, and one line for each pass that misses.
    few = [name for name in ("forward", "backward") if ms[scans.TWO, name, 96] < 2 * ms[scans.ONE, name, 96]]
    assert [one.split(": ")[0] for one in figures["verdict"]["missed"]] == [f"two scans, {name}, 96" for name in few]
    assert "no GPU" in figures["note"]
    saved, picture = sorted(tmp_path.iterdir())
    assert json.loads(saved.read_text()) == figures | {"complete": True}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_table_for_people(bench_in_process: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_in_process.main(["scans", "--tokens", "20", "--heads", "1", "--width", "4", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("scans on ")
    # Rows so short are not judged: gpu-check --small takes such ones.
    assert not any("at least" in line for line in lines)
    assert [sum(name in line for line in lines[2:]) for name in ("forward", "backward")] == [1, 1]
