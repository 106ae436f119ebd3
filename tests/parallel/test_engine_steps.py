"""A step in its two parts, the norm and its application: as Megatron's own, and without a trace when it is skipped."""

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from lightscale.parallel import weight_gradients
from lightscale.parallel.engine import Engine
from lightscale.training.build import start_again

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "tiny_engine.py")))

Axes = tuple[int, ...]  # processes, tensor, pipeline, sequence, and virtual stages if any; data is the rest
AXES: list[Axes] = [(2, 1, 1, 2), (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 1), (2, 1, 2, 1, 2)]
RunRanks = Callable[..., list[Any]]


def megatron_step(engine: Engine, lr: float) -> float:
    """Megatron's step in one go, with the engine's norm in place of Megatron's, which is summed in fp32."""
    optimizer: Any = engine.optimizer
    norm = engine.gradient_norm()
    for group in optimizer.megatron.param_groups:
        group["lr"], group["weight_decay"] = lr, optimizer.spec.weight_decay * group["wd_mult"]
    with mock.patch.object(optimizer.megatron, "get_grad_norm", return_value=norm):
        return float(optimizer.megatron.step()[1])


def good_step(
    engine: Engine, number: int, apply: Callable[[Engine, float], float] = Engine.step
) -> tuple[float, float]:
    loss = engine.forward_backward(tiny.step_batches(number, engine.mesh)).mean
    return loss, apply(engine, tiny.LR)


def bad_step(engine: Engine, *, loss: bool, rank: int) -> tuple[float, float]:
    """NaN on ``rank`` alone, in its losses or in the gradients of its linear weights; nothing is applied."""

    def poison(engine: Engine, batch: Any, losses: Tensor) -> Any:
        return original(engine, batch, losses * math.nan)

    def accumulate(x: Tensor, gradient: Tensor, total: Tensor) -> None:
        weight_gradients.accumulate(x, gradient * math.nan, total)

    original = Engine._sum_losses
    if engine.mesh.rank != rank:
        sums = engine.forward_backward(tiny.step_batches(9, engine.mesh))
    elif loss and engine.mesh.is_last_stage:
        with mock.patch.object(Engine, "_sum_losses", poison):
            sums = engine.forward_backward(tiny.step_batches(9, engine.mesh))
    else:
        with mock.patch.object(weight_gradients.PRODUCTS, "wgrad_gemm_accum_fp32", accumulate):
            sums = engine.forward_backward(tiny.step_batches(9, engine.mesh))
    return sums.mean, engine.gradient_norm()


def steps(rank: int, world_size: int, init_method: str, layouts: list[Axes], mixer: str) -> dict[Axes, dict[str, Any]]:
    found = {}
    for axes in layouts:
        with tiny.engine_on(axes, rank, f"{init_method}-{axes}-whole", mixer=mixer) as engine:
            expected = [good_step(engine, number, megatron_step) for number in range(4)]
            state = tiny.own_state(engine)
        with tiny.engine_on(axes, rank, f"{init_method}-{axes}", mixer=mixer) as engine:
            first = tiny.own_state(engine)
            numbers = [good_step(engine, number) for number in range(2)]
            before, bad = tiny.own_state(engine), []
            for bad_rank in range(world_size):
                bad += [bad_step(engine, loss=loss, rank=bad_rank) for loss in (True, False)]
            changed = tiny.differing(before, tiny.own_state(engine))
            numbers += [good_step(engine, number) for number in (2, 3)]
            found[axes] = {
                "numbers": numbers == expected,
                "weights": tiny.differing(state, tiny.own_state(engine)),
                "bad": bad,
                "changed": changed,
            }
            start_again(engine, seed=0)
            # The groups' constants are set with every step.
            again = tiny.differing(first, tiny.own_state(engine))
            found[axes]["again"] = [line for line in again if " group " not in line]
            found[axes]["repeated"] = [good_step(engine, number) for number in range(4)] == expected
    return found


@pytest.mark.parametrize("mixer", ["tnl", pytest.param("hgrn2", marks=pytest.mark.long)])
def test_steps_in_two_parts_and_skipped_steps(run_ranks: RunRanks, mixer: str) -> None:
    ranks = run_ranks(steps, 2, AXES, mixer, timeout_s=200)
    for axes in AXES:
        results = [found[axes] for found in ranks]
        for result in results:
            assert (result["numbers"], result["weights"]) == (True, []), axes
            assert result["changed"] == [], f"{axes}: a skipped step changed something"
            assert (result["again"], result["repeated"]) == ([], True), axes
            assert len(result["bad"]) == 4
            for loss, norm in result["bad"]:
                assert math.isnan(norm), axes
                assert math.isnan(loss) or loss > 0, axes
            assert any(math.isnan(loss) for loss, _ in result["bad"]) and any(loss > 0 for loss, _ in result["bad"])
        assert repr(results[0]["bad"]) == repr(results[1]["bad"]), f"{axes}: ranks would judge differently"


def split_norm(rank: int, world_size: int, init_method: str) -> float:
    """Megatron reports what is not finite by itself where losses are scaled."""
    with tiny.engine_on((1, 1, 1, 1), rank, init_method) as engine:
        engine.forward_backward(tiny.step_batches(0, engine.mesh))
        with mock.patch.object(engine.optimizer.megatron, "prepare_grads", return_value=True):
            return engine.gradient_norm()


def test_what_megatron_finds_not_finite_is_infinite(run_ranks: RunRanks) -> None:
    assert run_ranks(split_norm, 1) == [math.inf]
