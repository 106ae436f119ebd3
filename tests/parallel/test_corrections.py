"""Each correction of Megatron: the fault shows without it, and does not with it.

Should one of these tests fail after an upgrade because the fault is gone, the correction can go too.
"""

import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from lightscale.parallel import engine as engine_module
from lightscale.training.checkpoint import Checkpoints, directory_name

TINY = Path(__file__).parent.parent / "training" / "tiny_engine.py"
tiny = SimpleNamespace(**runpy.run_path(str(TINY)))

RunRanks = Callable[..., list[Any]]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def without(method: str) -> Iterator[None]:
    """The distributed optimizer with Megatron's own ``method``."""
    with replaced(DistributedOptimizer, method, getattr(DistributedOptimizer, method).__wrapped__):
        yield


def steps(engine: Any) -> list[float]:
    """The counters of AdamW, one of each parameter."""
    (part,) = engine.optimizer.chained_optimizers
    return [float(state["step"]) for state in part.optimizer.state.values()]


def refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever Megatron raises
        return repr(error)
    return "none"


def load(rank: int, world_size: int, init_method: str, folder: str) -> dict[str, Any]:
    """Save after two steps, then load with all corrections and without each."""
    found: dict[str, Any] = {}
    one = (1, 1, 1, 1)
    with tiny.engine_on(one, rank, f"{init_method}-1") as engine:
        checkpoints = Checkpoints(Path(folder), engine.mesh)
        tiny.train(engine, 0, 2)
        checkpoints.save(engine, step=2, common={}, facts={})
        tiny.train(engine, 2, 3)

        checkpoints.restore(engine)
        found["with all"] = steps(engine)
        tiny.train(engine, 2, 3)
        found["a step later"] = steps(engine)

        with without("_set_main_param_and_optimizer_states"):
            found["without _keep_step"] = refusal(lambda: checkpoints.restore(engine))
        with without("load_state_dict"):
            checkpoints.restore(engine)
            found["without _own_step"] = steps(engine)
            tiny.train(engine, 2, 3)
            found["without _own_step, a step later"] = steps(engine)
    uncreated = replaced(engine_module, "create_optimizer_states", lambda optimizer: None)
    with uncreated, tiny.engine_on(one, rank, f"{init_method}-2") as engine:
        found["without states"] = refusal(lambda: Checkpoints(Path(folder), engine.mesh).restore(engine))
    with tiny.engine_on(one, rank, f"{init_method}-3") as engine:
        found["with states"] = refusal(lambda: Checkpoints(Path(folder), engine.mesh).restore(engine))
    return found


def test_loading_adam(run_ranks: RunRanks, tmp_path: Path) -> None:
    (found,) = run_ranks(load, 1, str(tmp_path))
    num_parameters = len(found["with all"])
    assert num_parameters > 10
    assert found["with all"] == [2.0] * num_parameters
    assert found["a step later"] == [3.0] * num_parameters
    assert found["without _keep_step"] == "KeyError('step')"
    # One counter for all, which every parameter moves on.
    assert found["without _own_step"] == [2.0] * num_parameters
    assert found["without _own_step, a step later"] == [2.0 + num_parameters] * num_parameters
    # Megatron asserts that all states have the same counter, and there is none.
    assert found["without states"] == "AssertionError()"
    assert found["with states"] == "none"


def save(rank: int, world_size: int, init_method: str, folder: str) -> dict[str, list[str]]:
    """Parameters whose fp32 copy in the optimizer's part of a checkpoint is not the weight, by name."""
    found = {}
    for corrected in (True, False):
        correction = engine_module.count_padding if corrected else lambda model: None
        path = Path(folder) / str(corrected)
        counting = replaced(engine_module, "count_padding", correction)
        with counting, tiny.engine_on((2, 1, 2, 1), rank, f"{init_method}-{corrected}") as engine:
            padding = [
                buffer.numel - sum(p.numel() for p in buffer.params)
                for model in engine.models
                for buffer in model.buffers
            ]
            assert rank != 0 or padding[0] > 0, "these sizes show nothing"
            tiny.train(engine, 0, 1)
            Checkpoints(path, engine.mesh).save(engine, step=1, common={}, facts={})
            stored = dist_checkpointing.load_plain_tensors(str(path / directory_name(1)))
        copies = {name: tensor for name, tensor in stored.items() if name.startswith("optimizer.state.param.")}
        found["with" if corrected else "without"] = sorted(
            name.removeprefix("optimizer.state.param.")
            for name, tensor in copies.items()
            if not torch.equal(tensor, stored[name.removeprefix("optimizer.state.param.")])
        )
        assert len(copies) == 30
    return found


def test_padding_between_buckets(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Pipeline stages keep the tied embedding in a bucket of its own, after the padding of another."""
    for found in run_ranks(save, 2, str(tmp_path)):
        assert found["with"] == []
        assert found["without"] == ["embedding.word_embeddings.weight"]
