"""The gradient noise beside problems with a known answer, on any layout, and its command."""

import functools
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightscale.cli import main
from lightscale.config.files import to_toml
from lightscale.config.layout import LayoutError, check_layout
from lightscale.config.model import ModelConfig
from lightscale.config.schema import RunConfig
from lightscale.parallel.mesh import Mesh
from lightscale.parallel.micro_batch import GivenMicroBatch
from lightscale.study.noise_scale import noise_scale
from lightscale.training.measurements.gradient_noise import GradientNoise

HELPERS = Path(__file__).parents[1] / "helpers"
tiny, plain, mixers = (
    SimpleNamespace(**runpy.run_path(str(HELPERS / f"{name}.py")))
    for name in ("tiny_engine", "plain_models", "plain_mixers")
)
MODEL = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24}
# Processes, tensor, pipeline, sequence.
LAYOUTS = [(2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 1, 1, 1)]


class Drawn:
    """Stands for an engine whose gradient of B tokens is the true one and noise of a known covariance over B."""

    def __init__(self, true: np.ndarray, deviations: np.ndarray) -> None:
        self.mesh = SimpleNamespace(pipeline=1, virtual_stages=1)
        self._true, self._deviations = true, deviations
        self._noise = np.random.default_rng(0)

    def step(self, counts: list[int]) -> list[Any]:
        draw = self._noise.normal(size=(len(counts), len(self._true)))
        sums = [
            count * self._true + np.sqrt(count) * self._deviations * one
            for count, one in zip(counts, draw, strict=True)
        ]
        return list(zip(counts, sums, strict=True))

    def forward_backward(self, batches: list[Any], *, measure_logits: bool = False) -> Any:
        tokens = sum(count for count, _ in batches)
        self._norm = float(np.linalg.norm(sum(one for _, one in batches) / tokens))
        return SimpleNamespace(tokens=tokens)

    def gradient_norm(self) -> float:
        return self._norm


def test_the_scale_of_drawn_gradients_is_the_one_they_are_drawn_with() -> None:
    """Of a covariance that is no multiple of 1, in micro-batches of different sizes."""
    true, deviations = np.linspace(0.1, 1.0, 40), np.linspace(3.0, 0.5, 40)
    engine, lines = Drawn(true, deviations), []
    for step in range(1, 801):
        batches = engine.step([7, 5, 9, 11])
        noise = GradientNoise(engine, batches)  # type: ignore[arg-type]
        whole = engine.forward_backward(batches)
        lines.append({"step": step, **noise.result(whole.tokens, engine.gradient_norm(), tokens=whole.tokens)})
    found = noise_scale(lines)
    signal, covariance = float(np.sum(true**2)), float(np.sum(deviations**2))
    assert found.signal == pytest.approx(signal, rel=0.05)
    assert found.noise == pytest.approx(covariance, rel=0.05)
    assert found.tokens == pytest.approx(covariance / signal, rel=0.08)
    assert found.interval is not None
    assert found.interval[0] < covariance / signal < found.interval[1]
    assert (found.steps, found.measured) == ((1, 800), 800)


def test_without_a_gradient_there_is_no_scale() -> None:
    lines = [{"step": step, "gradient_noise": {"signal": (-1) ** step * 1.0, "noise": 5.0}} for step in range(1, 21)]
    assert (noise_scale(lines).tokens, noise_scale(lines).interval) == (None, None)


def test_norms_that_say_nothing_give_nothing() -> None:
    engine = Drawn(np.ones(3), np.ones(3))
    noise = GradientNoise(engine, engine.step([4, 4]))  # type: ignore[arg-type]
    assert noise.result(8, float("inf"), tokens=8) == {}
    assert noise.result(4, 1.0, tokens=8) == {}, "a step of one micro-batch has no second size"


def test_the_scale_is_in_tokens_also_where_few_labels_count() -> None:
    """As answers among questions: the same gradients of a tenth of the tokens ask for the same share of a step."""
    engine = Drawn(np.ones(3), np.ones(3))
    noise = GradientNoise(engine, batches := engine.step([4, 4]))  # type: ignore[arg-type]
    norm = (engine.forward_backward(batches), engine.gradient_norm())[1]
    all_count, few_count = (noise.result(8, norm, tokens=tokens)["gradient_noise"] for tokens in (8, 80))
    assert few_count["signal"] == all_count["signal"]
    assert few_count["noise"] == pytest.approx(10 * all_count["noise"])


def batches_of(mesh: Mesh) -> list[Any]:
    """Micro-batches of a sequence, whose numbers of labels differ."""
    found = []
    for batch in tiny.step_batches(0, SimpleNamespace(**{**vars(mesh), "data": 1, "data_rank": 0})):
        for row in range(2):
            one = {key: value[row : row + 1] for key, value in vars(batch).items() if isinstance(value, torch.Tensor)}
            found.append(GivenMicroBatch(**one))
    n = found[0].tokens.size(1)
    first = mesh.sequence_rank * n
    for number, one in enumerate(found):
        one.loss_mask[:, max(0, tiny.TOKENS - 10 * number - first) :] = 0
    return found[mesh.data_rank :: mesh.data]


def on_ranks(rank: int, world_size: int, init_method: str, layouts: list[Any]) -> list[Any]:
    """Of each layout: data ranks, weights, what is measured; weights after a step with the measurement and without."""
    found = []
    for number, axes in enumerate(layouts):
        with tiny.mesh_on(axes, rank, f"{init_method}-{number}") as mesh:
            engine = tiny.engine_in(mesh, **MODEL)
            before, batches = tiny.weights(engine), batches_of(mesh)
            noise = GradientNoise(engine, batches)
            sums = engine.forward_backward(batches)
            result = noise.result(sums.tokens, engine.gradient_norm(), tokens=sums.tokens)
            engine.apply(tiny.LR)
            other = tiny.engine_in(mesh, **MODEL)
            other.forward_backward(batches)
            other.step(tiny.LR)
            found.append((mesh.data, before, result, tiny.weights(engine), tiny.weights(other)))
    return found


def plainly(weights: dict[str, torch.Tensor], part: int) -> dict[str, float]:
    """Signal and noise by gradients of whole sequences in fp64; ``part``: sequences of the first ones."""
    model = ModelConfig(**{**tiny.MODEL, **MODEL})
    leaves = {key: weight.double().clone().requires_grad_() for key, weight in weights.items()}
    whole = SimpleNamespace(sequence=1, sequence_rank=0, data=1, data_rank=0)
    losses, counts = [], []
    for batch in batches_of(whole):  # type: ignore[arg-type]
        mix = functools.partial(mixers.MIX["tnl"], model)
        logits = plain.document_logits(model, leaves, batch.tokens[0], mix, None)[:, : tiny.VOCAB_SIZE]
        each = logits.logsumexp(dim=1) - logits.gather(1, batch.labels[0][:, None])[:, 0]
        losses.append((each * batch.loss_mask[0]).sum())
        counts.append(float(batch.loss_mask.sum()))
    squares = []
    for number in (part, len(losses)):
        found = torch.autograd.grad(sum(losses[:number]), list(leaves.values()), retain_graph=True)
        squares.append(sum(float((one / sum(counts[:number])).square().sum()) for one in found))
    small, large = sum(counts[:part]), sum(counts)
    return {
        "signal": (large * squares[1] - small * squares[0]) / (large - small),
        "noise": (squares[0] - squares[1]) / (1 / small - 1 / large),
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_layout_measures_what_whole_gradients_give(ranks: int, run_ranks: Callable[..., list[Any]]) -> None:
    layouts = [(1, 1, 1, 1)] if ranks == 1 else LAYOUTS
    for found in run_ranks(on_ranks, ranks, layouts):
        for axes, (data, weights, result, measured, other) in zip(layouts, found, strict=True):
            for key, wanted in plainly(weights, data).items():
                assert result["gradient_noise"][key] == pytest.approx(wanted, rel=1e-3), f"{axes}: {key}"
            assert all(torch.equal(weight, other[name]) for name, weight in measured.items()), axes


def config(**train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {**tiny.MODEL, **MODEL},
            "data": {"store": "store", "sequence_length": 48},
            "optimizer": {"lr": 1e-3},
            "train": {"steps": 3, "global_batch_size": 4, **train},
            "metrics": {"gradient_noise_every": 1},
        }
    )


def test_one_micro_batch_is_refused() -> None:
    assert check_layout(config(micro_batch_size=2), 1).num_microbatches == 2
    with pytest.raises(LayoutError, match=r"gradient_noise_every = 1 compares 1 micro-batch.*use .*batch_size = 8, or"):
        check_layout(config(micro_batch_size=4), 1)


def test_the_command_reads_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text(to_toml(config(micro_batch_size=2)))
    lines = [
        {"step": step, "attempt": 1, "loss": 1.0, "step_s": 1.0, "gradient_noise": {"signal": 2.0, "noise": 960.0}}
        for step in (1, 2)
    ]
    # Records of steps that a guard skipped had it once.
    lines.append({**lines[0], "step": 3, "skipped": "spike", "gradient_noise": {"signal": 4e4, "noise": 1.0}})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "events.jsonl").write_text("")
    assert main(["noise-scale", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["tokens_per_step"], found["steps"]) == (480.0, 192, [1, 2])
    assert main(["noise-scale", str(tmp_path)]) == 0
    assert "480 tokens (95 %: 480 to 480), 10.0 sequences" in capsys.readouterr().out
    assert main(["noise-scale", str(tmp_path), "--last", "1"]) == 78
    assert "1 steps with a measurement" in capsys.readouterr().err
