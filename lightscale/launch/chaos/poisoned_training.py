"""The command `lightscale`, with ranks that set their numbers to NaN, or flip a bit of one, on order.

Only `lightscale chaos` starts it, as `python -m lightscale.launch.chaos.poisoned_training train …`. Memory fails
without a trace in the program, so the training has no code for it: this module changes its engine in the launcher,
whose forks are the ranks, or in each rank that is a new process.
"""

import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightscale.launch.chaos.faults.memory import order_file
from lightscale.launch.commands import train
from lightscale.parallel.engine import Engine
from lightscale.training.checkpoints.directories import WEIGHTS_PREFIX
from lightscale.training.health.fault_injection import VARIABLE

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# By the place in an order, what begins the keys of the shards that it may hit.
_PREFIXES = {"weight": WEIGHTS_PREFIX, "first moment": "exp_avg.", "second moment": "exp_avg_sq."}


def poison(engine: Engine) -> None:
    """Carry out the order of this rank, if any."""
    file = order_file(Path(os.environ[VARIABLE].removeprefix("@")), int(os.environ["RANK"]))
    try:
        order = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
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


def _tensors(engine: Engine, place: str) -> list[Tensor]:
    if place in _PREFIXES:
        shards = engine.owned_shards()
        return [one.data for one in shards if one.box.key.startswith(_PREFIXES[place]) and one.data.numel()]
    # What this rank computes with, of which others may be the owners. Rows of tokens that do not come would be
    # overwritten by their owners before anybody notices, rightly.
    named = [pair for chunk in engine.chunks for pair in chunk.named_parameters()]
    return [parameter.data for name, parameter in named if "embedding" not in name]


def _poison_every_step() -> None:
    forward_backward = Engine.forward_backward

    def poisoned(self: Engine, batches: Sequence[Any], **how: Any) -> Any:
        poison(self)
        return forward_backward(self, batches, **how)

    Engine.forward_backward = poisoned  # type: ignore[method-assign]
    # Ranks that are no forks.
    train._COMMAND[:] = [sys.executable, "-m", __spec__.name, "train"]


if __name__ == "__main__":
    _poison_every_step()
    # By name: the command line knows all packages, and none knows it.
    runpy.run_module("lightscale", run_name="__main__", alter_sys=True)
