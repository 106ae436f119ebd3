"""``lightscale data prepare``: a corpus file, or paths and a few options, to a token store."""

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

from lightscale.config.arguments import path_argument
from lightscale.data_pipeline.commands.corpus import add_corpus, read_corpus
from lightscale.data_pipeline.commands.output import plain_console, print_report, progress_bars
from lightscale.data_pipeline.executors import InProcess, MPIRanks, ProcessPool
from lightscale.data_pipeline.preparation.corpus import Corpus
from lightscale.data_pipeline.preparation.prepare import ExecutorFactory, PrepareOptions, prepare
from lightscale.errors import UserError


def add_parser(commands: Any) -> None:
    """Add ``prepare`` to the commands of ``lightscale data``."""
    parser = commands.add_parser("prepare", help="turn a corpus into a token store")
    add_corpus(parser)
    add = parser.add_argument
    add("--out", required=True, type=path_argument, metavar="STORE", help="the store to write; must not exist")
    add("--workers", type=int, metavar="N", help="processes on this machine (default: 1)")
    add("--mpi", action="store_true", help="divide the work among the ranks of this MPI program")
    add("--strict", action="store_true", help="stop at the first text that cannot be read whole")
    add("--restart", action="store_true", help="discard what an interrupted preparation has finished")
    add(
        "--keep-removed",
        type=path_argument,
        metavar="DIR",
        help="write the documents that filters drop there, SOURCE.jsonl.zst, with rule and score; must not exist",
    )
    add("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run_data=_prepare)


def _prepare(args: argparse.Namespace) -> int:
    make_executor, is_main = _executor(args)
    try:
        corpus = read_corpus(args)
        options = PrepareOptions(
            make_executor=make_executor, strict=args.strict, restart=args.restart, keep_removed=args.keep_removed
        )
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
