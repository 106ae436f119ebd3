"""``lightscale coordinate-check``: exponents, their verdict, and that µP is flat for every mixer; the rest is not."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from lightscale.cli import main
from lightscale.config.mixers import known_mixers, reading
from lightscale.training.coordinates.slopes import CHANGE, LOGITS, SIZE, exponent, slopes

BOTH_WAYS = set(reading("bidirectional")) - set(reading("causal"))
SHAPE = """
[model]
mixer = "{mixer}"
num_layers = 2
hidden_size = 64
num_heads = 4
intermediate_size = 128
vocab_size = 128
[task]
name = "{task}"
[data]
store = "unread"
sequence_length = 64
[optimizer]
lr = 1e-3
[train]
steps = 1
global_batch_size = 1
device = "cpu"
"""


def config_of(folder: Path, mixer: str) -> str:
    path = folder / f"{mixer}.toml"
    path.write_text(SHAPE.format(mixer=mixer, task="masked" if mixer in BOTH_WAYS else "causal"))
    return str(path)


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["coordinate-check", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_exponents_are_those_of_power_laws() -> None:
    widths = [64, 128, 256, 512]
    assert exponent(widths, [3 * width**-0.7 for width in widths]) == pytest.approx(-0.7)
    assert exponent(widths, [1.0, 0.0, 1.0, 1.0]) == exponent(widths, [1.0, math.nan, 1.0, 1.0]) == math.inf


def test_sizes_at_the_start_and_changes_at_the_end_are_judged() -> None:
    keys = [
        ("layer 0", SIZE, 0),
        (LOGITS, SIZE, 0),
        ("layer 0", CHANGE, 1),
        ("layer 0", CHANGE, 2),
        (LOGITS, CHANGE, 2),
    ]
    growing = [dict.fromkeys(keys, size) for size in (1.0, 2.0)]
    found = {(one.activation, one.kind, one.step): one for one in slopes([10, 20], growing)}
    judged = {key for key, one in found.items() if one.is_judged}
    assert judged == {("layer 0", SIZE, 0), ("layer 0", CHANGE, 2), (LOGITS, CHANGE, 2)}
    assert all(one.slope == pytest.approx(1) and not one.is_flat for one in found.values())


def test_mup_is_flat_and_the_rest_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = [config_of(tmp_path, "tnl"), "--widths", "64", "256", "--steps", "3", "--seeds", "1"]
    code, flat = checked(capsys, *own, "model.mup.base_hidden_size=64", "--plot", str(tmp_path / "flat.png"))
    assert (code, flat["is_flat"]) == (0, True)
    assert {one["activation"] for one in flat["activations"]} >= {"embedding", "layer 1 mixer", "layer 1", LOGITS}
    assert (tmp_path / "flat.png").stat().st_size > 10_000
    code, steep = checked(capsys, *own)
    assert (code, steep["is_flat"]) == (1, False)
    judged = [one for one in steep["activations"] if one["is_judged"] and one["activation"].startswith("layer")]
    assert min(one["slope"] for one in judged) > 0.2, "without µP, all that blocks compute grows with the width"
    # With the same scaling, but so far from the initial weights that narrow models differ for another reason.
    assert main(["coordinate-check", *own, "model.mup.base_hidden_size=64", "optimizer.lr=1e-2"]) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        r"the output of layer . .* changes by \d+\.\d times its size: .* optimizer.lr=0.005 or less", said
    )


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mixer", known_mixers())
def test_every_mixer_is_flat_over_four_widths(mixer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = [config_of(tmp_path, mixer), "model.mup.base_hidden_size=64", "--widths", "64", "128", "256", "512"]
    code, found = checked(capsys, *own)
    steep = {
        (one["activation"], one["kind"]): one["slope"]
        for one in found["activations"]
        if one["is_judged"] and not one["is_flat"]
    }
    assert (code, steep) == (0, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--widths", "64", "72"], "--widths 72: must be a multiple of 16, the width of a head"),
        (["--widths", "128", "64"], "must be 2 or more, ascending"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--plot", "x.txt"], "a picture has the suffix"),
        (["model.head.num_labels=3", "task.name=classify", "data.packing=whole"], "predict ids"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["coordinate-check", config_of(tmp_path, "tnl"), *arguments]) == 78
    assert message in capsys.readouterr().err
