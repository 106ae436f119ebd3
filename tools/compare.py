#!/usr/bin/env python
"""Trains every architecture by one recipe and puts the results side by side: ``python tools/compare.py``.

Each architecture is one ``lightscale train`` run, with the same corpus, seeds, steps and learning rates; runs that are
there already are reused, an interrupted one is resumed. The results are a table (JSON and markdown) and a picture of
the loss curves. The exit code is 1 if a model is no better than one that only knows how often each token is.
"""

import argparse
import importlib.util
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import machine, positive
from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.store.several_stores import open_stores
from lightscale.errors import UserError
from lightscale.models.accounting import EMBEDDING, parameter_terms
from lightscale.runs.run_directory import RunDirectory, read_metrics, write_atomically

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
ARCHITECTURES = ("llama", "tnl", "hgrn2", "cosformer2", "lightnet")
LAST_STEPS = 10
"""The final training loss is the mean over so many steps: a single batch's is noisy."""
AROUND_STEPS = 4
"""In the picture, the loss is averaged with that of so many steps before and after."""
EXIT_NOT_LEARNED = 1

console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One architecture's run."""

    architecture: str
    file: Path
    directory: RunDirectory
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class ArchitectureResult:
    """What a finished run says. Losses are in nats per token."""

    run: str
    parameters: int
    parameters_without_embedding: int
    training_loss: float
    """Mean of the last steps."""
    validation_loss: float
    tokens_per_s: float
    """Median over the steps."""
    training_losses: list[float]
    """Of every step."""
    validation_losses: dict[int, float]
    """By step."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, collect, write; exit code 0, 1, that of a failed run, or 78 for a mistake of the user."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    args = parse(argv)
    try:
        return compare(args, command=shlex.join(["python", "tools/compare.py", *argv]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return UserError.EXIT_CODE


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="compare.py", description="Train every architecture with one recipe, and compare loss and speed."
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="section.key=value", help="values that replace the recipe's values in all runs")
    add(
        "--architecture",
        action="append",
        metavar="NAME",
        help=f"architecture in configs/arch; repeat for several (default: {', '.join(ARCHITECTURES)})",
    )
    add("--size", default="1M", metavar="NAME", help="size in configs/size (default: %(default)s)")
    add("--steps", type=positive, metavar="N", help="optimizer steps of every run (default: the recipe's)")
    processes = min(2, torch.cuda.device_count()) or 2
    add("--processes", type=positive, default=processes, metavar="N", help="processes per run (default: %(default)s)")
    add(
        "--runs",
        type=Path,
        default=Path("runs/compare"),
        metavar="DIR",
        help="directory of the runs (default: %(default)s)",
    )
    add(
        "--out",
        type=Path,
        default=Path("benchmarks"),
        metavar="DIR",
        help="directory of the results (default: %(default)s)",
    )
    add(
        "--note",
        action="append",
        default=[],
        metavar="TEXT",
        help="note to record, such as other load on the machine",
    )
    add("--json", action="store_true", help="print the results as JSON, not as a table")
    return parser.parse_intermixed_args(argv)


def compare(args: argparse.Namespace, command: str) -> int:
    """Everything, once the command line is read."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("the picture needs matplotlib; use `pip install matplotlib`")
    runs = [make_run(name, args) for name in args.architecture or ARCHITECTURES]
    entropies = unigram_entropies(runs[0].config)
    for number, run in enumerate(runs, start=1):
        console.rule(f"[bold]{run.architecture}[/bold], {number} of {len(runs)}")
        code = train(run, args)
        if code:
            hint = (
                "use another --runs to start again" if code == UserError.EXIT_CODE else "run the same command to resume"
            )
            console.print(f"{run.architecture} has not finished (exit code {code}); {hint}")
            return code
    results = {run.architecture: collect(run) for run in runs}
    found = record(results, runs[0].config, entropies, args=args, command=command)
    paths = write(found, args.out)
    if args.json:
        print(json.dumps(found))
    else:
        Console().print(terminal_table(found))
        print(f"written: {', '.join(map(str, paths))}")
    missed = [name for name, result in results.items() if not result.validation_loss < found["must_be_below"]]
    if missed:
        console.print(f"[red]not below the unigram entropy of {found['must_be_below']:.3f}: {', '.join(missed)}[/red]")
    return EXIT_NOT_LEARNED if missed else 0


def make_run(architecture: str, args: argparse.Namespace) -> Run:
    """Write the run's file, which composes architecture, size and recipe, and check it."""
    parts = [CONFIGS / "arch" / architecture, CONFIGS / "size" / args.size, CONFIGS / "recipe" / "compare"]
    extends = [os.path.relpath(f"{part}.toml", args.runs.absolute()) for part in parts]
    file = args.runs / f"{architecture}.toml"
    args.runs.mkdir(parents=True, exist_ok=True)
    write_atomically(file, f"extends = {json.dumps(extends)}\n")
    try:
        config = load(file, overrides(args))
    except UserError:
        file.unlink()
        raise
    if not config.train.validate_every or not config.data.validation or config.metrics.log_every != 1:
        raise UserError(
            f"{file}: the comparison needs train.validate_every above 0, a set in data.validation and "
            "metrics.log_every = 1"
        )
    return Run(architecture=architecture, file=file, directory=RunDirectory(args.runs / architecture), config=config)


def overrides(args: argparse.Namespace) -> list[str]:
    """What replaces the recipe's values, the same for all runs."""
    return [*args.overrides, *([] if args.steps is None else [f"train.steps={args.steps}"])]


def unigram_entropies(config: RunConfig) -> dict[str, float]:
    """Of the validation text by its own frequencies of tokens, and by those of the training text."""
    store = open_stores(config.data)
    entropies = store.report().get("unigram_entropy_nats", {})
    names = ("validation", "validation_under_train")
    if not all(name in entropies for name in names):
        raise UserError(
            f"{store.path}: its report has no unigram entropy of validation text; run `lightscale data prepare` with "
            "--validation above 0"
        )
    return {name: entropies[name] for name in names}


def train(run: Run, args: argparse.Namespace) -> int:
    """``lightscale train``, which resumes and leaves finished runs alone; its exit code."""
    where = ["--run", str(run.directory.path), "--processes", str(args.processes)]
    command = ["lightscale", "train", str(run.file), *overrides(args), *where]
    console.print(f"$ {shlex.join(command)}", markup=False, soft_wrap=True)
    # -P: the folders of the current directory are no packages.
    process = subprocess.Popen([sys.executable, "-P", "-m", *command], stdout=sys.stderr)
    try:
        return process.wait()
    except KeyboardInterrupt:
        # The run has the signal too: it saves and leaves.
        return process.wait()


def collect(run: Run) -> ArchitectureResult:
    """Read the metrics of a finished run."""
    lines = read_metrics(run.directory.metrics)
    losses = [line["loss"] for line in lines]
    name = next(iter(run.config.data.validation))
    validation = {line["step"]: line["validation"][name]["loss"] for line in lines if "validation" in line}
    terms = parameter_terms(run.config.model)
    return ArchitectureResult(
        run=str(run.directory.path),
        parameters=sum(terms.values()),
        parameters_without_embedding=sum(terms.values()) - terms[EMBEDDING],
        training_loss=statistics.mean(losses[-LAST_STEPS:]),
        validation_loss=validation[run.config.total_steps],
        tokens_per_s=statistics.median(line["tokens_per_s"] for line in lines),
        training_losses=losses,
        validation_losses=validation,
    )


def record(
    results: dict[str, ArchitectureResult],
    config: RunConfig,
    entropies: dict[str, float],
    *,
    args: argparse.Namespace,
    command: str,
) -> dict[str, Any]:
    """Everything that is written: what was found, from what, and where. ``config``: of one of the runs."""
    host = machine()
    return {
        "command": command,
        "machine": {name: host[name] for name in ("cpu", "cores", "date", "python")},
        "versions": {name: version(name) for name in ("lightscale", "torch", "megatron-core", "matplotlib")},
        "notes": args.note,
        "setup": {
            "size": args.size,
            "processes": args.processes,
            "steps": config.total_steps,
            "sequence_length": config.data.sequence_length,
            "global_batch_size": config.train.global_batch_size,
            "tokens": config.total_tokens,
            "optimizer": config.optimizer.model_dump(mode="json"),
            "seed": config.train.seed,
            "data_seed": config.data.seed,
            "store_fingerprint": open_stores(config.data).fingerprint(),
        },
        "unigram_entropy_nats": entropies,
        "must_be_below": min(entropies.values()),
        "architectures": {name: vars(result) for name, result in results.items()},
    }


def write(found: dict[str, Any], folder: Path) -> list[Path]:
    """The three files, named by the day."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"compare-{found['machine']['date']}"
    json_file, markdown, picture = (stem.with_suffix(suffix) for suffix in (".json", ".md", ".png"))
    draw(found, picture)
    write_atomically(markdown, markdown_page(found, picture.name))
    write_atomically(json_file, json.dumps(found, indent=1) + "\n")
    return [json_file, markdown, picture]


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table: headings, then a line for each architecture."""
    headings = ("architecture", "parameters", "without embedding", "training loss", "validation loss", "tokens/s")
    lines = [
        (
            name,
            f"{result['parameters']:,}",
            f"{result['parameters_without_embedding']:,}",
            f"{result['training_loss']:.3f}",
            f"{result['validation_loss']:.3f}",
            f"{result['tokens_per_s']:,.0f}",
        )
        for name, result in found["architectures"].items()
    ]
    return [headings, *lines]


def terminal_table(found: dict[str, Any]) -> Table:
    """For the screen."""
    headings, *lines = rows(found)
    table = Table(caption=f"nats per token; unigram entropy {found['must_be_below']:.3f}")
    table.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    for line in lines:
        table.add_row(*line)
    return table


def markdown_page(found: dict[str, Any], picture: str) -> str:
    """For the repository."""
    setup, host, entropies = found["setup"], found["machine"], found["unigram_entropy_nats"]
    headings, *lines = rows(found)
    table = [headings, (":--", *["--:"] * (len(headings) - 1)), *lines]
    text = [
        f"# Architectures at size {setup['size']}, {host['date']}",
        f"Every architecture by one recipe: {setup['tokens']:,} tokens in {setup['steps']} steps of "
        f"{setup['global_batch_size']} × {setup['sequence_length']}, the same corpus, seeds and learning rates "
        f"({setup['optimizer']['schedule']}, peak {setup['optimizer']['lr']:g}), {setup['processes']} processes.",
        "\n".join(f"| {' | '.join(line)} |" for line in table),
        f"Losses in nats per token; the training loss is the mean of the last {LAST_STEPS} steps, tokens/s the median "
        f"over the steps. The unigram entropy of the validation text is {entropies['validation']:.3f} by its own "
        f"frequencies of tokens, the best that any model without context can reach, and "
        f"{entropies['validation_under_train']:.3f} by those of the training text.",
        f"![loss curves]({picture})",
        f"    {found['command']}",
        f"On {host['cpu']}, {host['cores']} cores; python {host['python']}, "
        + ", ".join(f"{name} {number}" for name, number in found["versions"].items())
        + ".",
        *found["notes"],
    ]
    return "\n\n".join(text) + "\n"


def draw(found: dict[str, Any], path: Path) -> None:
    """The loss curves, one colour for each architecture, and the unigram entropy."""
    # Optional, and slow to import. Figure instead of pyplot: there may be no display.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, result in found["architectures"].items():
        losses = result["training_losses"]
        # Batches differ in difficulty, for all architectures alike; the mean of the steps around shows the way.
        means = [statistics.mean(losses[max(0, i - AROUND_STEPS) : i + AROUND_STEPS + 1]) for i in range(len(losses))]
        steps = range(1, len(losses) + 1)
        (line,) = axes.plot(steps, means, linewidth=1.8, label=f"{name}, {result['validation_loss']:.2f}")
        axes.plot(steps, losses, linewidth=0.6, alpha=0.35, color=line.get_color())
        validation = result["validation_losses"]
        axes.plot(list(validation), list(validation.values()), "o", markersize=5, color=line.get_color())
    entropy = found["must_be_below"]
    axes.axhline(entropy, color="black", linestyle="--", linewidth=1, label=f"unigram entropy, {entropy:.2f}")
    setup = found["setup"]
    axes.set_title(f"Size {setup['size']}, {setup['tokens'] / 1e6:.2g}M tokens")
    axes.set_xlabel(f"step ({setup['global_batch_size'] * setup['sequence_length']:,} tokens each)")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(title="lines: training, running mean\ndots: validation, in the end", alignment="left")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
