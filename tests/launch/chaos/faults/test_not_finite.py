"""NaNs are put where they belong, and are seen in the files of checkpoints."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightscale.launch.chaos.faults.flipped_memory import Flip
from lightscale.launch.chaos.faults.memory import GRADIENT, PLACES, not_named, order_file, went_back
from lightscale.launch.chaos.faults.not_finite import NaN, not_finite
from lightscale.launch.chaos.poisoned_training import poison
from lightscale.parallel.shards import Box, TensorShard
from lightscale.training.checkpoints.tensor_file import write_tensors
from lightscale.training.health.fault_injection import VARIABLE


def box(key: str, size: int) -> Box:
    return Box(key=key, shape=(size,), offset=(0,), sizes=(size,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_checkpoint_that_is_not_finite_is_seen(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    for step in (5, 10):
        tensors = [torch.linspace(-1, 1, 7, dtype=dtype), torch.full((3,), torch.finfo(dtype).max, dtype=dtype)]
        directory = tmp_path / f"step-{step:08d}"
        directory.mkdir()
        if step == 10:
            assert not_finite(tmp_path) == []
            tensors[1][2] = value
        write(directory / "rank-00000.safetensors", tensors)
    assert not_finite(tmp_path) == ["step-00000010/rank-00000.safetensors: exp_avg.b"]
    # One that was put aside was published too; one that is being written was not.
    directory = (tmp_path / "step-00000010").rename(tmp_path / "step-00000010.bad")
    assert len(not_finite(tmp_path)) == 1
    directory.rename(tmp_path / "step-00000010.tmp")
    assert not_finite(tmp_path) == []


def write(path: Path, tensors: list[torch.Tensor]) -> None:
    boxes = [box("model.a", 7), box("exp_avg.b", 3)]
    write_tensors(path, [TensorShard(box=box, data=data) for box, data in zip(boxes, tensors, strict=True)])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("second_moment", ["exp_avg_sq.w", None])
def test_one_element_of_the_place_is_poisoned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, second_moment: str | None
) -> None:
    """Also with an optimizer that has one moment, as Lion."""
    keys = [key for key in ("model.w", "exp_avg.w", second_moment, "model.v") if key is not None]
    shards = [SimpleNamespace(box=SimpleNamespace(key=key), data=torch.zeros(2, 3)) for key in keys]
    model = torch.nn.ModuleDict({"embedding": torch.nn.Linear(2, 2), "block": torch.nn.Linear(2, 2)})
    engine: Any = SimpleNamespace(owned_shards=lambda: shards, chunks=[model])
    monkeypatch.setenv(VARIABLE, f"@{tmp_path}")
    monkeypatch.setenv("RANK", "1")
    poison(engine)

    def poisoned() -> list[str]:
        named = {one.box.key: one.data for one in shards} | dict(model.named_parameters())
        return [name for name, tensor in named.items() if tensor.isnan().any()]

    assert poisoned() == [], "there is no order"
    order = NaN(place=place, rank=1, tensor=5, element=9, steps=0)
    file = order_file(tmp_path, 1)
    file.write_text(json.dumps(asdict(order)))
    poison(engine)
    expected = {
        "weight": "model.v",
        "first moment": "exp_avg.w",
        "second moment": second_moment or "exp_avg.w",
        "copy of a weight": "block.bias",
    }
    assert poisoned() == [expected[place]]
    assert not file.exists()
    assert sum(int(one.data.isnan().sum()) for one in shards) == (place != "copy of a weight")


def test_a_gradient_is_hit_after_the_backward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.main_grad = torch.ones(parameter.shape)  # type: ignore[attr-defined]
    engine: Any = SimpleNamespace(chunks=[model], owned_shards=list)
    monkeypatch.setenv(VARIABLE, f"@{tmp_path}")
    monkeypatch.setenv("RANK", "1")
    order = Flip(place=GRADIENT, rank=1, tensor=2, element=7, bit=62, steps=0)
    file = order_file(tmp_path, 1)
    file.write_text(json.dumps(asdict(order)))
    poison(engine)
    assert file.exists() and bool((model.weight.main_grad == 1).all())  # type: ignore[union-attr]
    poison(engine, after_backward=True)
    # The second highest bit of 1.0 is not set: with it, 1.0 becomes infinity.
    assert model.weight.main_grad.tolist() == [[1, 1], [1, float("inf")]]  # type: ignore[union-attr, operator]
    assert not file.exists() and model.bias.main_grad.tolist() == [1, 1]  # type: ignore[union-attr, operator]


def test_who_must_be_named() -> None:
    stop = {"event": "silent_corruption", "ranks": [0, 2]}
    assert not_named(2, [{"event": "start"}, stop]) is None
    assert not_named(1, [stop]) == "ranks [0, 2] were named, not 1"
    assert not_named(1, [{"event": "rollback"}]) == "the run did not go back"


def test_what_counts_as_going_back() -> None:
    assert went_back([{"event": "rollback"}]) and went_back([{"event": "silent_corruption"}])
    assert not went_back([{"event": "step_skipped"}, {"event": "state_not_finite"}])
