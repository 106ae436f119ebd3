"""The copying task, learned from nothing by relation networks, a transformer and a linear transformer.

(CausalRN, "Linear-Time Sequence Modeling with MLPs", section 4.4 and Figure 6, with the paper's blocks, in small.)
Every step has strings that were never seen before; what counts is the first step whose batch is predicted to
``REACHED``, with the right symbols given (teacher-forced), the end-of-text token among them. A curve is a cell: with
``--cells`` finished ones are kept in a folder and not run again, so that a command that was cut off goes on.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from benchmarks.learning.printed_blocks import printed_blocks, printed_model
from benchmarks.turns import positive
from lightscale.config.schedules.registry import learning_rate
from lightscale.config.schema import DataConfig, RunConfig, TrainConfig
from lightscale.data_pipeline.generators.copying import Copying
from lightscale.errors import UserError
from lightscale.parallel.mesh import start_mesh
from lightscale.parallel.micro_batch import GivenMicroBatch
from lightscale.runs.run_directory import write_atomically
from lightscale.training.build import build_engine
from lightscale.training.optimizer.adamw import AdamWConfig

REACHED = 0.99
WARMUP_STEPS, STEPS_TOLD = 50, 10
# What the paper's figure shows, as far as it can be seen at this size.
TARGET_LENGTH, TARGET_STEPS, LINEAR_ACCURACY = 16, 300, 0.9
# From the colours of the paper's Figure 6 on, the fastest there first.
COLORS = {"quadratic": "#c03d3e", "transformer": "#3274a1", "linear transformer": "#3a923a", "linear": "#e1812c"}
MODELS = list(COLORS)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all curves of a benchmark share. The paper has width 192, 12 blocks, batch 320, 2000 steps, lr 5e-4."""

    width: int
    blocks: int
    batch: int
    steps: int
    lr: float


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One curve."""

    model: str
    length: int
    seed: int

    def __str__(self) -> str:
        return f"{self.model}, strings of {self.length}, seed {self.seed}"

    @property
    def file(self) -> str:
        """Its name in the folder of cells."""
        return f"{self.model.replace(' ', '-')}_{self.length}_{self.seed}.json"


def config_of(cell: Cell, recipe: Recipe, *, vocab_size: int) -> RunConfig:
    """The configuration of a curve."""
    tokens = 2 * cell.length + 3
    shape = {"width": recipe.width, "blocks": recipe.blocks, "vocab_size": -(-vocab_size // 8) * 8}
    return RunConfig(
        model=printed_model(cell.model, length=tokens, **shape),
        data=DataConfig(store=Path("none"), sequence_length=tokens),
        optimizer=AdamWConfig(lr=recipe.lr, warmup_steps=WARMUP_STEPS, betas=(0.9, 0.999), weight_decay=0.0),
        train=TrainConfig(
            steps=recipe.steps, global_batch_size=recipe.batch, micro_batch_size=recipe.batch, seed=cell.seed
        ),
    )


def batches(generator: Copying, *, batch: int, seed: int) -> Iterator[GivenMicroBatch]:
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
        yield GivenMicroBatch(tokens=rows[:, :-1], labels=rows[:, 1:], loss_mask=mask, positions=positions)


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


def curve(cell: Cell, recipe: Recipe) -> dict[str, Any]:
    """Train until a batch is predicted to ``REACHED``, for the recipe's steps at most."""
    generator = Copying(min_length=cell.length, max_length=cell.length)
    vocab_size = generator.tokenizer().vocab_size
    begun, accuracies, losses = time.monotonic(), [], []
    with (
        printed_blocks(),
        tempfile.TemporaryDirectory() as folder,
        start_mesh(device="cpu", rank=0, world_size=1, init_method=f"file://{folder}/init") as mesh,
    ):
        config = config_of(cell, recipe, vocab_size=vocab_size)
        engine = build_engine(config, mesh, vocab_size=vocab_size, trainable=True)
        output_layer = engine.module.output_layer
        assert isinstance(output_layer, nn.Module)
        of_steps = batches(generator, batch=recipe.batch, seed=cell.seed)
        with kept_logits(output_layer) as logits:
            for step, one in zip(range(1, recipe.steps + 1), of_steps, strict=False):
                losses.append(engine.forward_backward([one]).mean)
                guess = logits.pop()[..., :vocab_size].argmax(-1).T
                accuracies.append(float(((guess == one.labels) * one.loss_mask).sum() / one.loss_mask.sum()))
                reached, seconds = accuracies[-1] >= REACHED, time.monotonic() - begun
                if reached or step == recipe.steps or step % STEPS_TOLD == 0:
                    so_far = f"step {step} of {recipe.steps}, {accuracies[-1]:.1%}, loss {losses[-1]:.3f}"
                    print(f"{cell}: {so_far}, {seconds / step:.2f} s/step", file=sys.stderr, flush=True)
                if reached:
                    break
                engine.step(learning_rate(config.optimizer, step, recipe.steps))
    return {
        **asdict(cell),
        "parameters": sum(weight.numel() for weight in engine.module.parameters()),
        "steps": len(accuracies),
        "reached": reached,
        "accuracy": accuracies[-1],
        "seconds": seconds,
        "accuracies": [round(x, 4) for x in accuracies],
        "losses": [round(x, 4) for x in losses],
    }


def finished(cell: Cell, recipe: Recipe, folder: Path | None) -> dict[str, Any]:
    """The curve of ``cell``: from ``folder`` if it is there and not too short, else run now and kept there.

    Raises:
        UserError: there is one of another recipe.
    """
    path = None if folder is None else folder / cell.file
    if path is not None and path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        # Every step is the same however many follow: a curve may have more of them than are asked for.
        if kept["recipe"] | {"steps": 0} != asdict(recipe) | {"steps": 0}:
            raise UserError(f"{path}: made by {kept['recipe']}, not by {asdict(recipe)}; use another folder")
        found: dict[str, Any] = kept["curve"]
        if found["reached"] or found["steps"] >= recipe.steps:
            return found
    found = curve(cell, recipe)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"recipe": asdict(recipe), "curve": found}) + "\n")
    return found


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures after each curve: the seeds of a length, then the next one.

    Raises:
        UserError: see ``finished``; or nothing is there to be shown.
    """
    if args.finished and (args.cells is None or not args.cells.is_dir()):
        raise UserError(f"--finished shows curves of --cells FOLDER, and {args.cells or 'none'} does not exist")
    recipe = Recipe(width=args.width, blocks=args.blocks, batch=args.batch, steps=args.steps, lr=args.lr)
    curves: list[dict[str, Any]] = []
    for length in args.lengths:
        for seed in range(args.seed, args.seed + args.repeats):
            for name in args.models:
                cell = Cell(model=name, length=length, seed=seed)
                if args.finished and not (args.cells / cell.file).exists():
                    continue
                # However short they are.
                asked = replace(recipe, steps=0) if args.finished else recipe
                curves.append(finished(cell, asked, args.cells))
                yield {"recipe": asdict(recipe), "curves": curves, "verdict": {"missed": missed(curves)}}


def missed(curves: list[dict[str, Any]]) -> list[str]:
    """What was to be seen at ``TARGET_LENGTH`` and was not."""
    found = []
    at_target = {(one["model"], one["seed"]): one for one in curves if one["length"] == TARGET_LENGTH}
    for (model, seed), one in at_target.items():
        what = f"{model}, seed {seed}"
        if model == "quadratic" and not (one["reached"] and one["steps"] <= TARGET_STEPS):
            found.append(
                f"{what}: {one['accuracy']:.1%} after {one['steps']} steps, not {REACHED:.0%} in {TARGET_STEPS}"
            )
        late = one["accuracies"][: TARGET_STEPS + 50]
        if model == "linear" and max(late) >= LINEAR_ACCURACY:
            found.append(f"{what}: {max(late):.1%} in {len(late)} steps, not below {LINEAR_ACCURACY:.0%}")
        if model in ("quadratic", "linear"):
            continue
        for other, faster in (("quadratic", True), ("linear", False)):
            beside = at_target.get((other, seed))
            if beside is not None and (_slowness(beside) < _slowness(one)) != faster:
                found.append(f"{what}: {_words(one)}, {other} {_words(beside)}: not between")
    return found


def _slowness(one: dict[str, Any]) -> tuple[float, float]:
    """The less, the faster a curve."""
    return (one["steps"] if one["reached"] else float("inf"), -one["accuracy"])


def _words(one: dict[str, Any]) -> str:
    return f"{REACHED:.0%} at {one['steps']}" if one["reached"] else f"{one['accuracy']:.1%} at {one['steps']}"


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
    """Accuracy over steps, a panel for each length; and of several lengths the steps that each model took."""
    # Optional, and slow to import. Figure instead of pyplot: there may be no display.
    from matplotlib.figure import Figure  # noqa: PLC0415

    lengths = sorted({one["length"] for one in figures["curves"]})
    panels = len(lengths) + (len(lengths) > 1)
    figure = Figure(figsize=(3.9 * panels, 3.9), layout="constrained")
    row = figure.subplots(1, panels, squeeze=False)[0]
    for axes, length in zip(row, lengths, strict=False):
        for one in figures["curves"]:
            if one["length"] == length:
                axes.plot(one["accuracies"], color=COLORS[one["model"]], linewidth=1.2)
        axes.axhline(REACHED, color="grey", linewidth=0.6)
        axes.set(title=f"strings of {length}", xlabel="steps", ylim=(0, 1.03))
        axes.grid(alpha=0.3)
    row[0].set_ylabel("accuracy on the second string")
    if len(lengths) > 1:
        _draw_steps(row[-1], figures["curves"], lengths)
    known = [model for model in MODELS if any(one["model"] == model for one in figures["curves"])]
    handles = [row[0].plot([], [], color=COLORS[model], label=model)[0] for model in known]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(known), fontsize=9)
    host, recipe = figures["machine"], figures["recipe"]
    size = f"{recipe['blocks']} blocks of width {recipe['width']}, batch {recipe['batch']}, lr {recipe['lr']}"
    figure.suptitle(f"Copying: {size}; {host['cpu']}, {host['date']}", fontsize=10)
    figure.savefig(path, dpi=110)


def _draw_steps(axes: Any, curves: list[dict[str, Any]], lengths: list[int]) -> None:
    """The mean over seeds; hollow where one of them had not reached it: not by as many steps as it had."""
    for model in MODELS:
        points = []
        for length in lengths:
            of_seeds = [one for one in curves if one["model"] == model and one["length"] == length]
            if of_seeds:
                steps, reached = [one["steps"] for one in of_seeds], all(one["reached"] for one in of_seeds)
                points.append((length, sum(steps) / len(steps) if reached else max(steps), reached))
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], color=COLORS[model], linewidth=1.2)
        for x, y, reached in points:
            axes.plot(x, y, "o", color=COLORS[model], markerfacecolor=COLORS[model] if reached else "white")
    axes.set(title=f"steps to {REACHED:.0%} (hollow: not reached)", xlabel="symbols of a string", xscale="log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``bench.py copying``."""
    parser.add_argument("--lengths", type=positive, nargs="+", default=[16], help="symbols of a string (default 16)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="default: all")
    parser.add_argument(
        "--seed", type=int, default=0, help=("first seed; --repeats sets the number of seeds (default 0)")
    )
    parser.add_argument("--batch", type=positive, default=64, help="strings per step (default 64)")
    parser.add_argument("--steps", type=positive, default=350, help="maximum steps of a curve (default 350)")
    parser.add_argument("--width", type=positive, default=128, help="width of the models, in channels (default 128)")
    parser.add_argument("--blocks", type=positive, default=4, help="number of blocks of the models (default 4)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate, constant after 50 steps (default 1e-3)")
    parser.add_argument("--finished", action="store_true", help="show the curves of --cells, and run nothing")
    parser.add_argument(
        "--cells", type=Path, metavar="FOLDER", help="folder for finished curves, which are not run again"
    )
