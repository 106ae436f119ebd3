"""The benchmark of the copying task: its batches, its accuracy, and its verdict."""

import json
from types import ModuleType
from typing import Any

import pytest
import torch

from lightscale.data_pipeline.generators.copying import Copying


def test_batches_are_the_documents_of_a_store(bench_in_process: ModuleType) -> None:
    generator = Copying(min_length=3, max_length=3)
    rows = next(bench_in_process.copying.batches(generator, batch=4, seed=5))
    end = generator.tokenizer().eot_id
    assert rows.tokens.shape == rows.labels.shape == (4, 9)
    assert bool((rows.tokens[:, 0] == end).all()) and bool((rows.labels[:, -1] == end).all())
    # What counts is the second string, predicted from the separator on, and the end.
    assert rows.loss_mask.tolist() == [[0.0] * 5 + [1.0] * 4] * 4
    assert torch.equal(rows.labels[:, 5:8], rows.tokens[:, 2:5])


def test_figures(bench_in_process: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """A few steps of each model: its own sizes are measured by hand."""
    words = ["copying", "--lengths", "4", "--steps", "2", "--batch", "4", "--repeats", "1", "--json"]
    assert bench_in_process.main(words) == 0
    figures = json.loads(capsys.readouterr().out)
    models = bench_in_process.copying.MODELS
    assert [one["model"] for one in figures["curves"]] == list(models)
    for one in figures["curves"]:
        assert len(one["accuracies"]) == len(one["losses"]) == one["steps"] == 2 and not one["reached"]
        # Nothing is known yet: all ids are as likely.
        assert one["losses"][0] == pytest.approx(5.66, abs=0.3)


def test_the_verdict(bench_in_process: ModuleType) -> None:
    def curve(model: str, accuracies: list[float]) -> dict[str, Any]:
        steps, last = len(accuracies), accuracies[-1]
        found = {"model": model, "length": 16, "seed": 0, "steps": steps, "reached": last >= 0.99}
        return found | {"accuracy": last, "accuracies": accuracies}

    missed = bench_in_process.copying.missed
    assert missed([curve("quadratic", [0.1, 0.995]), curve("linear", [0.1, 0.89]), curve("transformer", [0.1])]) == []
    assert missed([curve("quadratic", [0.1] * 300 + [1.0])]) == [
        "quadratic, seed 0: 100.0% after 301 steps, not 99% in 300"
    ]
    assert missed([curve("linear", [0.1, 0.9])]) == ["linear, seed 0: 90.0% in 2 steps, not below 90%"]
