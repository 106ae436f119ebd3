"""From a corpus to a token store, from top to bottom: plan, tokenizer, units, duplicates, shards, store.

    read ▸ normalise ▸ filter ▸ tokenize ▸ keys      a unit of files at a time, by any worker     units.py
    deduplicate                                      some key files, or a range of keys, at a time deduplication.py
    write                                            a shard file at a time                       assemble.py

A unit of work is a part of the corpus that one task processes (``plan.py``). The result does not depend on time,
machine, number of workers or interruptions: the same corpus and versions give the same store, byte for byte. Finished
work is kept in STORE.work, and the same command continues from it. The README of ``data_pipeline`` lists the uses of
memory that grow with the corpus.
"""

import functools
import itertools
import json
import platform
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from lightscale import __version__
from lightscale.data_pipeline.executors import Advance, Executor, ExecutorFactory, InProcess, Progress, Task
from lightscale.data_pipeline.preparation import assemble, deduplication
from lightscale.data_pipeline.preparation.base import BaseStore
from lightscale.data_pipeline.preparation.corpus import (
    ASCII_TOKENIZER,
    BYTE_TOKENIZER,
    DEFAULT_VOCAB_SIZE,
    TRAINED_TOKENIZER,
    Corpus,
)
from lightscale.data_pipeline.preparation.html_report import make_html_report
from lightscale.data_pipeline.preparation.plan import PreparationPlan, UnitSummary, read_plan, write_plan
from lightscale.data_pipeline.preparation.removed import export, require_new
from lightscale.data_pipeline.preparation.report import DropSummary, make_report
from lightscale.data_pipeline.preparation.tokenizer_sample import TextSample
from lightscale.data_pipeline.preparation.units import Context, prepare_unit, sample_unit
from lightscale.data_pipeline.preparation.work_directory import WorkDirectory, differences, explain_full_disk
from lightscale.data_pipeline.store.format import (
    HTML_REPORT_FILE,
    LABEL,
    SPLITS,
    TOKENIZER_DIR,
    Split,
    publish,
    require_absent,
    write_root,
)
from lightscale.data_pipeline.store.origins import write_input_files
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.tokenizers import (
    AsciiTokenizer,
    Tokenizer,
    load_tiktoken,
    load_tokenizer,
    train_sentencepiece,
)
from lightscale.data_pipeline.tokenizers.symbols import byte_tokenizer
from lightscale.data_pipeline.whole_files import whole_directory
from lightscale.errors import UserError, counted, shortened

# Part of what a work directory is compared by: raised when units, keys, shards or the files in it differ from before.
PIPELINE_VERSION = 9
# So many units are read to train a tokenizer, spread evenly over the corpus.
_SAMPLED_UNITS = 64


def _silent(step: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """How a store is made: none of these changes a byte of it, but ``unit_bytes`` the number of units in the report."""

    make_executor: ExecutorFactory = InProcess
    """Makes the executor of the tasks."""
    strict: bool = False
    """Stop at the first text that cannot be read whole."""
    restart: bool = False
    """Discard the results of an earlier, interrupted preparation."""
    keep_removed: Path | None = None
    """A new directory for the documents that filters drop, SOURCE.jsonl.zst, with rule and score; none: not kept."""
    unit_bytes: int | None = None
    """Size of a unit of work; none: a 1024th of the corpus within 1 to 64 MiB."""
    base: Path | None = None
    """The store whose documents come first, with their tokenizer; files that it has are not read. None: no such."""


def prepare(
    corpus: Corpus, out: Path, options: PrepareOptions | None = None, progress: Progress = _silent
) -> dict[str, Any]:
    """Write the store ``out`` and return its report. Continues from the results of an interrupted call in OUT.work.

    Raises ``UserError`` for mistakes in the corpus, a corpus without training data, an existing ``out``, another corpus
    in OUT.work, and a full disk. There is no ``out`` then; OUT.work stays if any unit is finished.
    """
    options = options or PrepareOptions()
    work = WorkDirectory.beside(out)
    # A recipe and not a context: every worker process makes its own, when the work directory has what it reads.
    make_context = functools.partial(Context, work, strict=options.strict)
    with work.locked(), options.make_executor(make_context) as executor:
        try:
            with explain_full_disk(work):
                return _prepare(corpus, out, work, options, executor, progress)
        except UserError:
            if not work.has_finished_work():
                work.remove()
            raise


def _prepare(
    corpus: Corpus, out: Path, work: WorkDirectory, options: PrepareOptions, executor: Executor, progress: Progress
) -> dict[str, Any]:
    if (report := _finished_before(out, work)) is not None:
        return report
    _begin(corpus, work, options)
    plan = read_plan(work.plan)

    def run(step: str, task: Task, items: Sequence[Any], sizes: Sequence[int]) -> None:
        executor.run(step, functools.partial(_explained, step, task), items, sizes, progress)

    def run_on(step: str, task: Task, units: Sequence[UnitSummary]) -> None:
        run(step, task, units, [unit.num_bytes for unit in units])

    # Tokenizing needs the tokenizer, and that needs texts: so a trained one costs a first pass over some of the units.
    if not (work.path / TOKENIZER_DIR).exists():
        run_on("sample for the tokenizer", sample_unit, _sampled(plan))
        _train_tokenizer(corpus, work, plan)

    run_on("read, filter, tokenize", prepare_unit, plan.units)

    # Duplicates are found over all units, when all keys are there; the documents themselves are not read again.
    base = Context(work, strict=options.strict).base
    if base is not None:
        known = deduplication.known_files(base)
        run("check the store's keys", deduplication.check_known, known, [file.num_bytes for file in known])
    for kind in deduplication.KINDS:
        files = deduplication.list_key_files(work, kind, base)
        for step in deduplication.steps(files, kind):
            run(step.name, step.task, step.items, [item.num_bytes for item in step.items])

    run_on("count kept documents", assemble.count_kept, plan.units)
    # Shards are cut by the number of tokens that are kept, so they are known only now.
    context = Context(work, strict=options.strict)
    _require_documents(context)
    run("write shards", assemble.write_shard, *assemble.shard_jobs(context))
    if options.keep_removed is not None:
        export(work, plan, options.keep_removed)
    return _finish(context, out)


def _explained(step: str, task: Task, context: Context, item: Any, advance: Advance) -> None:
    """``task``, in a worker; its errors say what it was at."""
    try:
        with explain_full_disk(context.work):
            task(context, item, advance)
    except UserError:
        raise
    except Exception as error:
        name = shortened(repr(item))
        if isinstance(item, UnitSummary):
            files = ", ".join(part.file.id for part in context.plan.file_ranges(item))
            name = f"unit {item.number} of source {item.source}: {shortened(files, 1000)}"
        error.add_note(f"while: {step}, {name}")
        raise


def _finished_before(out: Path, work: WorkDirectory) -> dict[str, Any] | None:
    """The report of a store that an earlier call completed but was stopped before it removed the work directory."""
    state = work.read_state()
    if state is not None and state.get("finishing") and not work.store.exists() and out.exists():
        report = TokenStore(out).report()
        work.remove()
        return report
    require_absent(out)
    return None


def _begin(corpus: Corpus, work: WorkDirectory, options: PrepareOptions) -> None:
    """Make the plan, or find that the one that is there is the same."""
    work.require_own()
    before = None if options.restart else work.read_state()
    if before is None:
        if options.keep_removed is not None:
            require_new(options.keep_removed)
        work.empty()
    work.clean()
    base = None if options.base is None else BaseStore(options.base.resolve())
    tokenizer, chats = given_tokenizer(corpus), corpus.chats()
    if base is not None:
        base.require_tokenizer(corpus, tokenizer.sha256 if tokenizer else None)
        corpus, tokenizer = base.fitted(corpus), load_tokenizer(base.path)
        base.require_chats(chats, corpus)
        base.weights(corpus, [*base.store.training_weights(), *(name for name in corpus.sources)])
    known = None if base is None else base.known_files
    plan_sha256 = write_plan(work.new_plan, corpus, unit_bytes=options.unit_bytes, strict=options.strict, known=known)
    state = {
        "base": None if base is None else str(base.path),
        "base_fingerprint": None if base is None else base.store.fingerprint(),
        "corpus": corpus.model_dump(mode="json"),
        "files": plan_sha256,
        "tokenizer": tokenizer.sha256 if tokenizer else None,
        "filter_files": corpus.filter_files(),
        "chat_templates": {name: asdict(chat.files) for name, chat in chats.items()},
        "keep_removed": str(options.keep_removed.resolve()) if options.keep_removed is not None else None,
        "versions": _versions(),
    }
    if before is not None:
        before.pop("finishing", None)
        if changes := differences(before, state):
            work.new_plan.unlink()
            # The corpus may be as it was, and the program another.
            earlier = "versions" if all(change.startswith("versions.") for change in changes) else "corpus"
            raise UserError(
                f"{work.path}: it holds part of a different store ({'; '.join(changes)}); use the earlier {earlier} "
                f"to finish that store, or --restart to discard its work"
            )
    work.new_plan.replace(work.plan)
    if tokenizer is not None and not (work.path / TOKENIZER_DIR).exists():
        _save_tokenizer(work, tokenizer)
    work.write_state(state)


def _versions() -> dict[str, Any]:
    """What a store's bytes may depend on beside its corpus."""
    return {
        "lightscale": __version__,
        "pipeline": PIPELINE_VERSION,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "zarr": zarr.__version__,
    }


def given_tokenizer(corpus: Corpus) -> Tokenizer | None:
    """The tokenizer that the corpus names; None: the preparation trains one."""
    choice = corpus.tokenizer
    if choice == TRAINED_TOKENIZER:
        return None
    if choice == ASCII_TOKENIZER:
        return AsciiTokenizer()
    if choice == BYTE_TOKENIZER:
        return byte_tokenizer()
    if choice.startswith("tiktoken:"):
        return load_tiktoken(choice.removeprefix("tiktoken:"))
    if not Path(choice).exists():
        raise UserError(
            f"tokenizer {choice}: no such file; use sentencepiece, ascii, bytes, tiktoken:ENCODING "
            "(tiktoken:cl100k_base), "
            "or the path of a store or a tokenizer's file"
        )
    return load_tokenizer(Path(choice))


def _save_tokenizer(work: WorkDirectory, tokenizer: Tokenizer) -> None:
    with whole_directory(work.path / TOKENIZER_DIR) as directory:
        tokenizer.save(directory)


def _sampled(plan: PreparationPlan) -> list[UnitSummary]:
    count = min(len(plan.units), _SAMPLED_UNITS)
    return [plan.units[index * len(plan.units) // count] for index in range(count)]


def _train_tokenizer(corpus: Corpus, work: WorkDirectory, plan: PreparationPlan) -> None:
    sample, seen = TextSample(), DropSummary()
    for unit in _sampled(plan):
        content = json.loads(work.entry("samples", unit.number, ".json").read_bytes())
        seen.add(content["counts"])
        sample.merge(content["sample"])
    excerpts = [text for _, text in sample.excerpts()]
    if not excerpts:
        raise UserError(f"no training document remains: {seen.description(corpus, plan)}")
    _save_tokenizer(work, train_sentencepiece(excerpts, vocab_size=corpus.vocab_size or DEFAULT_VOCAB_SIZE))
    shutil.rmtree(work.path / "samples")


def _require_documents(context: Context) -> None:
    outputs = assemble.output_sources(context)
    if context.base is not None:
        is_empty = not any(sum(output.unit_documents) for output in outputs)
    else:
        is_empty = not any(output.split == "train" for output in outputs)
    if is_empty:
        seen = DropSummary()
        for unit in context.plan.units:
            seen.add(assemble.unit_files(context, unit).counts())
            seen.drop(assemble.read_kept(context, unit)["deduplicate"])
        description = seen.description(context.corpus, context.plan)
        context.work.remove()
        if context.base is not None:
            files = context.plan.num_known_files
            known = f"{counted(files, 'file')} {'is' if files == 1 else 'are'} in {context.base.path} already"
            raise UserError(f"no new document remains: {description}; {known}")
        raise UserError(f"no training document remains: {description}")


def _finish(context: Context, out: Path) -> dict[str, Any]:
    """Write metadata and report, then give the store its name."""
    work, outputs = context.work, assemble.output_sources(context)
    vocab_size = context.tokenizer.vocab_size
    token_counts: dict[Split, Any] = {split: np.zeros(vocab_size, dtype=np.int64) for split in SPLITS}
    for output in outputs:
        token_counts[output.split] += assemble.write_source(context, output)
    # What workers left that died meanwhile must not become a part of the store.
    work.clean(work.store)
    report = make_report(context, outputs, token_counts)
    (work.store / HTML_REPORT_FILE).write_text(make_html_report(report), encoding="utf-8")
    (work.store / "zarr.json").unlink(missing_ok=True)  # of an interrupted attempt
    corpus, names = context.corpus, sorted(output.name for output in outputs)
    files, base = context.plan.files(), context.base
    write_input_files(
        work.store,
        itertools.chain(base.files.names_and_sizes(), files) if base else files,
        shard_tokens=corpus.shard_tokens,
        chunk_tokens=corpus.chunk_tokens,
    )
    deduplication.write_known(context)
    if base is None:
        weights = {name: weight for name, weight in (corpus.weights or {}).items() if name in names}
    else:
        weights = dict(base.weights(corpus, [output.name for output in outputs if output.split == "train"]))
    classes = assemble.classes(context)
    write_root(
        work.store,
        context.tokenizer,
        names,
        report,
        weights=weights,
        classes={LABEL: classes} if classes else None,
    )
    state = work.read_state()
    assert state is not None
    # Between the rename and the removal of the work directory both are there: this says that the work is done, not
    # that the store is in the way.
    work.write_state({**state, "finishing": True})
    publish(work.store, out)
    work.remove()
    return report
