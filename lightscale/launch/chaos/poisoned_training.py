"""The command `lightscale`, with ranks that set their numbers to NaN, flip a bit of one, or compute wrong, on order.

Only `lightscale chaos` starts it, as `python -m lightscale.launch.chaos.poisoned_training train …`. Memory and units
of arithmetic fail without a trace in the program, so the training has no code for it: this module changes its engine in
the launcher, whose forks are the ranks, or in each rank that is a new process.
"""

import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightscale.launch.chaos.faults.memory import GRADIENT, order_file
from lightscale.launch.chaos.faults.wrong_rank import wrong_file
from lightscale.launch.commands import train
from lightscale.parallel.engine import Engine
from lightscale.training.checkpoints.directories import WEIGHTS_PREFIX
from lightscale.training.health.fault_injection import VARIABLE

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRODUCTS = tuple(getattr(torch.ops.aten, name) for name in ("mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_"))
# By the place in an order, what begins the keys of the shards that it may hit.
_PREFIXES = {"weight": WEIGHTS_PREFIX, "first moment": "exp_avg.", "second moment": "exp_avg_sq."}


def poison(engine: Engine, *, after_backward: bool = False) -> None:
    """Carry out the order of this rank, if any: before the forward pass, or on gradients after the backward pass."""
    file = order_file(_folder(), _rank())
    order = _read(file)
    if order is None or (order["place"] == GRADIENT) != after_backward:
        return
    tensors = _tensors(engine, order["place"])
    tensor = tensors[order["tensor"] % len(tensors)].view(-1)
    index = order["element"] % len(tensor)
    if "bit" in order:
        words = tensor.view(_INTEGERS[tensor.element_size()])
        bits = 8 * tensor.element_size()
        bit = order["bit"] % bits
        # The highest one is the sign of an integer.
        words[index] ^= -(1 << bit) if bit == bits - 1 else 1 << bit
    else:
        tensor[index] = float("nan")
    # The harness takes it for done.
    file.unlink()


def _folder() -> Path:
    return Path(os.environ[VARIABLE].removeprefix("@"))


def _rank() -> int:
    return int(os.environ["RANK"])


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


class WrongProducts(TorchDispatchMode):
    """Every product of matrices of this process is too large by ``error`` of itself, in forward and backward passes."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self._factor = 1.0 + error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.mul_(self._factor) if func.overloadpacket in _PRODUCTS else found


def _tensors(engine: Engine, place: str) -> list[Tensor]:
    if place in _PREFIXES:
        shards = [one for one in engine.owned_shards() if one.data.numel()]
        found = [one.data for one in shards if one.box.key.startswith(_PREFIXES[place])]
        # Optimizers without a second moment, such as Lion, have other state.
        return found or [one.data for one in shards if not one.box.key.startswith(WEIGHTS_PREFIX)]
    if place == GRADIENT:
        held = [one for chunk in engine.chunks for one in chunk.parameters() if one.requires_grad]
        return [one.main_grad for one in held]  # type: ignore[attr-defined]
    # What this rank computes with, of which others may be the owners. Rows of tokens that do not come would be
    # overwritten by their owners before anybody notices, rightly.
    named = [pair for chunk in engine.chunks for pair in chunk.named_parameters()]
    return [parameter.data for name, parameter in named if "embedding" not in name]


def _poison_every_step() -> None:
    forward_backward = Engine.forward_backward

    def poisoned(self: Engine, batches: Sequence[Any], **how: Any) -> Any:
        poison(self)
        order = _read(wrong_file(_folder(), _rank()))
        with nullcontext() if order is None else WrongProducts(order["error"]):
            return forward_backward(self, batches, **how)

    def after(reduction: Callable[..., None]) -> Callable[..., None]:
        def poisoned(self: Engine, *arguments: Any, **kwargs: Any) -> None:
            poison(self, after_backward=True)
            reduction(self, *arguments, **kwargs)

        return poisoned

    Engine.forward_backward = poisoned  # type: ignore[method-assign]
    # What comes first after the backward passes: the reduction, or its postponement.
    for name in ("_finalize_gradients", "_keep_reduction"):
        setattr(Engine, name, after(getattr(Engine, name)))
    # Ranks that are no forks.
    train._COMMAND[:] = [sys.executable, "-m", __spec__.name, "train"]


if __name__ == "__main__":
    _poison_every_step()
    # By name: the command line knows all packages, and none knows it.
    runpy.run_module("lightscale", run_name="__main__", alter_sys=True)
