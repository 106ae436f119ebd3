"""A trained softmax model that becomes linear by ``train.init_from``, beside linear models that begin from nothing.

One LLaMA is trained on the Python standard library. Then every linear mixer is trained twice on as many tokens: from
that LLaMA and from its own initial weights, in the same order of samples, with the same norms and linear units.
"""

import argparse
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.command import run_lightscale
from benchmarks.turns import positive
from lightscale.runs.run_directory import RunDirectory, read_metrics

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
VOCAB_SIZE = 4096
STARTS = ("converted", "from nothing")
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red")
# The architecture is LLaMA's in all runs but for the mixer, so that kept weights compute what they did.
RUN = f"""
extends = ["{CONFIGS}/arch/llama.toml", "{CONFIGS}/size/1M.toml", "{CONFIGS}/recipe/stdlib.toml"]
[model]
init_std = 0.08                # about 1 / sqrt(hidden_size), as a short run has no time to grow into it
[data]
sequence_length = 256
[data.validation.stdlib]
source = "stdlib-validation"
sequences = 32
[optimizer]
lr = 3e-3
[train]
global_batch_size = 4
micro_batch_size = 4
[checkpoint]
every = 1_000_000              # the last step is saved
"""


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is known after each run. UserError: a command failed; it has said why."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder, store = Path(name), args.store
        (folder / "run.toml").write_text(RUN, encoding="utf-8")
        if store is None:
            store = folder / "store"
            prepare = f"data prepare --corpus stdlib --vocab-size {VOCAB_SIZE} --validation 0.02 --out"
            run_lightscale(*prepare.split(), str(store))
        train = ["train", str(folder / "run.toml"), "--processes", "1", f"data.store={store.resolve()}"]
        of_source = [f"train.steps={args.source_steps}", f"train.validate_every={args.source_steps}"]
        source = folder / "llama"
        run_lightscale(*train, "--run", str(source), *of_source)
        before = {"mixer": "llama", "start": "source", "seed": 0, **_curves(source)}
        of_all = [f"train.steps={args.steps}", f"train.validate_every={max(1, args.steps // 15)}"]
        # Samples that the source has not seen, and another draw of what is drawn.
        for seed, mixer, start in product(range(1, args.repeats + 1), args.mixers, STARTS):
            words = [f"model.mixer={mixer}", f"train.seed={seed}", f"data.seed={seed}", *of_all]
            words += [f"train.init_from={source}@{args.source_steps}"] if start == STARTS[0] else []
            directory = folder / f"{mixer}-{start.split()[-1]}-{seed}"
            run_lightscale(*train, "--run", str(directory), *words)
            found.append({"mixer": mixer, "start": start, "seed": seed, **_curves(directory)})
            yield {"source": before, "runs": found, "verdict": {"missed": _missed(found)}}


def _curves(directory: Path) -> dict[str, Any]:
    lines = read_metrics(RunDirectory(directory).metrics)
    validation = {line["tokens"]: line["validation"]["stdlib"]["loss"] for line in lines if "validation" in line}
    return {"validation_losses": validation, "training_losses": [line["loss"] for line in lines if "loss" in line]}


def _missed(runs: list[dict[str, Any]]) -> list[str]:
    """Where a converted model is not ahead, at any number of tokens."""
    by_name = {(one["mixer"], one["start"], one["seed"]): one["validation_losses"] for one in runs}
    missed = []
    for (mixer, start, seed), nothing in by_name.items():
        converted = by_name[mixer, STARTS[0], seed]
        behind = [tokens for tokens, loss in nothing.items() if start == STARTS[1] and not converted[tokens] < loss]
        missed += [f"{mixer}, seed {seed}: the converted model is not ahead after {tokens} tokens" for tokens in behind]
    return missed


def table(found: dict[str, Any]) -> Table:
    """For people."""
    made = Table(caption="\n".join(found["verdict"]["missed"]) or None)
    for name in ("mixer", "start", "seed"):
        made.add_column(name)
    tokens = list(next(iter(found["runs"]))["validation_losses"])
    shown = [tokens[len(tokens) * part // 4 - 1] for part in (1, 2, 3, 4)]
    for count in shown:
        made.add_column(f"loss at {count:,}", justify="right")
    for one in found["runs"]:
        losses = [f"{one['validation_losses'][count]:.3f}" for count in shown]
        made.add_row(one["mixer"], one["start"], str(one["seed"]), *losses)
    return made


def draw(figures: dict[str, Any], path: Path) -> None:
    """Validation loss over tokens."""
    # Optional, and slow to import. Figure instead of pyplot: there may be no display.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    colors = dict(zip(dict.fromkeys(one["mixer"] for one in figures["runs"]), COLORS * 2, strict=False))
    for one in figures["runs"]:
        losses = {int(tokens): loss for tokens, loss in one["validation_losses"].items()}
        style = "-" if one["start"] == STARTS[0] else "--"
        label = f"{one['mixer']}, {one['start']}" if one["seed"] == 1 else None
        axes.plot(list(losses), list(losses.values()), style, color=colors[one["mixer"]], label=label)
    *_, loss = figures["source"]["validation_losses"].values()
    axes.axhline(loss, color="gray", linewidth=0.8, label="the converted LLaMA")
    axes.set_xlabel("tokens")
    axes.set_ylabel("validation loss, nats per token")
    axes.legend(fontsize=8)
    axes.set_title(f"From softmax to linear, {figures['machine']['date']}", fontsize=10)
    figure.savefig(path, dpi=120)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``bench.py convert``; its repeats are seeds."""
    add = parser.add_argument
    add(
        "--mixers",
        nargs="+",
        default=["tnl", "hgrn2"],
        metavar="NAME",
        help=("mixers to convert LLaMA to (default: tnl hgrn2)"),
    )
    add("--source-steps", type=positive, default=400, metavar="N", help="steps of LLaMA's training (default 400)")
    add("--steps", type=positive, default=150, metavar="N", help="steps of each compared run (default 150)")
    add("--store", type=Path, help="token store (default: one made of the Python standard library)")
