"""``tools/bench.py evaluate`` at a tiny size: both ways give the same answers, and what is missing is refused."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]


def both_ways(rank: int, world_size: int, init_method: str, tools: str) -> dict[str, Any]:
    sys.path.insert(0, tools)
    from benchmarks import evaluate

    evaluate.SIZE = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64}
    evaluate._REQUESTS, evaluate._PADDED_ROWS = 10, 4
    evaluate._SHOTS_TOKENS, evaluate._QUESTIONS = 40, 3
    *_, figures = evaluate.run(data=None, questions=1, repeats=1)
    return dict(figures)


def test_the_ways_that_are_compared_agree(run_ranks: RunRanks, tools_path: Path) -> None:
    (figures,) = run_ranks(both_ways, 1, str(tools_path))
    assert figures.keys() == {"tnl", "llama"}
    for parts in figures.values():
        assert (parts["packed"]["requests"], parts["prefix"]["requests"]) == (10, 12)
        for part in parts.values():
            # Logarithms of about 45 in fp32.
            assert part["most_different"] < 1e-4
            first, second = part["requests_per_s"].values()
            assert part["times"] == pytest.approx(first / second)
        # 40 tokens once in place of 12 times, and of each question 40 once in place of 4 times.
        assert parts["prefix"]["tokens_of_again"] < 0.4


def test_what_is_missing_is_refused(
    bench_in_process: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.evaluate.tasks_folder", lambda: None)
    assert bench_in_process.main(["evaluate", "--threads", "1"]) != 0
    assert "--without-lm-eval" in capsys.readouterr().err
    monkeypatch.setattr("benchmarks.evaluate.tasks_folder", lambda: tmp_path)
    assert bench_in_process.main(["evaluate", "--threads", "1", "--data", str(tmp_path)]) != 0
    assert "no questions of boolq, piqa" in capsys.readouterr().err
