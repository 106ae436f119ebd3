"""``lightscale data samples``."""

import argparse
import json
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from lightscale.data_pipeline.loading.samples import (
    SampleContent,
    StepContent,
    recorded_tokens,
    run_loader,
    step_content,
)
from lightscale.data_pipeline.store.origins import Origin
from lightscale.errors import UserError
from lightscale.output.terminal import plain_console

_PIPE_WIDTH = 500


def run(args: argparse.Namespace) -> int:
    """Print the data that the step consumed. Raises ``UserError`` for a step that the run does not have."""
    config, loader = run_loader(args.run)
    if not 1 <= args.step <= config.total_steps:
        raise UserError(f"--step {args.step}: {args.run} has steps 1 to {config.total_steps}")
    content = step_content(loader, args.step, recorded_tokens(args.run))
    if args.json:
        print(json.dumps(asdict(content)))
        return 0
    console = plain_console(soft_wrap=True)
    if not console.is_terminal:  # a program reads it: a row is a line
        console.width = _PIPE_WIDTH
    first, last = content.first_token, content.first_token + content.num_tokens
    console.print(
        f"step {content.step}: tokens {first:,} to {last:,} of the run, {len(content.samples):,} sequences of "
        f"{content.sequence_length:,} tokens"
    )
    console.print(_table(content))
    return 0


def _table(content: StepContent) -> Table:
    has_labels = any(one.label is not None for sample in content.samples for one in sample.documents)
    labels = ["label"] if has_labels else []
    headings = ("sample", "source", "epoch", "window", "document", "tokens of the document")
    table = Table(*headings, *labels, "file", "position in it")
    for column in table.columns[:-2]:
        column.no_wrap = True
    for column in table.columns[-2:]:
        column.overflow = "fold"
    for sample in content.samples:
        names = (f"{sample.sample}", sample.source, f"{sample.epoch}", f"{sample.window}")
        for line in _lines(sample, has_labels=has_labels):
            table.add_row(*names, *(Text(cell) for cell in line))
            names = ("", "", "", "")
    return table


def _lines(sample: SampleContent, *, has_labels: bool) -> list[list[str]]:
    lines = []
    for one in sample.documents:
        label = [one.label or ""] if has_labels else []
        lines.append([f"{one.document}", f"{one.start} to {one.stop}", *label, *_place(one.origin)])
    if sample.padding_tokens:
        lines.append(["padding", f"{sample.padding_tokens}"])
    return lines


def _place(origin: Origin | None) -> tuple[str, str]:
    if origin is None:
        return "not known", ""
    return origin.file, f"{origin.place} ({origin.id})" if origin.id else origin.place
