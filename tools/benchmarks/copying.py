"""The copying task, learned from nothing by relation networks, a transformer and a linear transformer.

(CausalRN, "Linear-Time Sequence Modeling with MLPs", section 4.4 and Figure 6, in small.) Every step has strings that
were never seen before; what counts is the first step whose batch is predicted to ``REACHED``, with the right symbols
given (teacher-forced), the end-of-text token among them.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from benchmarks.turns import positive
from lightscale.config.model import ModelConfig
from lightscale.config.schema import DataConfig, OptimizerConfig, RunConfig, TrainConfig
from lightscale.data_pipeline.generators.copying import Copying
from lightscale.parallel.mesh import start_mesh
from lightscale.training.build import build_engine
from lightscale.training.schedule import learning_rate

REACHED = 0.99
WIDTH, BLOCKS = 64, 4
LR, WARMUP_STEPS = 1e-3, 50
# What the paper's figure shows, as far as it can be seen at this size.
TARGET_LENGTH, TARGET_STEPS, LINEAR_ACCURACY = 16, 300, 0.9
_COLORS = {"quadratic": "#c03d3e", "linear": "#e1812c", "transformer": "#3274a1", "linear transformer": "#3a923a"}

MODELS: dict[str, dict[str, Any]] = {
    # Homogeneous, as the paper has them: blocks without a gated linear unit.
    "quadratic": {"mixer": "causal-rn", "intermediate_size": 0, "mixer_options": {"form": "quadratic"}},
    "linear": {"mixer": "causal-rn", "intermediate_size": 0, "mixer_options": {"form": "linear"}},
    "transformer": {"mixer": "llama", "intermediate_size": 4 * WIDTH, "mixer_options": {}},
    # Linear attention without decay.
    "linear transformer": {"mixer": "cosformer2", "intermediate_size": 4 * WIDTH, "mixer_options": {}},
}


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """What an engine takes; see ``training`` of lightscale."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor
    document_starts: tuple[Tensor, Tensor] | None = None
    lengths: tuple[int, ...] | None = None
    sources: Tensor | None = None


def config_of(name: str, *, length: int, batch: int, steps: int, seed: int, vocab_size: int) -> RunConfig:
    """The configuration of one of ``MODELS`` for strings of ``length`` symbols."""
    own = MODELS[name]
    mixer, options = own["mixer"], dict(own["mixer_options"])
    if mixer == "causal-rn":
        options["positions"] = 2 * length + 3
    model = ModelConfig.model_validate(
        {
            "mixer": mixer,
            "num_layers": BLOCKS,
            "hidden_size": WIDTH,
            "num_heads": 1,
            "intermediate_size": own["intermediate_size"],
            "vocab_size": -(-vocab_size // 8) * 8,
            "norm": "rmsnorm",
            "glu_activation": "silu",
            "mixer_options": {mixer: options} if options else {},
        }
    )
    return RunConfig(
        model=model,
        data=DataConfig(store=Path("none"), sequence_length=2 * length + 3),
        optimizer=OptimizerConfig(lr=LR, warmup_steps=WARMUP_STEPS, betas=(0.9, 0.999), weight_decay=0.0),
        train=TrainConfig(steps=steps, global_batch_size=batch, micro_batch_size=batch, seed=seed),
    )


def batches(generator: Copying, *, batch: int, seed: int) -> Iterator[_Batch]:
    """Batches of documents, as a store has them: the end-of-text token, the document, and that token again."""
    tokenizer, number = generator.tokenizer(), 0
    while True:
        made = [generator.document(seed, "train", number + row) for row in range(batch)]
        number += batch
        ids = np.stack([np.asarray(x, np.int64) for x in tokenizer.encode_batch([one.text for one in made])])
        end = np.full((batch, 1), tokenizer.eot_id, np.int64)
        rows = torch.from_numpy(np.concatenate([end, ids, end], axis=1))
        counts = np.stack([one.counts for one in made if one.counts is not None])
        # The end of a document counts where its last token does.
        mask = torch.from_numpy(np.concatenate([counts, counts[:, -1:]], axis=1)).float()
        positions = torch.arange(rows.shape[1] - 1).repeat(batch, 1)
        yield _Batch(tokens=rows[:, :-1], labels=rows[:, 1:], loss_mask=mask, positions=positions)


@contextmanager
def kept_logits(output_layer: nn.Module) -> Iterator[list[Tensor]]:
    """Within it, the logits (n, b, V) of every batch."""
    found: list[Tensor] = []

    @torch.no_grad()
    def keep(layer: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        # The call had labels and gave losses; without them the layer gives logits.
        found.append(layer.forward(*inputs)[0])

    hook = output_layer.register_forward_hook(keep)
    yield found
    hook.remove()


def curve(name: str, *, length: int, batch: int, steps: int, seed: int, limit_s: float) -> dict[str, Any]:
    """Train until a batch is predicted to ``REACHED``, for ``steps`` at most and about ``limit_s``."""
    generator = Copying(min_length=length, max_length=length)
    vocab_size = generator.tokenizer().vocab_size
    config = config_of(name, length=length, batch=batch, steps=steps, seed=seed, vocab_size=vocab_size)
    begun, accuracies, losses = time.monotonic(), [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        start_mesh(device="cpu", rank=0, world_size=1, init_method=f"file://{folder}/init") as mesh,
    ):
        engine = build_engine(config, mesh, vocab_size=vocab_size, trainable=True)
        output_layer = engine.module.output_layer
        assert isinstance(output_layer, nn.Module)
        with kept_logits(output_layer) as logits:
            for step, one in zip(range(steps), batches(generator, batch=batch, seed=seed), strict=False):
                losses.append(engine.forward_backward([one]).mean)
                guess = logits.pop()[..., :vocab_size].argmax(-1).T
                accuracies.append(float(((guess == one.labels) * one.loss_mask).sum() / one.loss_mask.sum()))
                if accuracies[-1] >= REACHED or time.monotonic() - begun > limit_s:
                    break
                engine.step(learning_rate(config.optimizer, step + 1, steps))
    return {
        "model": name,
        "length": length,
        "seed": seed,
        "batch": batch,
        "parameters": sum(weight.numel() for weight in engine.module.parameters()),
        "steps": len(accuracies),
        "reached": accuracies[-1] >= REACHED,
        "accuracy": accuracies[-1],
        "seconds": time.monotonic() - begun,
        "accuracies": [round(x, 4) for x in accuracies],
        "losses": [round(x, 4) for x in losses],
    }


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures after each curve: the seeds of a length, then the next one."""
    curves: list[dict[str, Any]] = []
    for length in args.lengths:
        for seed in range(args.seed, args.seed + args.repeats):
            for name in args.models:
                limits = {"steps": args.steps, "limit_s": args.limit_s}
                curves.append(curve(name, length=length, batch=args.batch, seed=seed, **limits))
                yield {"curves": curves, "verdict": {"missed": missed(curves)}}


def missed(curves: list[dict[str, Any]]) -> list[str]:
    """What was to be seen at ``TARGET_LENGTH`` and was not."""
    found = []
    for one in curves:
        if one["length"] != TARGET_LENGTH:
            continue
        what = f"{one['model']}, seed {one['seed']}"
        if one["model"] == "quadratic" and not (one["reached"] and one["steps"] <= TARGET_STEPS):
            found.append(
                f"{what}: {one['accuracy']:.1%} after {one['steps']} steps, not {REACHED:.0%} in {TARGET_STEPS}"
            )
        late = one["accuracies"][: TARGET_STEPS + 50]
        if one["model"] == "linear" and max(late) >= LINEAR_ACCURACY:
            found.append(f"{what}: {max(late):.1%} in {len(late)} steps, not below {LINEAR_ACCURACY:.0%}")
    return found


def table(figures: dict[str, Any]) -> Table:
    """For people."""
    made = Table(caption="\n".join(figures["verdict"]["missed"]) or None)
    for name in ("length", "model", "seed", "steps", "accuracy", "s/step"):
        made.add_column(name, justify="left" if name == "model" else "right")
    for one in figures["curves"]:
        steps = f"{one['steps']}" if one["reached"] else f"> {one['steps']}"
        speed = f"{one['seconds'] / one['steps']:.2f}"
        made.add_row(f"{one['length']}", one["model"], f"{one['seed']}", steps, f"{one['accuracy']:.1%}", speed)
    return made


def draw(figures: dict[str, Any], path: Path) -> None:
    """Accuracy over steps, a panel for each length."""
    # Optional, and slow to import. Figure instead of pyplot: there may be no display.
    from matplotlib.figure import Figure  # noqa: PLC0415

    lengths = sorted({one["length"] for one in figures["curves"]})
    figure = Figure(figsize=(4.2 * len(lengths), 3.8), layout="constrained")
    row = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    for axes, length in zip(row, lengths, strict=True):
        for one in figures["curves"]:
            if one["length"] == length:
                label = one["model"] if one["seed"] == 0 else None
                axes.plot(one["accuracies"], color=_COLORS[one["model"]], label=label, linewidth=1.2)
        axes.axhline(REACHED, color="grey", linewidth=0.6)
        axes.set_title(f"strings of {length}", fontsize=10)
        axes.set_xlabel("steps")
        axes.grid(alpha=0.3)
    row[0].set_ylabel("accuracy on the second string")
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=2 * len(lengths), fontsize=8)
    host = figures["machine"]
    figure.suptitle(f"Copying: {BLOCKS} blocks of width {WIDTH}, {host['cpu']}, {host['date']}", fontsize=10)
    figure.savefig(path, dpi=110)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``bench.py copying``."""
    parser.add_argument("--lengths", type=positive, nargs="+", default=[16], help="symbols of a string (default 16)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="the first of as many as --repeats (default 0)")
    parser.add_argument("--batch", type=positive, default=64, help="strings per step (default 64)")
    parser.add_argument("--steps", type=positive, default=350, help="most steps of a curve (default 350)")
    parser.add_argument("--limit-s", type=float, default=600.0, help="most seconds of a curve (default 600)")
