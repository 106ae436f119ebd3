"""``lightscale data prepare``: a corpus file, or paths and a few options, to a token store."""

import argparse
import functools
import json
import re
import time
from pathlib import Path
from typing import Any

from lightscale.data_pipeline.commands.output import plain_console, print_report, progress_bars
from lightscale.data_pipeline.executors import InProcess, MPIRanks, ProcessPool
from lightscale.data_pipeline.preparation.corpus import (
    DEFAULT_VOCAB_SIZE,
    TRAINED_TOKENIZER,
    Corpus,
    load_corpus,
    make_corpus,
)
from lightscale.data_pipeline.preparation.prepare import ExecutorFactory, PrepareOptions, prepare
from lightscale.data_pipeline.preparation.sources import DEFAULT_SUFFIXES, STDLIB, STDLIB_PATH
from lightscale.errors import UserError

_CORPUS_SUFFIX = ".toml"
_DEFAULT_VALIDATION = 0.02
# With a corpus file these are keys of the file.
_PATH_OPTIONS = ("name", "tokenizer", "vocab_size", "validation", "suffixes", "text_field", "language")


def add_parser(commands: Any) -> None:
    """Add ``prepare`` to the commands of ``lightscale data``."""
    parser = commands.add_parser("prepare", help="turn a corpus into a token store")
    add = parser.add_argument
    add(
        "paths",
        nargs="*",
        default=[],
        type=Path,
        metavar="CORPUS.toml | PATH",
        help="a corpus file, or files and directories",
    )
    add("--corpus", choices=[STDLIB], help="a corpus that every machine has: Python's own sources")
    add("--out", required=True, type=Path, metavar="STORE", help="the store to write; must not exist")
    add("--workers", type=int, metavar="N", help="processes on this machine (default: 1)")
    add("--mpi", action="store_true", help="divide the work among the ranks of this MPI program")
    add("--strict", action="store_true", help="stop at the first text that cannot be read whole")
    add("--restart", action="store_true", help="discard what an interrupted preparation has finished")
    add("--json", action="store_true", help="print the report as JSON")
    own = parser.add_argument_group("for PATHs and --corpus (in a corpus file, these are its keys)")
    add = own.add_argument
    add("--name", help="name of the source (default: that of the corpus or of the first path)")
    tokenizers = "sentencepiece (trained here), tiktoken:ENCODING, or the path of a store or a tokenizer's file"
    add("--tokenizer", help=f"{tokenizers} (default: {TRAINED_TOKENIZER})")
    add("--vocab-size", type=int, help=f"ids of a tokenizer trained here (default: {DEFAULT_VOCAB_SIZE})")
    validation = f"share of the documents to hold out (default: {_DEFAULT_VALIDATION})"
    add("--validation", type=float, metavar="SHARE", help=validation)
    suffixes = f"ends of the names of the files to read in directories (default: {','.join(DEFAULT_SUFFIXES)})"
    add("--suffixes", help=suffixes)
    add("--text-field", help="field of the text in jsonl and parquet files (default: text)")
    add("--language", help="drop documents that break the rules of this language (default: keep all)")
    parser.set_defaults(run_data=_prepare)


def _prepare(args: argparse.Namespace) -> int:
    make_executor, is_main = _executor(args)
    try:
        corpus = _corpus(args)
        options = PrepareOptions(make_executor=make_executor, strict=args.strict, restart=args.restart)
        report, seconds = _make_store(corpus, args.out, options, is_main=is_main)
    except UserError:
        if is_main:
            raise
        raise SystemExit(UserError.EXIT_CODE) from None  # every rank has the same error; the main one prints it
    if not is_main:
        return 0
    if args.json:
        print(json.dumps({"store": str(args.out), "seconds": seconds, **report}, ensure_ascii=False))
        return 0
    console = plain_console()
    print_report(console, report)
    if len(report["sources"]) == len(report["corpus"]) and any(map(corpus.validation_of, corpus.sources)):
        console.print("note: no document was held out; use more documents or a larger validation share")
    num_bytes = sum(source["stages"]["read"]["bytes"] for source in report["corpus"].values())
    rate = num_bytes / seconds / 1e6
    console.print(f"wrote {args.out} in {seconds:.1f} s ({rate:.2f} MB of text a second); see {args.out}/report.html")
    return 0


def _make_store(corpus: Corpus, out: Path, options: PrepareOptions, *, is_main: bool) -> tuple[dict[str, Any], float]:
    if not is_main:
        return prepare(corpus, out, options), 0.0
    started = time.monotonic()
    with progress_bars() as progress:
        report = prepare(corpus, out, options, progress)
    return report, time.monotonic() - started


def _executor(args: argparse.Namespace) -> tuple[ExecutorFactory, bool]:
    """What makes the executor, and whether this process shows progress and results."""
    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers}: use at least 1")
    if not args.mpi:
        many = args.workers is not None and args.workers > 1
        return (functools.partial(ProcessPool, num_workers=args.workers) if many else InProcess), True
    if args.workers is not None:
        raise UserError(
            "--workers and --mpi: use only one; with --mpi the launcher sets the number of processes (mpiexec -n)"
        )
    try:
        from mpi4py import MPI  # noqa: PLC0415 - an optional package, which starts MPI when it is imported
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"--mpi needs mpi4py and an MPI library ({error}); pip install 'lightscale[mpi]' and, without an MPI on "
            "this machine, pip install mpich"
        ) from error
    return functools.partial(MPIRanks, comm=MPI.COMM_WORLD), MPI.COMM_WORLD.rank == 0


def _corpus(args: argparse.Namespace) -> Corpus:
    """The corpus of the command line, in either form."""
    files = [path for path in args.paths if path.suffix == _CORPUS_SUFFIX]
    if bool(args.paths) == (args.corpus is not None) or (files and len(args.paths) > 1):
        raise UserError(f"the corpus is one CORPUS.toml, or PATHs, or --corpus {STDLIB}: use exactly one of these")
    if not files:
        return _corpus_of_paths(args)
    given = [name for name in _PATH_OPTIONS if getattr(args, name) is not None]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"{options}: not possible with a corpus file; set the key in {files[0]}")
    return load_corpus(files[0])


def _corpus_of_paths(args: argparse.Namespace) -> Corpus:
    """One source. Every document is kept, unless a language is given."""
    if args.corpus == STDLIB:
        paths, name = [STDLIB_PATH], STDLIB
    else:
        first: Path = args.paths[0].resolve()
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", first.name if first.is_dir() else first.stem).strip("-.") or "corpus"
        paths = [str(path) for path in args.paths]
    source: dict[str, Any] = {"paths": paths}
    if args.suffixes is not None:
        source["suffixes"] = [suffix.strip() for suffix in args.suffixes.split(",") if suffix.strip()]
    if args.text_field is not None:
        source["text_field"] = args.text_field
    if args.language is not None:
        source["language"] = args.language
    tokenizer = args.tokenizer or TRAINED_TOKENIZER
    table: dict[str, Any] = {
        "tokenizer": tokenizer,
        "validation": _DEFAULT_VALIDATION if args.validation is None else args.validation,
        "duplicates": {"exact": False, "near": False},
        "sources": {args.name or name: source},
    }
    if args.vocab_size is not None:
        table["vocab_size"] = args.vocab_size
    return make_corpus(table, origin="command line")
