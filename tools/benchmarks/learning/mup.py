"""The best learning rate of models of three widths, with µP and without it.

Every run trains on fresh tokens of one drawn source and is measured on others; rates are a factor apart. The best rate
of a width is the one that a study's search finds (`lightscale/study/fits/optimum.py`). At the least width, both
parametrisations are one model.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from benchmarks.turns import BenchmarkReport, positive
from lightscale.config.schedules.registry import learning_rate
from lightscale.config.schema import RunConfig
from lightscale.parallel.mesh import start_mesh
from lightscale.parallel.micro_batch import GivenMicroBatch
from lightscale.training.build import build_engine

STANDARD, MUP = "standard", "mup"
HEAD_DIM, LAYERS, NUM_IDS, TOKENS, ROWS = 16, 2, 64, 64, 8
CONTEXTS = 509
"""Pairs of tokens that the source tells apart; a prime, so that the tokens before spread over them."""
FOLLOWED = 0.8
"""Share of tokens that follow from the two before."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A drawn language: a token follows from the two before, or is any."""

    following: Tensor

    @classmethod
    def drawn(cls, seed: int) -> "Source":
        """One of this seed."""
        generator = torch.Generator().manual_seed(seed)
        return cls(following=torch.randint(0, NUM_IDS, (CONTEXTS,), generator=generator))

    def batch(self, rows: int, seed: int) -> GivenMicroBatch:
        """A micro-batch of ``rows`` texts."""
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(0, NUM_IDS, (rows, TOKENS + 1), generator=generator)
        follows = torch.rand(rows, TOKENS + 1, generator=generator) < FOLLOWED
        for place in range(2, TOKENS + 1):
            pair = (text[:, place - 2] * NUM_IDS + text[:, place - 1]) % CONTEXTS
            text[:, place] = torch.where(follows[:, place], self.following[pair], text[:, place])
        return GivenMicroBatch(
            tokens=text[:, :-1],
            labels=text[:, 1:],
            loss_mask=torch.ones(rows, TOKENS),
            positions=torch.arange(TOKENS).repeat(rows, 1),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Mixer, widths, rates and steps."""
    add = parser.add_argument
    add("--mixer", default="tnl", help="default tnl")
    add("--widths", type=positive, nargs="+", default=[64, 128, 256], help="the first one is µP's base")
    add("--rates", type=float, nargs="+", default=[2.0**power for power in range(-8, -2)], help="learning rates")
    add("--steps", type=positive, default=200, help="default 200")


def run(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """The report so far after every width."""
    settings = {name: getattr(args, name) for name in ("mixer", "widths", "rates", "steps", "repeats")}
    lines: list[dict[str, Any]] = []
    for width in args.widths:
        for kind in (STANDARD, MUP):
            if width == args.widths[0] and kind == MUP:
                lines += [line | {"kind": MUP} for line in lines]
                continue
            lines += losses(args, width, kind)
        figures = {"lines": lines.copy(), "best": best(lines), "spread": spread(lines)}
        yield BenchmarkReport(settings=settings, figures=figures, table=table(figures))


def losses(args: argparse.Namespace, width: int, kind: str) -> list[dict[str, Any]]:
    """A line for each rate and seed."""
    found = []
    for seed in range(args.repeats):
        for rate in args.rates:
            loss = trained(config_of(args, width, kind, rate, seed))
            print(f"{kind} {width} {rate:.2e} seed {seed}: {loss:.4f}", file=sys.stderr, flush=True)
            found.append({"kind": kind, "width": width, "rate": rate, "seed": seed, "loss": loss})
    return found


def config_of(args: argparse.Namespace, width: int, kind: str, rate: float, seed: int) -> RunConfig:
    """The run of one width and rate."""
    model = {
        "mixer": args.mixer,
        "num_layers": LAYERS,
        "hidden_size": width,
        "num_heads": width // HEAD_DIM,
        "intermediate_size": 2 * width,
        "vocab_size": NUM_IDS,
        # That of a matrix of the base width that keeps sizes.
        "init_std": 1 / math.sqrt(args.widths[0]),
        "mup": {"base_hidden_size": args.widths[0]} if kind == MUP else None,
    }
    return RunConfig.model_validate(
        {
            "model": model,
            "data": {"store": "drawn", "sequence_length": TOKENS},
            "optimizer": {"lr": rate, "schedule": "linear", "warmup_steps": args.steps // 10, "min_lr_ratio": 0.0},
            "train": {"steps": args.steps, "global_batch_size": ROWS, "micro_batch_size": ROWS, "seed": seed},
        }
    )


def trained(config: RunConfig) -> float:
    """Loss on other tokens after the run, nats per token."""
    source, seed = Source.drawn(0), config.train.seed
    # Of each run: an engine lives as long as its mesh.
    with start_mesh(device="cpu") as mesh:
        engine = build_engine(config, mesh, vocab_size=NUM_IDS, trainable=True)
        for step in range(1, config.total_steps + 1):
            engine.forward_backward([source.batch(ROWS, 1_000_000 * (seed + 1) + step)])
            engine.step(learning_rate(config.optimizer, step, config.total_steps))
        loss = engine.forward_only([source.batch(8 * ROWS, 0)]).mean
    return loss if math.isfinite(loss) else math.inf


def best(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each kind and width the best rate, over the mean of the seeds, and those of each seed."""
    found = []
    for kind, width in dict.fromkeys((line["kind"], line["width"]) for line in lines):
        own = [line for line in lines if (line["kind"], line["width"]) == (kind, width)]
        seeds = sorted({line["seed"] for line in own})
        rates = sorted({line["rate"] for line in own})
        table = np.array([[of(own, rate, seed) for rate in rates] for seed in seeds])
        rate, loss, interval = lowest(rates, table)
        of_seeds = [lowest(rates, row[np.newaxis])[0] for row in table]
        mark = {"kind": kind, "width": width, "rate": rate, "loss": loss, "interval": interval, "of_seeds": of_seeds}
        found.append(mark)
    return found


def of(lines: Sequence[dict[str, Any]], rate: float, seed: int) -> float:
    """The loss of one run."""
    (found,) = (line["loss"] for line in lines if (line["rate"], line["seed"]) == (rate, seed))
    return float(found)


def lowest(rates: Sequence[float], losses: np.ndarray) -> tuple[float, float, tuple[float, float] | None]:
    """Rate, loss, 95 % interval of the lowest point; where there is none, the best rate. ``losses``: (seeds, rates)."""
    # SciPy is an extra, and bench.py starts on machines without it.
    from lightscale.study.fits.optimum import Optimum, optimum  # noqa: PLC0415

    found = optimum(dict(zip(rates, losses.T.tolist(), strict=True)))
    if isinstance(found, Optimum):
        return found.value, found.loss, found.interval
    means = losses.mean(axis=0)
    least = int(means.argmin())
    return float(rates[least]), float(means[least]), None


def spread(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Largest over least best rate of all widths, by kind."""
    found: dict[str, list[float]] = {}
    for line in best(lines):
        found.setdefault(line["kind"], []).append(line["rate"])
    return {kind: max(rates) / min(rates) for kind, rates in found.items()}


def table(figures: dict[str, Any]) -> Table:
    """Best rates."""
    shown = Table("parametrisation", "width", "best rate", "95 %", "of seeds", "loss")
    for line in figures["best"]:
        seeds = ", ".join(f"{rate:.2e}" for rate in line["of_seeds"])
        interval = "—" if line["interval"] is None else "{:.1e} to {:.1e}".format(*line["interval"])
        shown.add_row(line["kind"], str(line["width"]), f"{line['rate']:.2e}", interval, seeds, f"{line['loss']:.4f}")
    shown.caption = ", ".join(f"{kind}: best rates within {ratio:.2f}" for kind, ratio in figures["spread"].items())
    return shown


def draw(figures: dict[str, Any], path: Path) -> None:
    """Loss over rate of each width, one panel a parametrisation."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), (STANDARD, MUP), strict=True):
        widths = sorted({line["width"] for line in figures["lines"]})
        for number, width in enumerate(widths):
            own = [line for line in figures["lines"] if (line["kind"], line["width"]) == (kind, width)]
            if not own:
                continue
            rates = sorted({line["rate"] for line in own})
            seeds = sorted({line["seed"] for line in own})
            mean = [sum(of(own, rate, seed) for seed in seeds) / len(seeds) for rate in rates]
            axes.plot(rates, mean, marker="o", ms=3, color=f"C{number}", label=f"width {width}")
            (mark,) = (one for one in figures["best"] if (one["kind"], one["width"]) == (kind, width))
            axes.plot(mark["rate"], mark["loss"], "*", ms=12, color=f"C{number}")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("learning rate")
        axes.set_title(f"{kind}: best rates within {figures['spread'][kind]:.2f}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("loss, nats per token")
    figure.savefig(path, dpi=130)
