"""``tools/bench.py learn``: a real run of training, and whether its loss fell."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale.cli import main
from lightscale.errors import UserError

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def tools(tools_path: Path) -> SimpleNamespace:
    import bench
    from benchmarks.learning import learn

    return SimpleNamespace(bench=bench, learn=learn)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Invented words that always follow one another in the same way."""
    words = [chr(97 + number % 26) * (2 + number % 3) + "ou" for number in range(60)]
    texts = [" ".join(words[(start + 7 * step) % 60] for step in range(100)) for start in range(60)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = ["data", "prepare", str(corpus), "--out", str(tmp_path / "store"), "--vocab-size", "300"]
    assert main([*command, "--validation", "0.1"]) == 0
    return tmp_path / "store"


@pytest.mark.long
def test_a_tiny_run_learns_which_word_follows(
    tools: SimpleNamespace, store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    capfd.readouterr()
    overrides = {
        "model.vocab_size": 300, "data.sequence_length": 64, "data.validation.stdlib.source": "corpus-validation",
        "train.global_batch_size": 4, "train.micro_batch_size": 4, "optimizer.lr": 5e-3, "optimizer.warmup_steps": 0,
    }  # fmt: skip
    options = {"--config": ROOT / "configs" / "tnl-tiny.toml", "--steps": 25, "--store": store, "--save": out}
    words = [str(word) for pair in options.items() for word in pair]
    assert tools.bench.main(["learn", "--json", *words, *(f"{key}={value}" for key, value in overrides.items())]) == 0
    figures = json.loads(capfd.readouterr().out)
    assert len(figures["losses"]) == 25
    assert figures["fall"] == pytest.approx(figures["losses"][0] - sum(figures["losses"][-5:]) / 5)
    assert figures["fall"] > 1
    assert figures["verdict"]["missed"] == []
    assert figures["tokens_per_s"] > 0
    (saved,) = out.iterdir()
    assert json.loads(saved.read_text()) == figures | {"complete": True}


def lines(*losses: float) -> list[dict[str, Any]]:
    return [{"loss": loss, "tokens_per_s": 10.0 * n, "mfu": None} for n, loss in enumerate(losses, start=1)]


def test_a_loss_that_does_not_fall_is_missed(tools: SimpleNamespace) -> None:
    found = tools.learn.figures(lines(8.0, 7.9, 7.8, 7.7, 7.6, 7.5, 7.4))
    assert found["verdict"]["missed"] == ["the loss fell by 0.400 nats per token, not by 1.0"]
    assert tools.learn.figures(lines(8.0, 6.0, 6.0, 6.0, 6.0, 6.0))["verdict"]["missed"] == []
    assert tools.learn.figures(lines(8.0, *[float("nan")] * 5))["verdict"]["missed"]
    # Of the second half of the steps, the median.
    assert found["tokens_per_s"] == 60.0


def test_a_command_that_fails_is_named(tools: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"`lightscale data prepare .*` failed with exit code"):
        tools.learn.run_lightscale("data", "prepare", "nothing")
    assert "the following arguments are required: --out" in capfd.readouterr().err
