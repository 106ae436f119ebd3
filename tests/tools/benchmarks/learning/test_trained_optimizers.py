"""The comparison of optimizers: rates that are tried, a killed benchmark that continues, and the whole at toy size."""

import importlib
import json
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lightscale.config.optimizers import OPTIMIZERS
from lightscale.config.schema import RunConfig


@pytest.fixture(scope="module")
def compared(tools_path: Path) -> ModuleType:
    return importlib.import_module("benchmarks.learning.trained_optimizers")


BEST = {"adamw": 4e-3, "soap": 1e-3, "schedulefree": 8e-3 * 2**9}
"""The first at the middle, the second two steps below it, the third beyond what is tried."""


@pytest.fixture
def runs(compared: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configurations of all runs; nothing is trained."""
    made: list[RunConfig] = []

    def trained(self: Any, config: RunConfig) -> float | None:
        made.append(config)
        own = config.optimizer
        off = math.log2(own.lr / BEST[own.name])
        # The largest rate diverges.
        return None if own.name == "adamw" and off > 0.5 else 2.0 + 0.1 * off**2 + 0.01 * config.train.seed

    store = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=128), fingerprint=lambda: "of the tokens")
    monkeypatch.setattr(compared.Runs, "_trained", trained)
    monkeypatch.setattr(compared, "TokenStore", lambda path: store)
    return made


WORDS = ["optimizers-trained", "--small", "--mixers", "tnl", "hgrn2", "--ways", "adamw, cosine", "soap, cosine"]
WORDS += ["schedulefree, constant"]


def test_the_grid_grows_until_the_best_rate_is_inner(
    bench_in_process: ModuleType, runs: list[RunConfig], tmp_path: Path
) -> None:
    words = [*WORDS, "--store", str(tmp_path), "--folder", str(tmp_path / "cells"), "--save", str(tmp_path)]
    assert bench_in_process.main(words) == 0
    (path,) = tmp_path.glob("optimizers-trained_*.json")
    figures: dict[str, Any] = json.loads(path.read_text())
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    lines = {(line["mixer"], line["way"]): line for line in figures["lines"]}
    assert len(lines) == 6
    for mixer in ("tnl", "hgrn2"):
        for way, rate, inner, tried in (
            ("adamw, cosine", 4e-3, True, 3),
            ("soap, cosine", 1e-3, True, 5),
            ("schedulefree, constant", 8e-3 * 2**7, False, 9),
        ):
            line = lines[mixer, way]
            assert (line["rate"], line["is_inner"]) == (rate, inner), way
            own = [cell for cell in figures["cells"] if (cell["mixer"], cell["way"]) == (mixer, way)]
            assert [cell["seed"] for cell in own] == [0] * tried + [1, 2]
            assert line["mean"] == pytest.approx(sum(line["losses"]) / 3)
    # Equal tokens, and seeds of weights and order.
    assert {config.tokens_per_step * config.total_steps for config in runs} == {figures["tokens"]}
    assert all(config.data.seed == config.train.seed for config in runs)
    assert [cell["loss"] for cell in figures["cells"] if cell["loss"] is None] == [None, None]


def test_a_killed_benchmark_continues(
    compared: ModuleType,
    bench_in_process: ModuleType,
    runs: list[RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [*WORDS[:-1], "--store", str(tmp_path), "--folder", str(tmp_path), "--json"]
    whole = compared.Runs._trained

    def killed(self: Any, config: RunConfig) -> float | None:
        if len(runs) == 4:
            raise KeyboardInterrupt
        found: float | None = whole(self, config)
        return found

    monkeypatch.setattr(compared.Runs, "_trained", killed)
    with pytest.raises(KeyboardInterrupt):
        bench_in_process.main(words)
    kept = tmp_path / "cells.jsonl"
    assert len(kept.read_text().splitlines()) == 4
    # The last one was being written.
    kept.write_text(kept.read_text()[:-20])
    monkeypatch.setattr(compared.Runs, "_trained", whole)
    assert bench_in_process.main(words) == 0
    # adamw has 5 cells and soap 7, of two mixers; one was written by halves.
    assert len(runs) == 2 * (5 + 7) + 1
    assert bench_in_process.main(words) == 0
    assert len(runs) == 2 * (5 + 7) + 1, "all are kept"
    # Of other steps all run again, and both settings stay.
    assert bench_in_process.main([*words, "--steps", "3"]) == 0
    assert len(runs) == 4 * (5 + 7) + 1
    assert bench_in_process.main(words) == 0
    assert len(runs) == 4 * (5 + 7) + 1


def test_every_optimizer_is_compared(compared: ModuleType) -> None:
    """But the older Adam, which is AdamW with another decay."""
    assert {way.optimizer for way in compared.WAYS} == OPTIMIZERS.keys() - {"adam"}
    assert len({way.name for way in compared.WAYS}) == len(compared.WAYS)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_whole_at_toy_size(bench_in_process: ModuleType, compared: ModuleType, tmp_path: Path) -> None:
    words = [
        "optimizers-trained",
        "--small",
        "--steps",
        "6",
        "--folder",
        str(tmp_path / "made"),
        "--save",
        str(tmp_path),
    ]
    assert bench_in_process.main(words) == 0
    (path,) = tmp_path.glob("optimizers-trained_*.json")
    figures: dict[str, Any] = json.loads(path.read_text())
    assert figures["complete"] and path.with_suffix(".png").stat().st_size > 20_000
    expected = [(mixer, way.name) for mixer in compared.MIXERS for way in compared.WAYS]
    assert [(line["mixer"], line["way"]) for line in figures["lines"]] == expected
    for line in figures["lines"]:
        # A uniform distribution over 128 characters has ln 128 = 4.85 nats.
        assert len(line["losses"]) == 3 and 1.0 < line["mean"] < 4.85, line
    # The schedules are those that they are called: at one rate, AdamW's three end apart.
    ends = [
        [cell["loss"] for cell in figures["cells"] if cell["way"] == f"adamw, {name}"][:3]
        for name in ("cosine", "linear", "wsd")
    ]
    assert len({tuple(end) for end in ends}) == 3
