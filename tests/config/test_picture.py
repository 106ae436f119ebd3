"""The picture of what a configuration plans shows what a run does."""

from pathlib import Path

import numpy as np
import pytest

from lightscale.cli import main
from lightscale.config.commands.picture import planned_rates, planned_shapes
from lightscale.config.files import load
from lightscale.config.schedules.registry import learning_rate
from lightscale.data_pipeline.loading.curriculum import Curriculum

WSD = ["optimizer.schedule=wsd", "optimizer.warmup_steps=777", "optimizer.decay_steps=1234", "train.steps=5000"]
CURRICULUM = "data.curriculum=[{sequence_length=64,until_tokens=9000},{sequence_length=256,until_tokens=50000}]"
RAMP = "train.rampup_batch_size=[{global_batch_size=1,until_tokens=3000},{global_batch_size=2,until_tokens=20000}]"


def test_rates_of_a_long_run_have_the_ends_of_its_phases() -> None:
    config = load("tnl-tiny", WSD)
    steps, rates = planned_rates(config)
    assert len(steps) < 1010 and {1, 777, 778, 3766, 3767, 5000} <= set(steps.tolist())
    assert rates.tolist() == [learning_rate(config.optimizer, step, 5000) for step in steps.tolist()]
    # Between two points the rate is a line: the picture leaves no corner out.
    whole = [learning_rate(config.optimizer, step, 5000) for step in range(1, 5001)]
    assert np.interp(np.arange(1, 5001), steps, rates) == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("ramp", [[], [RAMP]], ids=["", "ramp"])
@pytest.mark.parametrize("steps", [1, 3, 13, 50])
def test_shapes_are_those_of_the_loader(steps: int, ramp: list[str]) -> None:
    config = load("tnl-tiny", [CURRICULUM, *ramp, f"train.steps={steps}", "optimizer.schedule=constant"])
    length, sizes = config.data.sequence_length, config.step_tokens
    curriculum = Curriculum(config.data.curriculum, sequence_length=length, step_tokens=sizes, micro_batch_size=1)
    shapes = []
    for tokens in map(sizes.after, range(steps)):
        stage = curriculum.stages[curriculum.number_at(tokens)]
        shapes.append((stage.sequence_length, sizes.of_next(tokens) // stage.sequence_length))
    starts = [step for step in range(steps) if step == 0 or shapes[step] != shapes[step - 1]]
    assert planned_shapes(config) == [(step + 1, *shapes[step]) for step in starts]


def test_the_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    path = tmp_path / "plan.png"
    assert main(["config", "tnl-tiny", *WSD, CURRICULUM, "train.branch_from=runs/a@3766", "--plot", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("name", "message"), [("plan.jpg", "has the suffix .png, .svg, .pdf"), ("none/plan.png", "create it first")]
)
def test_a_picture_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    assert main(["config", "tnl-tiny", "--plot", str(tmp_path / name)]) == 78
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
