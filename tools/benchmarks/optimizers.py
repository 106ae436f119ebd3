"""Steps of every optimizer on one thread of a CPU, and the bytes of their state.

One engine for each optimizer has the same model and gradients. A step is the norm of the gradients, clipping and the
update; the optimizers take turns. The bytes are counted in the engine, beside those that `lightscale plan` expects.

What moments in bf16 change: two engines of each optimizer that has them learn one batch, from the same weights. The
distance of their weights is shown as a share of the way that those with fp32 moments have come.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.cpu_training import Shape
from benchmarks.train import random_batches
from benchmarks.turns import BenchmarkReport, Ways, positive, time_in_turns
from lightscale.config.optimizers import DEFAULT, OPTIMIZERS, optimizer_class
from lightscale.config.schema import RunConfig
from lightscale.models.accounting import rank_parameters_by_name
from lightscale.parallel.engine import Engine
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.training.build import build_engine
from lightscale.training.optimizer.registry import optimizer_spec

_TOKENS = 64
# Lion moves every weight by the whole rate.
_MOMENTS_LR = {"lion": 1e-4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model."""
    parser.add_argument(
        "--moments-steps", type=positive, default=100, help="steps with moments in fp32 and bf16 (default: %(default)s)"
    )
    parser.add_argument("--size", default="3M", help="file of configs/size (default: %(default)s)")


def run(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """Seconds and bytes of every optimizer."""
    config = Shape(size=args.size, length=_TOKENS).config("tnl")
    engines, planned = {}, {}
    with (
        tempfile.TemporaryDirectory() as folder,
        start_mesh(device="cpu", init_method=f"file://{folder}/store") as mesh,
    ):
        for name in OPTIMIZERS:
            own = config.model_copy(update={"optimizer": optimizer_class(name).options(lr=1e-4)})
            engine = build_engine(own, mesh, vocab_size=config.model.vocab_size, trainable=True)
            engine.forward_backward(random_batches(own, mesh.device))
            (held,) = rank_parameters_by_name(own.model, tensor=1, pipeline=1)
            spec, elements = optimizer_spec(own), sum(held.values())
            engines[name] = engine
            state = sum(spec.state_bytes(one) * count + spec.whole_bytes(one) for one, count in held.items())
            planned[name] = state / elements
        ways: Ways = {name: {"step": partial(engine.step, 1e-4)} for name, engine in engines.items()}
        samples_s = time_in_turns(ways, args.repeats, clock=time.process_time)
        lines = [
            {
                "optimizer": name,
                "step_cpu_s": statistics.median(samples_s[name]["step"]),
                "ns_per_parameter": 1e9 * statistics.median(samples_s[name]["step"]) / _elements(engine),
                "state_bytes_per_parameter": _state_bytes(engine) / _elements(engine),
                "planned_bytes_per_parameter": planned[name],
                "samples_s": samples_s[name]["step"],
            }
            for name, engine in engines.items()
        ]
        figures: dict[str, Any] = {"parameters": _elements(engines[DEFAULT]), "lines": lines}
        figures["moments"] = [
            _moments(config, name, mesh, args.moments_steps)
            for name in OPTIMIZERS
            if "moments_dtype" in optimizer_class(name).options.model_fields
        ]
    settings = {"size": args.size, "repeats": args.repeats, "moments_steps": args.moments_steps}
    yield BenchmarkReport(settings=settings, figures=figures, table=table(figures))


def _moments(config: RunConfig, name: str, mesh: Mesh, steps: int) -> dict[str, Any]:
    """Losses behind ``steps`` on one batch, and the distance of the weights."""
    lr = _MOMENTS_LR.get(name, 1e-3)
    start, ends, losses = Tensor(), [], []
    for dtype in ("fp32", "bf16"):
        options = optimizer_class(name).options(lr=lr, moments_dtype=dtype)
        own = config.model_copy(update={"optimizer": options})
        engine = build_engine(own, mesh, vocab_size=config.model.vocab_size, trainable=True)
        batches = random_batches(own, mesh.device)
        start = _weights(engine)
        for _ in range(steps):
            engine.forward_backward(batches)
            engine.step(lr)
        ends.append(_weights(engine))
        losses.append(engine.forward_only(batches).mean)
    way = (ends[0] - start).norm()
    return {"optimizer": name, "lr": lr, "losses": losses, "distance": float((ends[1] - ends[0]).norm() / way)}


def _weights(engine: Engine) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in engine.module.parameters()])


def table(figures: dict[str, Any]) -> Table:
    """A line for each optimizer."""
    made = Table(caption=f"{figures['parameters']:,} parameters in fp32, state without main weights")
    for heading in ("optimizer", "step, CPU ms", "ns / parameter", "bytes / parameter", "planned"):
        made.add_column(heading, justify="left" if heading == "optimizer" else "right")
    for line in figures["lines"]:
        made.add_row(
            line["optimizer"],
            f"{1e3 * line['step_cpu_s']:.2f}",
            f"{line['ns_per_parameter']:.2f}",
            f"{line['state_bytes_per_parameter']:.3g}",
            f"{line['planned_bytes_per_parameter']:.3g}",
        )
    lines = [
        f"{one['optimizer']} with moments in fp32 and bf16: losses {one['losses'][0]:.4f} and {one['losses'][1]:.4f}, "
        f"weights {one['distance']:.2%} of their way apart"
        for one in figures["moments"]
    ]
    made.caption = "\n".join([str(made.caption), *lines])
    return made


def _elements(engine: Engine) -> int:
    return sum(parameter.numel() for parameter in engine.module.parameters())


def _state_bytes(engine: Engine) -> int:
    """Held by the engine's one rank."""
    assert engine.optimizer is not None, "it is trained"
    states = [(parameter, engine.optimizer.owned(parameter)) for parameter in engine.module.parameters()]
    own = sum(state.bytes_beside(parameter) for parameter, state in states if state is not None)
    return own + sum(shard.data.nbytes for shard in engine.optimizer.whole_shards())
