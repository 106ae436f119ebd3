"""``lightscale data``: prepare, inspect, verify and upgrade token stores, and list the documents that a run read."""

import argparse
import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from lightscale.config.arguments import add_run, path_argument
from lightscale.data_pipeline.chat.prepared import MarkupTokenizer
from lightscale.data_pipeline.commands import made, plan, prepare, train_classifier, upgrade, verify
from lightscale.data_pipeline.commands.printed_report import print_report
from lightscale.data_pipeline.store.origins import Origin
from lightscale.data_pipeline.store.token_store import TokenSource, TokenStore, source_identity
from lightscale.data_pipeline.tokenizers import Tokenizer, load_tokenizer
from lightscale.output.terminal import plain_console

_SAMPLE_TOKENS, _CONVERSATION_TOKENS = 120, 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``lightscale data``."""
    commands = parser.add_subparsers(dest="data_command", metavar="COMMAND", title="commands", required=True)
    plan.add_parser(commands)
    prepare.add_parser(commands)
    train_classifier.add_parser(commands)
    made.add_parsers(commands)
    inspect = commands.add_parser("inspect", help="show the contents of a token store")
    inspect.add_argument("store", type=path_argument, metavar="STORE")
    inspect.add_argument("--sample", type=int, default=1, metavar="N", help="documents to show (default: 1)")
    inspect.add_argument("--json", action="store_true", help="print it as JSON")
    inspect.set_defaults(run_data=_inspect)
    verify.add_parser(commands)
    upgrade.add_parser(commands)
    samples = commands.add_parser("samples", help="list the documents that a training step read")
    add_run(samples)
    samples.add_argument("--step", type=int, required=True, metavar="N", help="the step, counted from 1")
    samples.add_argument("--json", action="store_true", help="print one JSON object")
    samples.set_defaults(run_data=_run_samples)
    trace = commands.add_parser(
        "trace",
        help="list the documents of a loss spike, with losses, files and lines",
        description="Without --spike: the steps whose loss stands out in the run's records. With it: the documents "
        "that the step read, highest loss first. Losses come from the nearest checkpoint before the step.",
    )
    add_run(trace)
    trace.add_argument("--spike", type=int, metavar="STEP", help="the step, counted from 1 (default: list the spikes)")
    trace.add_argument(
        "--top", type=int, metavar="N", help="show only the N documents with the highest loss (default: all)"
    )
    where = "directory of the corpus files, to find line numbers (default: the current directory)"
    trace.add_argument("--files", type=path_argument, default=Path(), metavar="DIR", help=where)
    trace.add_argument("--json", action="store_true", help="print one JSON object")
    trace.set_defaults(run_data=_run_trace)


def run(args: argparse.Namespace) -> int:
    """Run the chosen command; 0 when it is done, ``UserError`` for a user's mistake."""
    chosen: Callable[[argparse.Namespace], int] = args.run_data
    return chosen(args)


def _run_samples(args: argparse.Namespace) -> int:
    """Imported here, because it needs torch: the other commands must not wait for it."""
    return int(importlib.import_module("lightscale.data_pipeline.commands.samples").run(args))


def _run_trace(args: argparse.Namespace) -> int:
    """By name: it computes with a model, which stands above this package."""
    return int(importlib.import_module("lightscale.evaluation.trace.command").run(args))


def _inspect(args: argparse.Namespace) -> int:
    store = TokenStore(args.store)
    report = store.report()
    samples = list(_samples(store, args.sample))
    if args.json:
        sources = {
            name: {**report["sources"][name], **source_identity(source), **_extras(source)}
            for name, source in store.sources.items()
        }
        content = {
            "store": str(args.store),
            "format_version": store.format_version,
            "fingerprint": store.fingerprint(),
            "samples": samples,
        }
        print(json.dumps({**report, **content, "sources": sources}))
        return 0
    console = plain_console(soft_wrap=True)
    console.print(f"{args.store}: fingerprint {store.fingerprint()}")
    checked = "every block is verified when it is read" if store.is_checked else "`lightscale data upgrade` adds hashes"
    console.print(f"format {store.format_version}: {checked}")
    print_report(console, report)
    for name, source in store.sources.items():
        console.print(f"{name}: {_describe_extras(source)}")
    # What counts, also for those who see no colours.
    counts = "bold underline" if console.no_color or console.color_system is None else "bold green"
    for sample in samples:
        label = "" if sample["label"] is None else f", label {sample['label']}"
        console.rule(f"{sample['source']}, document {sample['document']:,}{label}{_place(sample['origin'])}")
        text = Text(sample["text"])
        for begin, end in sample["counted"] or ():
            text.stylize(counts, begin, end)
        console.print(text)
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
        stop = min(stop, start + 1 + (_CONVERSATION_TOKENS if source.has_loss_mask else _SAMPLE_TOKENS))
        text, counted = _text_and_counted(tokenizer, source.read(start + 1, stop), source.loss_mask(start + 1, stop))
        origin = source.origin(index)
        yield {
            "source": source.name,
            "document": index,
            "origin": asdict(origin) if origin else None,
            "label": store.label(source.name, index),
            "text": text,
            "counted": counted if source.has_loss_mask else None,
        }


def _text_and_counted(
    tokenizer: Tokenizer, ids: NDArray[np.uint32], mask: NDArray[np.uint8]
) -> tuple[str, list[tuple[int, int]]]:
    """The text of (n,) ``ids``, special tokens spelled, and the spans of it whose tokens count by the (n,) ``mask``."""
    decode = tokenizer.decode_markup if isinstance(tokenizer, MarkupTokenizer) else tokenizer.decode
    text, counted = "", []
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    for begin, end in itertools.pairwise(edges):
        part = decode(ids[begin:end])
        if end > begin and mask[begin] and part:
            counted.append((len(text), len(text) + len(part)))
        text += part
    return text, counted


def _extras(source: TokenSource) -> dict[str, Any]:
    """What a source has beside its tokens."""
    return {
        "loss_mask": source.has_loss_mask,
        "token_arrays": {name: _type_name(dtype) for name, dtype in source.token_arrays.items()},
        "document_arrays": {name: _type_name(dtype) for name, dtype in source.document_arrays.items()},
        "origins": source.has_origins,
    }


def _type_name(dtype: np.dtype[Any]) -> str:
    return " x ".join([str(dtype.base), *map(str, dtype.shape)])


def _describe_extras(source: TokenSource) -> str:
    tokens, documents = (
        ", ".join(f"{name} ({_type_name(dtype)})" for name, dtype in arrays.items())
        for arrays in (source.token_arrays, source.document_arrays)
    )
    return "; ".join(
        [
            "a loss mask selects the labels that count" if source.has_loss_mask else "every label counts",
            *([f"token arrays: {tokens}"] if tokens else []),
            f"document arrays: {documents}" if documents else "no document arrays",
            "files and positions of its documents" if source.has_origins else "origins of its documents not stored",
        ]
    )


def _place(origin: dict[str, Any] | None) -> str:
    return f", {origin['file']} {Origin(**origin).place}" if origin else ""
