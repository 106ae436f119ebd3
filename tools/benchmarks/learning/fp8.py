"""What products in 8 bits cost in the loss: one model trained with and without ``train.fp8``, on the same tokens.

All runs are in bf16; those of a seed begin with the same weights and read the same tokens. The control is a second run
without fp8 that begins with one weight changed by one unit in its last place: what it differs by is no effect of fp8.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.table import Table

from benchmarks.learning.mup import HEAD_DIM, LAYERS, NUM_IDS, ROWS, TOKENS, Source
from benchmarks.turns import BenchmarkReport, positive
from lightscale.config.schedules.registry import learning_rate
from lightscale.config.schema import RunConfig
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.training.build import build_engine

WAYS = ("bf16", "control", "fp8")
MEAN_OF = 20
"""Steps at the end whose training loss is averaged."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Mixer, width, rate and steps."""
    add = parser.add_argument
    add("--mixer", default="tnl", help="default tnl")
    add("--width", type=positive, default=128, help="hidden size (default 128)")
    add("--rate", type=float, default=4e-3, help="learning rate (default 4e-3)")
    add("--steps", type=positive, default=300, help="default 300")


def run(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """The report so far after every run."""
    settings = {name: getattr(args, name) for name in ("mixer", "width", "rate", "steps", "repeats")}
    lines: list[dict[str, Any]] = []
    for seed in range(args.repeats):
        for way in WAYS:
            # Of each run: an engine lives as long as its mesh.
            with start_mesh(device="cpu") as mesh:
                lines.append({"way": way, "seed": seed, **trained(config_of(args, way, seed), way, mesh)})
            print(f"{way} seed {seed}: {lines[-1]['held_out']:.4f}", file=sys.stderr, flush=True)
            figures = {"lines": lines.copy(), "apart": apart(lines)}
            yield BenchmarkReport(settings=settings, figures=figures, table=table(figures))


def config_of(args: argparse.Namespace, way: str, seed: int) -> RunConfig:
    """The run of one way and seed."""
    return RunConfig.model_validate(
        {
            "model": {
                "mixer": args.mixer,
                "num_layers": LAYERS,
                "hidden_size": args.width,
                "num_heads": args.width // HEAD_DIM,
                "intermediate_size": 2 * args.width,
                "vocab_size": NUM_IDS,
            },
            "data": {"store": "drawn", "sequence_length": TOKENS},
            "optimizer": {
                "lr": args.rate,
                "schedule": "linear",
                "warmup_steps": args.steps // 10,
                "min_lr_ratio": 0.0,
            },
            "train": {
                "steps": args.steps,
                "global_batch_size": ROWS,
                "micro_batch_size": ROWS,
                "seed": seed,
                "precision": "bf16",
                "fp8": "current" if way == "fp8" else "none",
            },
        }
    )


def trained(config: RunConfig, way: str, mesh: Mesh) -> dict[str, Any]:
    """Losses, nats per token: of the last steps, and on other tokens after the run, which are read in bf16."""
    source, seed = Source.drawn(0), config.train.seed
    engine = build_engine(config, mesh, vocab_size=NUM_IDS, trainable=True)
    if way == "control":
        first = next(weight for weight in engine.module.parameters() if weight.dtype == torch.bfloat16)
        with torch.no_grad():
            first.view(torch.int16).view(-1)[0] += 1
        engine.take_weights()
    losses, begun = [], time.process_time()
    for step in range(1, config.total_steps + 1):
        losses.append(engine.forward_backward([source.batch(ROWS, 1_000_000 * (seed + 1) + step)]).mean)
        engine.step(learning_rate(config.optimizer, step, config.total_steps))
    return {
        "held_out": engine.forward_only([source.batch(8 * ROWS, 0)]).mean,
        "last": statistics.fmean(losses[-MEAN_OF:]),
        "every_tenth": losses[9::10],
        "cpu_s": time.process_time() - begun,
    }


def apart(lines: list[dict[str, Any]]) -> dict[str, list[float]]:
    """By way, the held-out loss less that of bf16, of each seed."""
    plain = {line["seed"]: line["held_out"] for line in lines if line["way"] == "bf16"}
    found: dict[str, list[float]] = {}
    for line in lines:
        if line["way"] != "bf16":
            found.setdefault(line["way"], []).append(line["held_out"] - plain[line["seed"]])
    return found


def table(figures: dict[str, Any]) -> Table:
    """Losses of each run."""
    shown = Table("run", "seed", "held-out loss", "last steps", "CPU s")
    for line in figures["lines"]:
        numbers = (f"{line[name]:.4f}" for name in ("held_out", "last"))
        shown.add_row(line["way"], str(line["seed"]), *numbers, f"{line['cpu_s']:.0f}")
    differences = (
        f"{way}: {', '.join(f'{difference:+.4f}' for difference in of_seeds)} nats from bf16"
        for way, of_seeds in figures["apart"].items()
    )
    shown.caption = "; ".join(differences) or None
    return shown
