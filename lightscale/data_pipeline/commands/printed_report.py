"""The content of a ``report.json`` as text."""

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightscale.output.terminal import plain_console

_MOST_CLASSES = 50
"""That a table shows."""


def show_store(args: argparse.Namespace, report: dict[str, Any], seconds: float) -> Console | None:
    """Print the report of a new store ``args.out``: as JSON, or as text on the console that is returned."""
    if args.json:
        print(json.dumps({"store": str(args.out), "seconds": seconds, **report}))
        return None
    console = plain_console(soft_wrap=True)
    print_report(console, report)
    return console


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Print the content of a ``report.json`` as text."""
    if (images := report.get("images")) is not None:
        _print_images(console, images)
    # Pixels are an array of images, or tokens as those of texts.
    has_tokens = report["tokenizer"]["vocab_size"] > 1
    if has_tokens:
        tokenizer = report["tokenizer"]
        console.print(
            f"tokenizer {tokenizer['name']}: {tokenizer['vocab_size']:,} ids, end of text {tokenizer['eot_id']}, "
            f"sha256 {tokenizer['sha256'][:16]}…"
        )
    console.print(_sources(report, images=None if has_tokens else images))
    if weights := report.get("weights"):
        console.print("weights: " + ", ".join(f"{name} {weight:.7g}" for name, weight in weights.items()))
    if any("classes" in source for source in report["sources"].values()):
        console.print(_classes(report))
    for name, source in report.get("corpus", {}).items():
        _print_dropped(console, name, source["stages"])
    if has_tokens:
        _print_entropies(console, report["unigram_entropy_nats"])
    _print_problems(console, report["problems"])


def _print_entropies(console: Console, entropy: dict[str, float]) -> None:
    console.print(f"unigram entropy: {entropy['train']:.4f} nats/token (training split)")
    if "validation" in entropy:
        console.print(
            f"    validation split: {entropy['validation']:.4f} nats/token by its own frequencies, "
            f"{entropy['validation_under_train']:.4f} by those of the training split"
        )


def _print_problems(console: Console, problems: dict[str, Any]) -> None:
    for reason, problem in problems.items():
        console.print(f"warning: {reason}: {problem['count']:,}")
        for example in problem["examples"][:5]:
            console.print(f"    {example}")


def _sources(report: dict[str, Any], *, images: dict[str, Any] | None) -> Table:
    table = Table("source")
    of_texts = ("documents", "MB of text", "tokens", "bytes/token")
    kind = "latents" if images is not None and "dtype" in images else "pixels"
    headings = of_texts if images is None else ("images", f"MB of {kind}")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, source in report["sources"].items():
        values = (
            f"{source['documents']:,}",
            f"{source['bytes'] / 1e6:,.2f}",
            f"{source['tokens']:,}",
            f"{source['bytes_per_token']:.3f}",
        )
        table.add_row(name, *values[: len(headings)])
    return table


def _print_images(console: Console, images: dict[str, Any]) -> None:
    height, width, channels = images["shape"]
    if "dtype" in images:
        numbers = ("[" + ", ".join(f"{one:.6g}" for one in images[name]) + "]" for name in ("mean", "std"))
        console.print(
            f"latents of {height} x {width}, {channels} channel{'s' * (channels > 1)}, {images['dtype']}: "
            f"{images['read']:,} read; mean {', std '.join(numbers)}",
            markup=False,
        )
        return
    changes = {"crop": "scaled and cut", "stretch": "scaled", None: "not scaled"}[images["resize"]]
    modes = "converted" if images["convert"] else "not converted"
    console.print(
        f"images of {height} x {width} pixels, {channels} channel{'s' * (channels > 1)}: {images['read']:,} read, "
        f"{changes}, modes {modes}"
    )


def _classes(report: dict[str, Any]) -> Table:
    """Documents of each class in each source; of many classes the first."""
    labelled = {name: source["classes"] for name, source in report["sources"].items() if "classes" in source}
    every = list(next(iter(labelled.values())))
    table = Table("label", "class")
    for column in table.columns:
        column.no_wrap = True
    for name in labelled:
        table.add_column(f"in {name}", justify="right")
    for number, one in enumerate(every[:_MOST_CLASSES]):
        table.add_row(f"{number}", Text(one), *(f"{counts[one]:,}" for counts in labelled.values()))
    if len(every) > _MOST_CLASSES:
        table.add_row("…", f"and {len(every) - _MOST_CLASSES:,} more")
    return table


def _print_dropped(console: Console, name: str, steps: dict[str, Any]) -> None:
    for step, counts in steps.items():
        for reason, dropped in counts.get("dropped", {}).items():
            megabytes = dropped["bytes"] / 1e6
            console.print(f"{name}: {step} dropped {dropped['documents']:,} documents ({megabytes:,.2f} MB): {reason}")
