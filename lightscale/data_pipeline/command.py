"""``lightscale data prepare`` and ``lightscale data inspect``."""

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from lightscale.data_pipeline.prepare import DEFAULT_VOCAB_SIZE, Preparation, prepare_store
from lightscale.data_pipeline.sources import (
    DEFAULT_SUFFIXES,
    STDLIB,
    Problems,
    SourceFile,
    list_files,
    list_stdlib,
)
from lightscale.data_pipeline.store import TokenStore, source_identity
from lightscale.data_pipeline.tokenizers import load_tokenizer
from lightscale.errors import UserError

_SAMPLE_TOKENS = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``lightscale data``."""
    commands = parser.add_subparsers(dest="data_command", metavar="COMMAND", title="commands", required=True)
    _add_prepare_arguments(commands.add_parser("prepare", help="turn files into a token store"))
    inspect = commands.add_parser("inspect", help="show what a token store holds")
    inspect.add_argument("store", type=Path, metavar="STORE")
    inspect.add_argument("--sample", type=int, default=1, metavar="N", help="documents to show (default: 1)")
    inspect.add_argument("--json", action="store_true", help="print it as JSON")
    inspect.set_defaults(run_data=_inspect)


def _add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="*", type=Path, metavar="PATH", help="files and directories of the corpus")
    add("--corpus", choices=[STDLIB], help="a corpus that every machine has: Python's own sources")
    add("--out", required=True, type=Path, metavar="STORE", help="the store to write; must not exist")
    add("--name", help="name of the source (default: that of the corpus or of the first path)")
    tokenizers = "sentencepiece (trained here), tiktoken:ENCODING, or the path of a store or .model file"
    add("--tokenizer", default="sentencepiece", help=f"{tokenizers} (default: %(default)s)")
    add("--vocab-size", type=int, help=f"ids of a tokenizer trained here (default: {DEFAULT_VOCAB_SIZE})")
    validation = "share of the documents to hold out (default: %(default)s)"
    add("--validation", type=float, default=0.02, metavar="SHARE", help=validation)
    suffixes = "ends of the names of the files to read in directories (default: %(default)s)"
    add("--suffixes", default=",".join(DEFAULT_SUFFIXES), help=suffixes)
    add("--text-field", default="text", help="field of the text in .jsonl files (default: %(default)s)")
    add("--strict", action="store_true", help="stop at the first text that cannot be read whole")
    add("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run_data=_prepare)


def run(args: argparse.Namespace) -> int:
    """Run the chosen command; 0 when it is done, ``UserError`` for a person's mistake."""
    chosen: Callable[[argparse.Namespace], int] = args.run_data
    return chosen(args)


def _prepare(args: argparse.Namespace) -> int:
    problems = Problems(strict=args.strict)
    started = time.monotonic()
    files, default_name = _corpus(args, problems)
    preparation = Preparation(
        files=files,
        out=args.out,
        name=args.name or default_name,
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
        validation=args.validation,
        text_field=args.text_field,
    )
    with _progress_bars() as progress:
        report = prepare_store(preparation, problems, progress)
    seconds = time.monotonic() - started
    if args.json:
        print(json.dumps({"store": str(args.out), "seconds": seconds, **report}, ensure_ascii=False))
        return 0
    console = _console()
    _print_report(console, report)
    if args.validation and len(report["sources"]) == 1:
        console.print("note: no document was held out; that takes more documents or a larger --validation")
    num_bytes = sum(source["bytes"] for source in report["sources"].values())
    rate = num_bytes / seconds / 1e6
    console.print(f"wrote {args.out} in {seconds:.1f} s ({rate:.2f} MB of text a second)")
    return 0


def _corpus(args: argparse.Namespace, problems: Problems) -> tuple[list[SourceFile], str]:
    """The files to read, and the source's name where none is given."""
    if bool(args.paths) == (args.corpus is not None):
        raise UserError(f"the corpus is either PATHs or --corpus {STDLIB}: exactly one of the two is needed")
    if args.corpus == STDLIB:
        return list_stdlib(problems), STDLIB
    suffixes = [suffix.strip() for suffix in args.suffixes.split(",") if suffix.strip()]
    first: Path = args.paths[0].resolve()
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", first.name if first.is_dir() else first.stem).strip("-.")
    return list_files(args.paths, problems, suffixes=suffixes), name or "corpus"


def _inspect(args: argparse.Namespace) -> int:
    store = TokenStore(args.store)
    report = store.report()
    samples = list(_samples(store, args.sample))
    if args.json:
        sources = {
            name: {**report["sources"][name], **source_identity(source)} for name, source in store.sources.items()
        }
        content = {"store": str(args.store), "fingerprint": store.fingerprint(), "samples": samples}
        print(json.dumps({**report, **content, "sources": sources}, ensure_ascii=False))
        return 0
    console = _console()
    console.print(f"{args.store}: fingerprint {store.fingerprint()}")
    _print_report(console, report)
    for sample in samples:
        console.rule(f"{sample['source']}, document {sample['document']:,}")
        console.print(Text(sample["text"]))
    return 0


def _samples(store: TokenStore, num_documents: int) -> Iterator[dict[str, Any]]:
    """The beginnings of ``num_documents`` documents, spread evenly over the store's largest source."""
    if num_documents < 1:
        return
    tokenizer = load_tokenizer(store.path)
    source = max(store.sources.values(), key=lambda source: source.num_tokens)
    count = min(num_documents, source.num_documents)
    for index in (number * source.num_documents // count for number in range(count)):
        start, stop = source.document(index)
        ids = source.read(start + 1, min(stop, start + 1 + _SAMPLE_TOKENS))
        yield {"source": source.name, "document": index, "text": tokenizer.decode(ids)}


def _console() -> Console:
    """Plain text, lines unbroken: it may be a pipe to another program."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def _print_report(console: Console, report: dict[str, Any]) -> None:
    tokenizer = report["tokenizer"]
    console.print(
        f"tokenizer {tokenizer['name']}: {tokenizer['vocab_size']:,} ids, end of text {tokenizer['eot_id']}, "
        f"sha256 {tokenizer['sha256'][:16]}…"
    )
    table = Table("source")
    for heading in ("documents", "MB of text", "tokens", "bytes/token"):
        table.add_column(heading, justify="right")
    for name, source in report["sources"].items():
        table.add_row(
            name,
            f"{source['documents']:,}",
            f"{source['bytes'] / 1e6:,.2f}",
            f"{source['tokens']:,}",
            f"{source['bytes_per_token']:.3f}",
        )
    console.print(table)
    entropy = report["unigram_entropy_nats"]
    console.print(f"unigram entropy: {entropy['train']:.4f} nats/token (training split)")
    if "validation" in entropy:
        console.print(
            f"    validation split: {entropy['validation']:.4f} nats/token by its own frequencies, "
            f"{entropy['validation_under_train']:.4f} by those of the training split"
        )
    for reason, problem in report["problems"].items():
        console.print(f"warning: {reason}: {problem['count']:,}")
        for place in problem["examples"][:5]:
            console.print(f"    {place}")


@contextmanager
def _progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for every step, on stderr, with rate and time left."""
    bars = Progress(
        TextColumn("{task.description:>24}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    tasks: dict[str, Any] = {}

    def show(step: str, done: int, total: int) -> None:
        if step not in tasks:
            tasks[step] = bars.add_task(step, total=total)
        bars.update(tasks[step], completed=done)

    with bars:
        yield show
