"""The classifier of quality: its optimum and its scores by a plain one, its file, and the command that fits it."""

import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file, save_file

from lightscale import cli
from lightscale.data_pipeline.preparation.filters import compose
from lightscale.data_pipeline.preparation.filters.classifier import features, fit, probability
from lightscale.errors import UserError

GOOD, BAD = "harbour boat railway lamp church bread storm", "click buy cheap now watch free win"
BITS, PENALTY = 10, 1e-3


def texts(words: str, number: int, *, seed: int) -> list[str]:
    """Each of twelve of the words, and of some that all have."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(f"{words} the of and to it".split(), k=12)) for _ in range(number)]


def test_features_are_the_words_and_pairs_of_a_text() -> None:
    found = features("The boat. THE 船", bits=BITS)
    words = [xxhash.xxh3_64_intdigest(word.encode()) for word in ("the", "boat", ".", "the", "船")]
    pairs = [(a * 0x9FB21C651E98DF25 + b) * 0xD1342543DE82EF95 % 2**64 for a, b in itertools.pairwise(words)]
    assert found.tolist() == sorted({value >> (64 - BITS) for value in [*words, *pairs]})
    assert features("", bits=BITS).tolist() == []
    assert probability(features("", bits=BITS), np.zeros(2**BITS), 0.0) == 0.5


def test_the_fit_is_at_the_minimum_and_the_same_again() -> None:
    good = [features(text, bits=BITS) for text in texts(GOOD, 40, seed=1)]
    bad = [features(text, bits=BITS) for text in texts(BAD, 20, seed=2)]
    weights, bias = fit(good, bad, bits=BITS, penalty=PENALTY)
    # The gradient by a plain loop: good and bad count the same, whatever their numbers.
    gradient, bias_gradient = PENALTY * weights, 0.0
    for rows, label in ((good, 1), (bad, 0)):
        for row in rows:
            score = 1 / (1 + math.exp(-(weights[row].sum() / math.sqrt(len(row)) + bias)))
            assert probability(row, weights, bias) == pytest.approx(score, abs=1e-12)
            gradient[row] += 0.5 / len(rows) * (score - label) / math.sqrt(len(row))
            bias_gradient += 0.5 / len(rows) * (score - label)
    assert np.abs(gradient).max() < 1e-5
    assert abs(bias_gradient) < 1e-5
    again, bias_again = fit(good, bad, bits=BITS, penalty=PENALTY)
    assert np.array_equal(weights, again)
    assert bias == bias_again


def test_a_trained_classifier_is_a_filter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, own in (("good", texts(GOOD, 80, seed=3)), ("bad", texts(BAD, 160, seed=4))):
        lines = "".join(json.dumps({"body": text}) + "\n" for text in own)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    given = ["--good", str(tmp_path / "good.jsonl"), "--bad", str(tmp_path / "bad.jsonl"), "--text-field", "body"]
    out = tmp_path / "quality.safetensors"
    assert cli.main(["data", "train-classifier", *given, "--out", str(out), "--bits", "12", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fitted"]["good"] + found["held_out"]["good"] == 80
    assert found["held_out"]["bad"] > 5
    assert (found["accuracy"], found["auc"]) == ({"good": 1.0, "bad": 1.0}, 1.0)
    again = tmp_path / "again.safetensors"
    assert cli.main(["data", "train-classifier", *given, "--out", str(again), "--bits", "12"]) == 0
    assert "classified correctly" in capsys.readouterr().out
    assert again.read_bytes() == out.read_bytes()

    chain = compose([{"classifier": {"path": str(out)}}], None)
    assert chain is not None
    assert chain.files() == [str(out)]
    kept, dropped = (chain.judge(texts(words, 1, seed=9)[0]) for words in (GOOD, BAD))
    assert kept.rule is None
    assert (dropped.rule, dropped.score) == ("classifier.low_score", pytest.approx(0.1, abs=0.1))
    strict = compose([{"classifier": {"path": str(out), "min": 1.0}}], None)
    assert strict is not None
    assert strict.judge(texts(GOOD, 1, seed=9)[0]).rule == "classifier.low_score"
    assert cli.main(["data", "train-classifier", *given, "--out", str(out)]) != 0
    assert f"--out {out}: the file exists" in capsys.readouterr().err
    few = ["--good", str(tmp_path / "none.jsonl"), *given[2:], "--out", str(tmp_path / "x")]
    (tmp_path / "none.jsonl").write_text("")
    assert cli.main(["data", "train-classifier", *few]) != 0
    assert "--good: 0 texts to fit; at least 10 are needed" in capsys.readouterr().err

    arrays = load_file(out)
    save_file(arrays, tmp_path / "other.safetensors")
    save_file(
        {**arrays, "weights": arrays["weights"][:-1]},
        tmp_path / "odd.safetensors",
        metadata={"lightscale": json.dumps({"form": "lightscale linear classifier 1"})},
    )
    (tmp_path / "text.safetensors").write_text("no classifier")
    for name, message in (
        ("other", "not a classifier of"),
        ("odd", "do not fit a classifier"),
        ("text", "cannot read"),
        ("gone", "cannot read"),
    ):
        broken = compose([{"classifier": {"path": str(tmp_path / f"{name}.safetensors")}}], None)
        assert broken is not None
        with pytest.raises(UserError, match=f"{name}.safetensors: .*{message}"):
            broken.files()
