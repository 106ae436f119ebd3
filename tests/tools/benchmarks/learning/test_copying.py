"""The benchmark of the copying task: its batches, its accuracy, and its verdict."""

import functools
import json
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.data_pipeline.generators.copying import Copying
from lightscale.errors import UserError

plain = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[3] / "helpers" / "plain_models.py")))
RunRanks = Callable[..., list[Any]]


def test_batches_are_the_documents_of_a_store(bench_in_process: ModuleType) -> None:
    generator = Copying(min_length=3, max_length=3)
    rows = next(bench_in_process.copying.batches(generator, batch=4, seed=5))
    end = generator.tokenizer().eot_id
    assert rows.tokens.shape == rows.labels.shape == (4, 9)
    assert bool((rows.tokens[:, 0] == end).all()) and bool((rows.labels[:, -1] == end).all())
    # What counts is the second string, predicted from the separator on, and the end.
    assert rows.loss_mask.tolist() == [[0.0] * 5 + [1.0] * 4] * 4
    assert torch.equal(rows.labels[:, 5:8], rows.tokens[:, 2:5])


@pytest.mark.long
def test_finished_curves_are_not_run_again(
    bench_in_process: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A few steps of each model: its own sizes are measured by hand."""
    copying = bench_in_process.copying
    words = ["copying", "--lengths", "4", "--steps", "2", "--batch", "4", "--repeats", "1", "--json"]
    words += ["--width", "8", "--blocks", "1", "--cells", str(tmp_path)]
    assert bench_in_process.main(words) == 0
    told = capsys.readouterr()
    figures = json.loads(told.out)
    assert [one["model"] for one in figures["curves"]] == copying.MODELS
    for one in figures["curves"]:
        assert len(one["accuracies"]) == len(one["losses"]) == one["steps"] == 2 and not one["reached"]
        # Nothing is known yet: all ids are as likely.
        assert one["losses"][0] == pytest.approx(5.66, abs=0.3)
        assert f"{one['model']}, strings of 4, seed 0: step 2 of 2" in told.err
    (tmp_path / "linear_4_0.json").unlink()
    ran = []
    again = copying.curve
    monkeypatch.setattr(copying, "curve", lambda cell, recipe: ran.append(str(cell)) or again(cell, recipe))
    assert bench_in_process.main(words) == 0
    assert ran == ["linear, strings of 4, seed 0"]
    same = [one | {"seconds": 0.0} for one in json.loads(capsys.readouterr().out)["curves"]]
    assert same == [one | {"seconds": 0.0} for one in figures["curves"]]
    assert bench_in_process.main([*words, "--finished", "--repeats", "2", "--steps", "9"]) == 0 and len(ran) == 1
    assert [one["seed"] for one in json.loads(capsys.readouterr().out)["curves"]] == [0, 0, 0, 0]
    assert bench_in_process.main(["copying", "--finished"]) == UserError.EXIT_CODE
    # Too short: run again; of another recipe: refused, and not mixed up with it.
    assert bench_in_process.main([*words, "--models", "linear", "--steps", "3"]) == 0
    assert len(ran) == 2
    assert bench_in_process.main([*words, "--lr", "0.1"]) == UserError.EXIT_CODE
    assert "quadratic_4_0.json: made by {'width': 8" in capsys.readouterr().err


def layer_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()


def printed(model: ModelConfig, x: Tensor, weights: dict[str, Tensor], layer: int) -> Tensor:
    """One residual connection of the paper's models, written out; x (n, d)."""
    x, name, own = layer_norm(x), model.layers[layer], weights
    if name == "perceptron":
        h = x @ own["up_proj.weight"].T + own["up_proj.bias"]
        h = h * (1 + torch.erf(h / math.sqrt(2))) / 2
        return h @ own["down_proj.weight"].T + own["down_proj.bias"]
    seen = torch.ones(len(x), len(x), dtype=x.dtype).tril()
    if name == "relation":
        a, b = x @ own["a_proj.weight"].T + own["a_proj.bias"], x @ own["b_proj.weight"].T
        linear = getattr(model.layer_options(layer), "form") == "linear"  # noqa: B009 - of the mixer's type
        pairs = layer_norm(a)[:, None] + layer_norm(b) if linear else layer_norm(a[:, None] + b)
        o = torch.einsum("ts, tsd -> td", seen, pairs.exp())
        o = layer_norm(o / o.detach().amax(-1, keepdim=True))
        return o @ own["out_proj.weight"].T + own["out_proj.bias"]
    bias = {key: own.get(f"{key}_proj.bias", 0.0) for key in ("kv", "q", "out")}
    (k, v), q = (x @ own["kv_proj.weight"].T + bias["kv"]).chunk(2, dim=1), x @ own["q_proj.weight"].T + bias["q"]
    if name == "attention":
        scores = torch.exp(q @ k.T / math.sqrt(k.shape[1])) * seen
    else:
        q, k = (torch.where(y > 0, y + 1, y.clamp(max=0).exp()) for y in (q, k))
        scores = (q @ k.T) * seen
    o = scores @ v / (scores.sum(1, keepdim=True) + (0.0 if name == "attention" else 1e-6))
    return o @ own["out_proj.weight"].T + bias["out"]


TABLE = "embedding.positions.table"


def learned(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    return x + weights[TABLE][: len(x)]


def built(rank: int, world_size: int, init_method: str, tools: Path) -> dict[str, Any]:
    sys.path.insert(0, str(tools))
    from benchmarks.learning.copying import MODELS
    from benchmarks.learning.printed_blocks import printed_blocks, printed_model

    found = {}
    with printed_blocks():
        for name in MODELS:
            model = printed_model(name, length=12, width=8, blocks=2, vocab_size=24)
            with plain.built_model(model, f"{init_method}-{name}") as module:
                initial = plain.weights_of(module)
                plain.disturb(module)
                found[name] = {"model": model, "initial": initial, **plain.figures(module, plain.batch(model, [[12]]))}
    return found


def test_the_models_are_the_printed_ones(run_ranks: RunRanks, tools_path: Path) -> None:
    """Logits and gradients in fp64; with N(0, 1) for embedding and positions, and outputs by residual connections."""
    (found,) = run_ranks(built, 1, tools_path)
    for name, one in found.items():
        model, weights = one["model"], one["weights"]
        mix, rows = functools.partial(printed, model), plain.batch(model, [[12]])
        plain.assert_equal(one, plain.plain_figures(model, weights, rows, mix, learned))
        for drawn in ("embedding.word_embeddings.weight", TABLE):
            assert float(one["initial"][drawn].std()) == pytest.approx(1.0, rel=0.3), (name, drawn)
        out = one["initial"]["decoder.layers.0.self_attention.out_proj.weight"]
        connections = 4 if "transformer" in name else 2
        assert float(out.std()) == pytest.approx(0.02 / math.sqrt(connections), rel=0.4), name


def test_the_verdict(bench_in_process: ModuleType) -> None:
    def curve(model: str, accuracies: list[float]) -> dict[str, Any]:
        steps, last = len(accuracies), accuracies[-1]
        found = {"model": model, "length": 16, "seed": 0, "steps": steps, "reached": last >= 0.99}
        return found | {"accuracy": last, "accuracies": accuracies}

    missed = bench_in_process.copying.missed
    fast, slow = curve("quadratic", [0.1, 0.995]), curve("linear", [0.1, 0.89, 0.89])
    assert missed([fast, slow, curve("transformer", [0.1, 0.1, 0.99]), curve("linear transformer", [0.1, 0.9])]) == []
    assert missed([fast, slow, curve("transformer", [0.99]), curve("linear transformer", [0.1, 0.2])]) == [
        "transformer, seed 0: 99% at 1, quadratic 99% at 2: not between",
        "linear transformer, seed 0: 20.0% at 2, linear 89.0% at 3: not between",
    ]
    assert missed([curve("quadratic", [0.1] * 300 + [1.0])]) == [
        "quadratic, seed 0: 100.0% after 301 steps, not 99% in 300"
    ]
    assert missed([curve("linear", [0.1, 0.9])]) == ["linear, seed 0: 90.0% in 2 steps, not below 90%"]
