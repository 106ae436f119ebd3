"""Optimizers and schedules compared on small models, at equal tokens and tuned learning rates.

A model of each mixer learns the Python standard library. A *way* is an optimizer with a schedule. Its learning rates
are a factor of two apart, on one seed; the grid grows until the best rate is not at an end. The best rate then has two
more seeds, of initial weights and of the order of the samples. All runs have the same number of tokens; all losses are
those of one validation set, in nats per token, with the weights that a checkpoint would have.

A cell is one run. Each is written when it is done (``cells.jsonl`` in ``--folder``), so that a killed benchmark
continues with the same command.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.command import run_lightscale
from benchmarks.turns import BenchmarkReport, positive
from lightscale.config.files import load
from lightscale.config.schedules.registry import learning_rate
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader, validation_batches
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.files import sync
from lightscale.parallel.mesh import start_mesh
from lightscale.training.build import build_engine

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
MIXERS = ("tnl", "hgrn2", "gated-delta-net")
FACTOR = 2.0
"""Between neighbouring rates."""
MOST_RATES = 9
"""Of a way; a best rate that is still at an end is shown as such."""
SEEDS = (0, 1, 2)
"""The rates are tried with the first one."""
SOURCE = "stdlib"


@dataclass(frozen=True, kw_only=True)
class Way:
    """An optimizer with a schedule, and the middle of its first three rates."""

    optimizer: str
    schedule: str
    rate: float
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """In tables."""
        return f"{self.optimizer}, {self.schedule}"


WAYS = (
    Way(optimizer="adamw", schedule="cosine", rate=4e-3),
    Way(optimizer="adamw", schedule="linear", rate=4e-3),
    # The last fifth decays by 1 - sqrt(x).
    Way(optimizer="adamw", schedule="wsd", rate=4e-3, options=("optimizer.decay=minus_sqrt",)),
    # As its paper: a smaller rate, and their product as with AdamW.
    Way(optimizer="lion", schedule="cosine", rate=5e-4, options=("optimizer.weight_decay=0.8",)),
    Way(optimizer="ademamix", schedule="cosine", rate=4e-3),
    Way(optimizer="schedulefree", schedule="constant", rate=8e-3),
    Way(optimizer="muon", schedule="cosine", rate=4e-3, options=("optimizer.newton_schulz_precision=fp32",)),
    Way(optimizer="soap", schedule="cosine", rate=4e-3),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Whatever decides a loss beside mixer, way, rate and seed; cells of other settings are not compared."""

    size: str
    tokenizer: str
    vocab_size: int
    init_std: float
    sequence_length: int
    batch_size: int
    steps: int
    validation_sequences: int
    store: str
    """Fingerprint of the tokens."""

    @property
    def tokens(self) -> int:
        """Of a run."""
        return self.steps * self.batch_size * self.sequence_length


WHOLE: dict[str, Any] = {"size": "3M", "tokenizer": "sentencepiece", "vocab_size": 4096, "init_std": 0.08}
WHOLE |= {"sequence_length": 256, "batch_size": 4, "validation_sequences": 64}
SMALL: dict[str, Any] = {"size": "tiny", "tokenizer": "ascii", "vocab_size": 128, "init_std": 0.1}
SMALL |= {"sequence_length": 64, "batch_size": 4, "validation_sequences": 16}
STEPS, SMALL_STEPS = 140, 8


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run, and what came of it."""

    mixer: str
    way: str
    options: list[str]
    """Of the way, beside its name."""
    rate: float
    seed: int
    loss: float | None
    """Of validation at the end; None: it diverged."""
    cpu_s: float
    """Of the process, for the run and its validation."""

    @property
    def score(self) -> float:
        """To be compared."""
        return math.inf if self.loss is None else self.loss


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Models, ways, and where the cells are."""
    add, names = parser.add_argument, [way.name for way in WAYS]
    add("--mixers", nargs="+", choices=MIXERS, default=list(MIXERS), help="default: all")
    add("--ways", nargs="+", choices=names, default=names, metavar="WAY", help=f"of {'; '.join(names)} (default: all)")
    add("--steps", type=positive, help=f"steps of each run (default {STEPS}; {SMALL_STEPS} with --small)")
    add("--small", action="store_true", help="tiny models on characters, to try the benchmark")
    add(
        "--store", type=Path, help="token store with the sources stdlib and stdlib-validation (default: made in FOLDER)"
    )
    add(
        "--folder",
        type=Path,
        default=Path("runs/optimizers-trained"),
        help="of the store and the finished cells, with which the benchmark continues (default %(default)s)",
    )


def run(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """The report so far after every way. Raises UserError for a store of another tokenizer."""
    args.folder.mkdir(parents=True, exist_ok=True)
    fixed = SMALL if args.small else WHOLE
    path = args.store or prepared(args.folder, fixed["tokenizer"], fixed["vocab_size"])
    store = TokenStore(path)
    if store.tokenizer.vocab_size > fixed["vocab_size"]:
        raise UserError(
            f"--store {path}: its tokenizer has {store.tokenizer.vocab_size} ids, the models {fixed['vocab_size']}; "
            f"make it with --tokenizer {fixed['tokenizer']} --vocab-size {fixed['vocab_size']}"
        )
    steps = args.steps or (SMALL_STEPS if args.small else STEPS)
    setting = Setting(**fixed, steps=steps, store=store.fingerprint())
    ways = [way for way in WAYS if way.name in args.ways]
    settings = asdict(setting) | {"mixers": args.mixers, "seeds": list(SEEDS)}
    kept = Kept(args.folder / "cells.jsonl", setting)
    runs = Runs(store, path, setting, kept)
    for mixer, way in itertools.product(args.mixers, ways):
        runs.tune(mixer, way)
        figures = figures_of(kept.cells, setting, args.mixers, ways)
        yield BenchmarkReport(settings=settings, figures=figures, table=table(figures))


def prepared(folder: Path, tokenizer: str, vocab_size: int) -> Path:
    """The store in ``folder``, which is made where there is none."""
    path: Path = folder / f"store-{tokenizer}"
    if not path.exists():
        words = f"data prepare --corpus stdlib --tokenizer {tokenizer} --validation 0.02".split()
        words += [] if tokenizer == "ascii" else ["--vocab-size", str(vocab_size)]
        run_lightscale(*words, "--out", str(path))
    return path


class Kept:
    """The finished cells of a setting, a line each; other lines are those of other settings.

    A line that a killed run left unfinished is no JSON, and its cell runs again.
    """

    def __init__(self, path: Path, setting: Setting) -> None:
        self.path, self._setting = path, asdict(setting)
        self.cells: list[Cell] = []
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if found["setting"] == self._setting:
                self.cells.append(Cell(**found["cell"]))
        # What follows an unfinished line must not become a part of it.
        self._begin = "" if not text or text.endswith("\n") else "\n"

    def find(self, mixer: str, way: Way, rate: float, seed: int) -> Cell | None:
        """The cell of these values."""
        wanted = mixer, way.name, list(way.options), rate, seed
        found = ((one.mixer, one.way, one.options, one.rate, one.seed) for one in self.cells)
        return next((cell for cell, of_cell in zip(self.cells, found, strict=True) if of_cell == wanted), None)

    def add(self, cell: Cell) -> None:
        """Keep it, on disk when this returns."""
        self.cells.append(cell)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(self._begin + json.dumps({"setting": self._setting, "cell": asdict(cell)}) + "\n")
        sync(self.path)
        self._begin = ""


class Runs:
    """The runs of one setting."""

    def __init__(self, store: TokenStore, path: Path, setting: Setting, kept: Kept) -> None:
        self._store, self._path, self._setting, self._kept = store, path, setting, kept

    def tune(self, mixer: str, way: Way) -> None:
        """All cells of a mixer and a way."""
        powers = [-1, 0, 1]
        while True:
            scores = {power: self._cell(mixer, way, power, SEEDS[0]).score for power in powers}
            best = min(scores, key=scores.__getitem__)
            if len(powers) == MOST_RATES or best not in (powers[0], powers[-1]):
                break
            powers = [powers[0] - 1, *powers] if best == powers[0] else [*powers, powers[-1] + 1]
        for seed in SEEDS[1:]:
            self._cell(mixer, way, best, seed)

    def _cell(self, mixer: str, way: Way, power: int, seed: int) -> Cell:
        rate = way.rate * FACTOR**power
        cell = self._kept.find(mixer, way, rate, seed)
        if cell is None:
            began = time.process_time()
            loss = self._trained(self._config(mixer, way, rate, seed))
            cpu_s = time.process_time() - began
            options = list(way.options)
            cell = Cell(mixer=mixer, way=way.name, options=options, rate=rate, seed=seed, loss=loss, cpu_s=cpu_s)
            self._kept.add(cell)
            shown = "diverged" if loss is None else f"{loss:.4f}"
            print(
                f"{mixer}, {way.name}, lr {rate:.2e}, seed {seed}: {shown}, {cpu_s:.1f} s", file=sys.stderr, flush=True
            )
        return cell

    def _config(self, mixer: str, way: Way, rate: float, seed: int) -> RunConfig:
        own = self._setting
        decay = (f"optimizer.decay_steps={max(1, own.steps // 5)}",) if way.schedule == "wsd" else ()
        overrides = [
            f"data.store={self._path.resolve()}",
            f"data.sequence_length={own.sequence_length}",
            f"data.seed={seed}",
            f"model.vocab_size={own.vocab_size}",
            f"model.init_std={own.init_std}",
            f"train.seed={seed}",
            f"train.steps={own.steps}",
            f"train.global_batch_size={own.batch_size}",
            f"train.micro_batch_size={own.batch_size}",
            "train.precision=fp32",
            "train.validate_every=0",
            f"optimizer.name={way.optimizer}",
            f"optimizer.schedule={way.schedule}",
            f"optimizer.lr={rate!r}",
            "optimizer.min_lr_ratio=0.0",
            f"optimizer.warmup_steps={own.steps // 10}",
            *way.options,
            *decay,
        ]
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            parts = [CONFIGS / "arch" / f"{mixer}.toml", CONFIGS / "size" / f"{own.size}.toml"]
            parts.append(CONFIGS / "recipe" / "first-run.toml")
            file.write(f"extends = {[str(part) for part in parts]}\n")
            file.flush()
            return load(Path(file.name), overrides)

    def _trained(self, config: RunConfig) -> float | None:
        """The loss of validation behind a run; None where a loss is not finite."""
        loader = TokenLoader.of(config, self._store)
        # Of each run: an engine lives as long as its mesh.
        with start_mesh(device="cpu") as mesh:
            engine = build_engine(config, mesh, vocab_size=self._store.tokenizer.vocab_size, trainable=True)
            for step in range(1, config.total_steps + 1):
                batches = [batch.to(mesh.device) for batch in loader.next_step()]
                if not math.isfinite(engine.forward_backward(batches).mean):
                    return None
                engine.step(learning_rate(config.optimizer, step, config.total_steps))
            found = validation_batches(
                self._store.source(f"{SOURCE}-validation"),
                sequence_length=self._setting.sequence_length,
                num_sequences=self._setting.validation_sequences,
                micro_batch_size=self._setting.batch_size,
                layout=LoaderLayout(),
            )
            with engine.read_weights():
                loss = engine.forward_only([batch.to(mesh.device) for batch in found]).mean
        return loss if math.isfinite(loss) else None


def figures_of(cells: Sequence[Cell], setting: Setting, mixers: Sequence[str], ways: Sequence[Way]) -> dict[str, Any]:
    """The cells of mixers and ways, and of each the best rate and its losses."""
    lines: list[dict[str, Any]] = []
    found: list[Cell] = []
    for mixer, way in itertools.product(mixers, ways):
        wanted = mixer, way.name, list(way.options)
        own = [cell for cell in cells if (cell.mixer, cell.way, cell.options) == wanted]
        if not own:
            continue
        found += own
        tried = sorted((cell for cell in own if cell.seed == SEEDS[0]), key=lambda cell: cell.rate)
        best = min(tried, key=lambda cell: cell.score)
        losses = [cell.loss for cell in own if cell.rate == best.rate]
        finite = [loss for loss in losses if loss is not None]
        lines.append(
            {
                "mixer": mixer,
                "way": way.name,
                "rate": best.rate,
                "is_inner": best not in (tried[0], tried[-1]),
                "losses": losses,
                "mean": statistics.mean(finite) if len(finite) == len(losses) else None,
                "step_cpu_s": statistics.median(cell.cpu_s for cell in own) / setting.steps,
            }
        )
    total_s = sum(cell.cpu_s for cell in found)
    return {"tokens": setting.tokens, "cpu_s": total_s, "cells": [asdict(cell) for cell in found], "lines": lines}


def table(figures: dict[str, Any]) -> Table:
    """A line for each mixer and way."""
    made = Table(
        caption=f"{figures['tokens']:,} tokens each; {len(figures['cells'])} cells, {figures['cpu_s']:.0f} s of CPU; "
        "* the best rate is at an end of the grid"
    )
    for heading in ("mixer", "optimizer, schedule", "best rate", "loss, mean", "of the seeds", "step, CPU ms"):
        made.add_column(heading, justify="left" if heading in ("mixer", "optimizer, schedule") else "right")
    for line in figures["lines"]:
        mean = "diverged" if line["mean"] is None else f"{line['mean']:.4f}"
        seeds = ", ".join("-" if loss is None else f"{loss:.4f}" for loss in line["losses"])
        rate = f"{line['rate']:.2e}{'' if line['is_inner'] else ' *'}"
        made.add_row(line["mixer"], line["way"], rate, mean, seeds, f"{1e3 * line['step_cpu_s']:.0f}")
    return made


def draw(figures: dict[str, Any], path: Path) -> None:
    """Above the losses over the rate, below those of the seeds at the best rate; a column for each mixer."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    mixers = figures["settings"]["mixers"]
    ways = list(dict.fromkeys(line["way"] for line in figures["lines"]))
    figure = Figure(figsize=(4.6 * len(mixers), 8), layout="constrained")
    grid = figure.subplots(2, len(mixers), squeeze=False)
    for column, mixer in enumerate(mixers):
        lines = [line for line in figures["lines"] if line["mixer"] == mixer]
        over_rates, of_seeds = grid[0][column], grid[1][column]
        for line in lines:
            color = f"C{ways.index(line['way'])}"
            tried = sorted(
                (cell["rate"], cell["loss"])
                for cell in figures["cells"]
                if (cell["mixer"], cell["way"], cell["seed"]) == (mixer, line["way"], SEEDS[0])
                and cell["loss"] is not None
            )
            over_rates.plot(*_columns(tried), "o-", ms=3, lw=1, color=color, label=line["way"])
            losses = [loss for loss in line["losses"] if loss is not None]
            place = ways.index(line["way"])
            of_seeds.plot(losses, [place] * len(losses), "o", ms=5, alpha=0.6, color=color)
            if losses:
                of_seeds.plot(statistics.mean(losses), place, "|", ms=18, mew=2, color=color)
        over_rates.set_xscale("log", base=2)
        over_rates.set_title(mixer)
        over_rates.set_xlabel("learning rate")
        of_seeds.set_yticks(range(len(ways)), ways if column == 0 else [""] * len(ways), fontsize=8)
        of_seeds.set_ylim(len(ways) - 0.5, -0.5)
        of_seeds.set_xlabel("validation loss at the best rate, nats per token")
        for axes in (over_rates, of_seeds):
            axes.grid(alpha=0.3)
        if len(lines) > 1:
            _cut(over_rates, figures["cells"], mixer)
    grid[0][0].set_ylabel(f"validation loss after {figures['tokens']:,} tokens, seed 0")
    grid[0][0].legend(fontsize=7)
    figure.suptitle(f"{figures['settings']['size']} models, three seeds, {figures['machine']['date']}", fontsize=10)
    figure.savefig(path, dpi=120)


def _columns(rows: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [row[0] for row in rows], [row[1] for row in rows]


def _cut(axes: Any, cells: Sequence[dict[str, Any]], mixer: str) -> None:
    """Leave out losses far above the others, which would flatten all else."""
    losses = sorted(cell["loss"] for cell in cells if cell["mixer"] == mixer and cell["loss"] is not None)
    least, most = losses[0], losses[int(0.9 * (len(losses) - 1))]
    axes.set_ylim(least - 0.1 * (most - least), most + 0.1 * (most - least))
