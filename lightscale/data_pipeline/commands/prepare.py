"""``lightscale data prepare``: a corpus file, or paths and a few options, to a token store; images: ``images.py``."""

import argparse
import contextlib
import functools
import time
from typing import Any

from lightscale.config.arguments import path_argument
from lightscale.data_pipeline.commands.corpus import add_corpus, is_corpus_file, read_corpus
from lightscale.data_pipeline.commands.images import add_images, check_no_images, prepare_images_command
from lightscale.data_pipeline.commands.printed_report import show_store
from lightscale.data_pipeline.executors import ExecutorFactory, InProcess, ProcessPool, mpi
from lightscale.data_pipeline.executors.ray_cluster import RayCluster
from lightscale.data_pipeline.preparation.corpus import DuplicatesConfig
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare
from lightscale.data_pipeline.store.format import VALIDATION_SUFFIX
from lightscale.errors import UserError, counted
from lightscale.output.progress import progress_bars

_EXECUTORS = ("processes", "mpi", "ray")


def add_parser(commands: Any) -> None:
    """Add ``prepare`` to the commands of ``lightscale data``."""
    parser = commands.add_parser("prepare", help="prepare a token store from a corpus, or from images")
    parser.set_defaults(run_data=_prepare, base=None)
    _add_arguments(parser)
    add_images(parser)
    parser = commands.add_parser(
        "add",
        help="extend a token store with new files",
        description="Write a new store with the documents of STORE and of new files of a corpus. Files already in "
        "STORE (same name and size) are not read. Duplicates of documents in STORE are dropped. Tokenizer, "
        "deduplication, classes and shard sizes are those of STORE. STORE does not change, so runs can continue to "
        "train on it; full shards are shared through hard links.",
    )
    parser.add_argument("base", type=path_argument, metavar="STORE", help="a store of `data prepare` or `data add`")
    parser.set_defaults(run_data=_prepare_texts)
    _add_arguments(parser)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_corpus(parser)
    add = parser.add_argument
    add("--out", required=True, type=path_argument, metavar="STORE", help="the store to write; must not exist")
    add("--workers", type=int, metavar="N", help="processes on this machine (default: 1)")
    engines = "where tasks run: local processes, the ranks of this MPI program, or a Ray cluster (default: processes)"
    add("--executor", choices=_EXECUTORS, help=engines)
    add("--mpi", action="store_const", const="mpi", dest="executor", help="same as --executor mpi")
    add("--strict", action="store_true", help="stop at the first text that cannot be read completely")
    add("--restart", action="store_true", help="discard the work of an interrupted preparation")
    add(
        "--keep-removed",
        type=path_argument,
        metavar="DIR",
        help="new directory for the documents that filters drop: SOURCE.jsonl.zst, with rule and score; must not exist",
    )
    add("--json", action="store_true", help="print the report as JSON")


def _prepare(args: argparse.Namespace) -> int:
    if args.images is not None or args.latents is not None:
        return prepare_images_command(args)
    check_no_images(args)
    return _prepare_texts(args)


def _prepare_texts(args: argparse.Namespace) -> int:
    with _executor(args) as make_executor:
        return 0 if make_executor is None else _prepare_with(make_executor, args)


def _prepare_with(make_executor: ExecutorFactory, args: argparse.Namespace) -> int:
    corpus = read_corpus(args)
    if args.base is not None and not is_corpus_file(args):
        corpus = corpus.model_copy(update={"duplicates": DuplicatesConfig()})  # those of the store
    options = PrepareOptions(
        make_executor=make_executor,
        strict=args.strict,
        restart=args.restart,
        keep_removed=args.keep_removed,
        base=args.base,
    )
    started = time.monotonic()
    with progress_bars() as progress:
        report = prepare(corpus, args.out, options, progress)
    seconds = time.monotonic() - started
    if (console := show_store(args, report, seconds)) is None:
        return 0
    if args.base is not None:
        console.print(_added(report))
    elif none_held_out := [
        name
        for name in corpus.sources
        if corpus.validation_of(name) and name + VALIDATION_SUFFIX not in report["sources"]
    ]:
        names = ", ".join(none_held_out)
        console.print(f"note: no document of {names} was held out; use more documents or a larger validation share")
    num_bytes = sum(source["stages"]["read"]["bytes"] for source in report["corpus"].values())
    rate = num_bytes / seconds / 1e6
    console.print(f"wrote {args.out} in {seconds:.1f} s ({rate:.2f} MB of text per second); see {args.out}/report.html")
    return 0


def _added(report: dict[str, Any]) -> str:
    """Counts of the new files, beside those of the old store."""
    stages = [source["stages"] for source in report["corpus"].values()]
    old = sum(source["documents"] for source in report["base"]["sources"].values())
    read, new = (sum(one[name]["documents"] for one in stages) for name in ("read", "tokenize"))
    dropped = sum(one["documents"] for stage in stages for one in stage["deduplicate"]["dropped"].values())
    known = report["known"]
    return (
        f"{counted(old, 'old document')}; {new:,} new of {read:,} read in {counted(report['files'], 'file')}; "
        f"duplicates: {known['documents']:,} of old documents, {dropped - known['documents']:,} of each other; "
        f"{counted(known['files'], 'old file')} skipped"
    )


def _executor(args: argparse.Namespace) -> contextlib.AbstractContextManager[ExecutorFactory | None]:
    """For what makes the executor; None in a process that has worked for another and is finished."""
    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers}: use at least 1")
    if args.workers is not None and args.executor in ("mpi", "ray"):
        sets = {"mpi": "the launcher sets the number of ranks (mpiexec -n)", "ray": "Ray places tasks on free CPUs"}
        raise UserError(f"--workers and --executor {args.executor}: use only one; {sets[args.executor]}")
    match args.executor:
        case "mpi":
            return mpi.ranks()
        case "ray":
            return contextlib.nullcontext(RayCluster)
        case _:
            many = args.workers is not None and args.workers > 1
            return contextlib.nullcontext(
                functools.partial(ProcessPool, num_workers=args.workers) if many else InProcess
            )
