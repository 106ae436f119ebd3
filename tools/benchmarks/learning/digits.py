"""Images of digits: classified by four mixers at about equal parameters, and drawn by one scan and by two.

scikit-learn's 1,797 images, 8 x 8 pixels, a fifth of which is held out. Every run is one of `lightscale train`, and the
measures are those of `lightscale resolutions` and `lightscale draw`. A classifier of the benchmark judges the drawn
images; it has not seen any of them.
"""

import argparse
import contextlib
import importlib
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.command import lightscale_output, run_lightscale
from benchmarks.turns import positive
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.models.accounting import parameter_shapes
from lightscale.runs.run_directory import RunDirectory, read_metrics

CLASSIFIERS = ("lightnet-digits", "lion-s-digits", "bi-rn-digits", "vit-digits")
SIZES = ("6x6", "8x8", "10x10", "12x12", "16x16")
JUDGE = "vit-digits"
DRAWN = {
    "lightnet": "lightnet-dit-digits",
    "lion-retnet": "arch/lion-retnet",
    "softmax": "arch/llama-bidirectional",
}
"""Name and shipped configuration, or the part of one that describes the mixer; LION-RetNet reads in two scans."""


def classify(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is known after each run, then the curves over resolution. UserError: a command failed; it has said why."""
    with _folder(args) as folder:
        _prepare(args.images)
        runs: list[dict[str, Any]] = []
        figures: dict[str, Any] = {"runs": runs, "resolutions": []}
        for seed in range(args.repeats):
            for name in CLASSIFIERS:
                run = f"runs/{name}-{seed}"
                _train(name, run, args.steps, [f"train.seed={seed}"])
                facts = {"model": name, "seed": seed, "parameters": _parameters(run)}
                runs.append(facts | {"accuracy": _validation(run)["accuracy"]})
                yield figures
        out = folder / "resolutions.jsonl"
        out.unlink(missing_ok=True)
        of_first = [f"runs/{name}-0" for name in CLASSIFIERS]
        run_lightscale("resolutions", *of_first, "--image-sizes", *SIZES, "--out", str(out))
        figures["resolutions"] = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        yield figures


def draw_digits(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is known after each model."""
    with _folder(args) as folder:
        _prepare(args.images)
        _train(JUDGE, "runs/judge", args.judge_steps, [])
        judge = {"model": JUDGE, "accuracy": _validation("runs/judge")["accuracy"]}
        models: list[dict[str, Any]] = []
        for name in args.models:
            config = DRAWN[name]
            run = f"runs/{name}"
            size = [f"model.hidden_size={args.width}", f"model.intermediate_size={2 * args.width}"]
            size += [f"model.num_layers={args.layers}", f"model.num_heads={max(1, args.width // 24)}"]
            if config.startswith("arch/"):
                parts = json.dumps([config, "size/dit-digits", "recipe/draw-digits"])
                config = f"{Path(run).name}.toml"
                Path(config).write_text(f"extends = {parts}\n", encoding="utf-8")
            _train(config, run, args.steps, [*size])
            picture = folder / f"{Path(run).name}.png"
            found = _drawn(run, picture, args)
            facts = {"model": name, "parameters": _parameters(run), "loss": _validation(run)["loss"]}
            models.append(facts | found)
            if args.pictures not in (None, folder):
                shutil.copyfile(picture, args.pictures / picture.name)
            yield {"judge": judge, "models": models}


@contextlib.contextmanager
def _folder(args: argparse.Namespace) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        for path in ("folder", "images", "pictures"):
            if getattr(args, path, None) is not None:
                setattr(args, path, getattr(args, path).resolve())
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True, parents=True)
        stack.enter_context(contextlib.chdir(folder))
        yield folder


def _prepare(images: Path | None) -> None:
    """The store, as docs/how-to/images.md makes it; one that is there stays."""
    if Path("data/digits").exists():
        return
    if images is None:
        try:
            sklearn = importlib.import_module("sklearn.datasets")
        except ModuleNotFoundError as error:
            raise UserError(
                "the images are scikit-learn's: use `pip install scikit-learn`, or --images FILE.npz"
            ) from error
        digits = sklearn.load_digits()
        pixels = (digits.images * 255 / 16).round().astype("uint8")
        np.savez("digits.npz", images=pixels, labels=digits.target)
    elif images != Path("digits.npz").absolute():
        # Sources of the store have the name of the file.
        shutil.copyfile(images, "digits.npz")
    words = ["--images", "8x8x1", "--validation", "0.2", "--out", "data/digits"]
    run_lightscale("data", "prepare", "digits.npz", *words)


def _train(name: str, run: str, steps: int | None, overrides: list[str]) -> None:
    """A run that is finished is not trained again, and one that was interrupted goes on."""
    length = [] if steps is None else [f"train.steps={steps}", f"optimizer.warmup_steps={max(1, steps // 10)}"]
    run_lightscale("train", name, "--run", run, "--processes", "1", *length, *overrides)


def _drawn(run: str, picture: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measures of its images; those that were drawn before stay."""
    kept = picture.with_suffix(".json")
    if not (kept.exists() and picture.exists()):
        picture.unlink(missing_ok=True)
        words = ["--ema", "slow", "--guidance", str(args.guidance), "--steps", str(args.draw_steps)]
        words += ["--count", str(args.count), "--columns", "20", "--scale", "3", "--classifier", "runs/judge"]
        kept.write_text(lightscale_output("draw", run, *words, "--out", str(picture), "--json"), encoding="utf-8")
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return found


def _validation(run: str) -> dict[str, Any]:
    """Of the last step that was validated."""
    lines = read_metrics(RunDirectory(Path(run)).metrics)
    return dict([line["validation"]["digits"] for line in lines if "validation" in line][-1])


def _parameters(run: str) -> int:
    return sum(prod(shape) for shape in parameter_shapes(load(Path(run) / "config.toml").model).values())


def classified_table(found: dict[str, Any]) -> Table:
    """For people."""
    made = Table(caption="top-1 accuracy on the held-out images")
    for name in ("model", "parameters", "seeds", "least", "mean", "most"):
        made.add_column(name, justify="left" if name == "model" else "right")
    for name in CLASSIFIERS:
        own = [one for one in found["runs"] if one["model"] == name]
        if own:
            all_of = [one["accuracy"] for one in own]
            shares = [f"{value:.2%}" for value in (min(all_of), statistics.mean(all_of), max(all_of))]
            made.add_row(name, f"{own[0]['parameters']:,}", str(len(own)), *shares)
    return made


def drawn_table(found: dict[str, Any]) -> Table:
    """For people."""
    judge = found["judge"]
    made = Table(caption=f"judged by {judge['model']}, {judge['accuracy']:.2%} of the held-out images right")
    made.add_column("model")
    for name in ("parameters", "loss", "recognised", "score", "Fréchet distance", "spatial", "precision", "recall"):
        made.add_column(name, justify="right")
    for one in found["models"]:
        figures = [f"{one['parameters']:,}", f"{one['loss']:.4f}", f"{one['recognised']:.1%}"]
        figures.append(f"{one['classifier_score']:.2f}")
        measures = ("frechet_distance", "spatial_frechet_distance", "precision", "recall")
        figures += [f"{one[name]:.3f}" for name in measures]
        made.add_row(one["model"], *figures)
    return made


def draw(figures: dict[str, Any], path: Path) -> None:
    """Accuracies of all seeds, and curves over resolution."""
    # Optional, and slow to import. Figure instead of pyplot: there may be no display.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 4), layout="constrained")
    seeds, sizes = figure.subplots(1, 2)
    for place, name in enumerate(CLASSIFIERS):
        own = [one["accuracy"] for one in figures["runs"] if one["model"] == name]
        seeds.plot([place] * len(own), own, "o", alpha=0.6)
        curve = [one for one in figures["resolutions"] if Path(one["run"]).name == f"{name}-0"]
        sizes.plot([one["image_size"][0] for one in curve], [one["accuracy"] for one in curve], "o-", label=name)
    seeds.axhline(0.97, color="gray", linewidth=0.8)
    seeds.set_xticks(range(len(CLASSIFIERS)), [name.removesuffix("-digits") for name in CLASSIFIERS])
    seeds.set_ylabel("accuracy, each seed")
    sizes.set_xlabel("pixels a side, trained with 8")
    sizes.set_ylabel("accuracy")
    sizes.legend(fontsize=8)
    figure.suptitle(f"Digits, 8 x 8 pixels, {figures['machine']['date']}", fontsize=10)
    figure.savefig(path, dpi=120)


def add_classify_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``bench.py digits``."""
    _add_common(parser)
    parser.add_argument("--steps", type=positive, metavar="N", help="steps of each run (default: 300, as shipped)")


def add_draw_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``bench.py drawn-digits``."""
    _add_common(parser)
    add = parser.add_argument
    add("--steps", type=positive, metavar="N", help="steps of each model (default: 3000, as shipped)")
    add("--judge-steps", type=positive, metavar="N", help="steps of the classifier (default: 300, as shipped)")
    add("--models", nargs="+", choices=DRAWN, default=[*DRAWN], metavar="NAME", help=f"of {', '.join(DRAWN)}")
    add("--width", type=positive, default=96, metavar="N", help="hidden size, in heads of 24 (default 96)")
    add("--layers", type=positive, default=4, metavar="N", help="layers (default 4)")
    add("--count", type=positive, default=1000, metavar="N", help="images of each model (default 1000)")
    add("--draw-steps", type=positive, default=50, metavar="N", help="steps of DDIM (default 50)")
    add("--guidance", type=float, default=2.0, metavar="SCALE", help="classifier-free guidance (default 2)")
    add("--pictures", type=Path, metavar="FOLDER", help="where the drawn images are kept as well (default: nowhere)")


def _add_common(parser: argparse.ArgumentParser) -> None:
    images = "images and labels, as docs/how-to/images.md writes them (default: made with scikit-learn)"
    parser.add_argument("--images", type=Path, metavar="FILE.npz", help=images)
    kept = "where its files and runs are kept; the same folder goes on (default: none are)"
    parser.add_argument("--folder", type=Path, help=kept)
