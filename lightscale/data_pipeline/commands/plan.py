"""``lightscale data plan``: size of a store and costs of its preparation, estimated from a sample."""

import argparse
import itertools
import json
import os
from typing import Any

from rich.console import Console
from rich.table import Table

from lightscale.data_pipeline.commands.corpus import add_corpus, read_corpus
from lightscale.data_pipeline.preparation.estimates.estimate import (
    SAMPLE_DOCUMENTS,
    CorpusEstimate,
    SourceEstimate,
    estimate,
)
from lightscale.data_pipeline.preparation.estimates.forecast import Forecast, forecast, require_workers
from lightscale.errors import UserError
from lightscale.output.terminal import plain_console, plain_table

_MOST_EXAMPLES = 3


def add_parser(commands: Any) -> None:
    """Add ``plan`` to the commands of ``lightscale data``."""
    text = "estimate tokens, disk and time of a preparation from a sample; writes nothing"
    parser = commands.add_parser("plan", help=text, description=text)
    add_corpus(parser)
    parser.add_argument(
        "--sample",
        type=int,
        default=SAMPLE_DOCUMENTS,
        metavar="N",
        help="documents of each source to look at (default: %(default)s)",
    )
    of_a_host = "worker processes of each host (default: the processors here)"
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="hosts to prepare on (default: 1)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help=of_a_host)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run_data=_plan)


def _plan(args: argparse.Namespace) -> int:
    if args.sample < 1:
        raise UserError(f"--sample {args.sample}: must be at least 1")
    require_workers(args.hosts, args.workers)
    corpus = read_corpus(args)
    found = estimate(corpus, sample=args.sample)
    planned = forecast(corpus, found, hosts=args.hosts, workers=args.workers)
    if args.json:
        print(json.dumps({**found.record(), "preparation": planned.record()}))
    else:
        console = plain_console(soft_wrap=True)
        _show(console, found)
        _show_forecast(console, planned)
    return 0


def _show_forecast(console: Console, planned: Forecast) -> None:
    workers = planned.hosts * planned.workers
    table = plain_table(["step"], ["tasks", "processor time", "longest task", "time"])
    for name, steps in itertools.groupby(planned.steps, key=lambda step: step.name):
        together = list(steps)
        times = (
            sum(step.seconds for step in together),
            max(step.longest_seconds for step in together),
            sum(step.wall_seconds(workers) for step in together),
        )
        table.add_row(name, f"{sum(step.tasks for step in together):,}", *map(_time, times))
    table.add_row("one process", "", *[_time(planned.alone_seconds)] * 3)
    console.print(table)
    console.print(
        f"{_time(planned.hours * 3600)} on {planned.hosts:,} × {planned.workers:,} workers of this speed, if together "
        f"they can read and write {_size(planned.needed_bytes_s)} a second; {_count(planned.opens)} files opened"
    )
    console.print(
        f"disk {_size(planned.store_bytes + planned.work_bytes)} at most, {_size(planned.key_bytes)} of it for "
        f"duplicate keys; memory {_size(planned.worker_bytes)} per worker, {_size(planned.handing_bytes)} to "
        f"distribute tasks, {_size(planned.uniting_bytes)} for the task that clusters duplicates, if a fifth of the "
        f"documents are duplicates"
    )


def _show(console: Console, found: CorpusEstimate) -> None:
    console.print(_table(found))
    for name, source in found.sources.items():
        for rule, count in source.dropped.most_common():
            console.print(f"{name}: {count:,} of {source.sampled:,} documents dropped: {rule}")
        for reason, problem in source.problems.as_json().items():
            console.print(f"{name}: warning: {reason}: {problem['count']:,}")
            for example in problem["examples"][:_MOST_EXAMPLES]:
                console.print(f"    {example}")
    trained = ", trained on the sample; the whole corpus needs slightly more tokens" if found.is_trained else ""
    console.print(f"tokenizer {found.tokenizer}{trained}")
    console.print(
        f"about {_count(found.tokens)} tokens; store {_size(found.store_bytes)}, temporary files "
        f"{_size(found.work_bytes)}; {_time(found.seconds)} with one process of this machine (--workers divide it)"
    )
    console.print("estimated from the sample; duplicates are counted only when the whole corpus is read")


def _table(found: CorpusEstimate) -> Table:
    numbers = ("files", "bytes", "sampled", "kept", "bytes/token", "documents", "tokens")
    table = plain_table(["source"], numbers)
    for name, source in found.sources.items():
        table.add_row(name, *_cells(source))
    return table


def _cells(source: SourceEstimate) -> list[str]:
    per_token = source.bytes_per_token
    return [
        f"{source.files:,}",
        _size(source.file_bytes),
        f"{source.sampled:,}",
        f"{source.kept_share:.1%}",
        "—" if per_token is None else f"{per_token:.3f}",
        _count(source.documents),
        _count(source.tokens),
    ]


def _count(number: float) -> str:
    return _scaled(number, "", "")


def _size(num_bytes: float) -> str:
    return _scaled(num_bytes, " ", "B")


def _scaled(number: float, between: str, unit: str) -> str:
    """With three digits: no more of an estimate is right."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g}{between}{prefix}{unit}"
    return f"{number:.0f}{between}{unit}"


def _time(seconds: float) -> str:
    for factor, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.1f} {name}"
    return f"{seconds:.1f} seconds"
