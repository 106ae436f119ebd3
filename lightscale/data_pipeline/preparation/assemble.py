"""From units to shards: the kept documents of every unit, in order, cut into shard files that are written separately.

A shard does not begin where a unit begins. The counts of kept documents of every unit give the units and documents of
each shard file. Shards are therefore independent tasks.

kept/NNNNNN.json                  counts of a unit by split, its dropped duplicates, lengths
shards/SOURCE.ARRAY/NNNNNN.json   hashes of a finished shard; of tokens also NNNNNN.npy, how often each id is in it
"""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.executors import Advance
from lightscale.data_pipeline.preparation.base import KNOWN, NOTHING, BaseCounts
from lightscale.data_pipeline.preparation.counts import MAX_EXAMPLES, Dropped, StepCounts, excerpt, length_histogram
from lightscale.data_pipeline.preparation.deduplication import UnitDuplicates
from lightscale.data_pipeline.preparation.labels import check_number, in_order
from lightscale.data_pipeline.preparation.plan import UNIT_SHIFT, UnitSummary
from lightscale.data_pipeline.preparation.units import Context, UnitFiles
from lightscale.data_pipeline.store.format import (
    DOCUMENTS_PREFIX,
    HASHES_DIR,
    ID_ENDS,
    IDS,
    LABEL,
    LOSS_MASK,
    ORIGINS,
    SPLITS,
    VALIDATION_SUFFIX,
    SourceCounts,
    Split,
    array_layouts,
    document_layout,
    write_array_metadata,
    write_source_attributes,
)
from lightscale.data_pipeline.store.origins import origin_rows
from lightscale.data_pipeline.store.shards import ShardFileWriter, ShardHashes, ShardLayout, finish_shard
from lightscale.data_pipeline.whole_files import whole_file, write_array, write_json

_TOKENS_AT_ONCE = 2**21
_EXAMPLE_TOKENS = 100


def count_kept(context: Context, unit: UnitSummary, advance: Advance) -> None:
    """The task that counts the kept documents of a unit."""
    target = context.work.entry("kept", unit.number, ".json")
    if not target.exists():
        files = unit_files(context, unit)
        duplicates = UnitDuplicates(context.work, unit)
        records, kept = files.records, duplicates.kept_mask(len(files.records))
        stage = StepCounts(documents=int(kept.sum()), bytes=int(records["bytes"][kept].sum(dtype=np.int64)))
        for reason, numbers in duplicates.numbers.items():
            if len(numbers):
                stage.dropped[reason] = _dropped(context, files, numbers, duplicates.kept_ids[reason])
        splits = {split: _counts(files, kept & _of_split(records, split)) for split in SPLITS}
        known = sum(int((ids == KNOWN).sum()) for ids in duplicates.kept_ids.values()) if context.base else 0
        write_json(target, {"deduplicate": stage.as_json(), "splits": splits, "known": known})
    advance(unit.num_bytes)


def unit_files(context: Context, unit: UnitSummary) -> UnitFiles:
    """The files of a finished unit."""
    return UnitFiles(directory=context.work.entry("units", unit.number))


def _of_split(records: NDArray[np.void], split: Split) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = records["validation"] == (split == "validation")
    return mask


def _counts(files: UnitFiles, chosen: NDArray[np.bool_]) -> dict[str, Any]:
    records, labels, names = files.records[chosen], files.labels(), files.classes()
    of_class = np.bincount(labels[chosen] if len(labels) else labels, minlength=len(names))
    return {
        "documents": len(records),
        "tokens": int(records["tokens"].sum(dtype=np.int64)) + len(records),
        "bytes": int(records["bytes"].sum(dtype=np.int64)),
        "id_bytes": int(records["id_bytes"].sum(dtype=np.int64)),
        "lengths": length_histogram(records["tokens"] + 1).tolist(),
        "classes": {name: int(count) for name, count in zip(names, of_class, strict=True) if count},
    }


def _dropped(context: Context, files: UnitFiles, numbers: NDArray[np.int64], kept_ids: NDArray[np.uint64]) -> Dropped:
    """The count of some duplicates with the first as examples."""
    few = numbers[:MAX_EXAMPLES].tolist()
    starts = np.cumsum(files.records["tokens"], dtype=np.int64) - files.records["tokens"]
    tokens = files.tokens()
    examples = []
    for number, name, kept_id in zip(few, files.names(few), kept_ids.tolist(), strict=False):
        stop = starts[number] + min(int(files.records["tokens"][number]), _EXAMPLE_TOKENS)
        text = context.tokenizer.decode(tokens[starts[number] : stop])
        examples.append({"id": name, "text": excerpt(text), "like": _name(context, kept_id)})
    num_bytes = int(files.records["bytes"][numbers].sum(dtype=np.int64))
    return Dropped(documents=len(numbers), bytes=num_bytes, examples=examples)


def _name(context: Context, document: int) -> str:
    if context.base is not None and document == KNOWN:
        return context.base.path.name  # which one of its documents is not kept
    unit = context.plan.units[document >> UNIT_SHIFT]
    return unit_files(context, unit).names([document & ((1 << UNIT_SHIFT) - 1)])[0]


@dataclass(frozen=True, kw_only=True)
class OutputSource:
    """A source of the store: the kept documents of one split of the units of one source of the corpus."""

    name: str
    split: Split
    units: list[UnitSummary]
    unit_documents: list[int]
    """Kept documents, by unit."""
    unit_tokens: list[int]
    """Tokens of the kept documents with end of text, by unit."""
    unit_id_bytes: list[int]
    """Bytes of the kept documents' own ids, by unit."""
    num_bytes: int
    classes: dict[str, int]
    """Documents of each class that has some, by name; none: they have none."""
    chat: dict[str, Any] | None = None
    """Of conversations: all that decided their texts and loss masks."""
    pairs: bool = False
    """Whether two texts at a time belong together."""
    before: BaseCounts = NOTHING
    """Its content in the store that is added to: counted in ``counts`` and ``classes``, in no list of units."""

    def length(self, array: str) -> int:
        """Values of one of its arrays; 0: it has none such."""
        match array:
            case "tokens":
                return self.counts.tokens
            case "loss_mask":
                return 0 if self.chat is None else self.counts.tokens
            case "ids":
                return self.before.id_bytes + sum(self.unit_id_bytes)
            case _ if array == DOCUMENTS_PREFIX + LABEL and not self.classes:
                return 0
            case "id_ends" if not (self.before.id_bytes or any(self.unit_id_bytes)):
                return 0
            case _:
                return self.counts.documents

    def length_before(self, array: str) -> int:
        """Those of the store that is added to; they come first."""
        match array:
            case "tokens" | "loss_mask":
                return self.before.tokens
            case "ids":
                return self.before.id_bytes
            case _:
                return self.before.documents

    @cached_property
    def counts(self) -> SourceCounts:
        """Its numbers of documents, tokens and bytes."""
        return SourceCounts(
            documents=self.before.documents + sum(self.unit_documents),
            tokens=self.before.tokens + sum(self.unit_tokens),
            bytes=self.before.bytes + self.num_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """A shard file to write."""

    source: str
    array: str
    """Its name in the source."""
    number: int


def read_kept(context: Context, unit: UnitSummary) -> dict[str, Any]:
    """The result of ``count_kept``."""
    content: dict[str, Any] = json.loads(context.work.entry("kept", unit.number, ".json").read_bytes())
    return content


@functools.lru_cache(maxsize=1)
def output_sources(context: Context) -> list[OutputSource]:
    """The sources of the store that have documents, in the order of the corpus, training before validation."""
    kept = {unit.number: read_kept(context, unit)["splits"] for unit in context.plan.units}
    base, sources = context.base, []
    names = [(name if split == "train" else name + VALIDATION_SUFFIX, name, split) for name, split in _splits(context)]
    for full_name, name, split in names:
        units = [unit for unit in context.plan.units if unit.source == name]
        counts = [kept[unit.number][split] for unit in units]
        classes_before = base.classes_of(full_name) if base else Counter()
        source = OutputSource(
            name=full_name,
            split=split,
            chat=_chat(context, name, full_name),
            pairs=_has_pairs(context, name, full_name),
            before=base.counts(full_name) if base else NOTHING,
            units=units,
            unit_documents=[count["documents"] for count in counts],
            unit_tokens=[count["tokens"] for count in counts],
            unit_id_bytes=[count["id_bytes"] for count in counts],
            num_bytes=sum(count["bytes"] for count in counts),
            classes=dict(sum((Counter(count["classes"]) for count in counts), classes_before)),
        )
        if source.counts.documents:
            sources.append(source)
    return sources


def _chat(context: Context, name: str, full_name: str) -> dict[str, Any] | None:
    """What decided the conversations of source ``name`` of the corpus, or of ``full_name`` of the store."""
    if name in context.chats:
        return context.chats[name].description()
    return None if context.base is None else context.base.chat(full_name)


def _has_pairs(context: Context, name: str, full_name: str) -> bool:
    """Whether source ``name`` of the corpus, or ``full_name`` of the store, holds pairs of texts."""
    if name in context.corpus.sources:
        return context.corpus.sources[name].has_text_pairs
    return context.base is not None and context.base.store.source(full_name).has_text_pairs


def _splits(context: Context) -> list[tuple[str, Split]]:
    """The sources of the corpus with each split; then what only the store has that is added to."""
    found = list(itertools.product(context.corpus.sources, SPLITS))
    for name, source in context.base.store.sources.items() if context.base else ():
        split = SPLITS[source.split == "validation"]
        one = (name.removesuffix(VALIDATION_SUFFIX) if split == "validation" else name), split
        if one not in found:
            found.append(one)
    return found


@functools.lru_cache(maxsize=1)
def classes(context: Context) -> list[str]:
    """The names of all classes, in the order of their numbers; empty: no source has any."""
    found = {name for source in output_sources(context) for name in source.classes}
    if not found:
        return []
    check_number(found, "sources")
    if context.base is not None and context.base.classes:
        return context.base.classes
    return context.corpus.classes or in_order(found)


def shard_jobs(context: Context) -> tuple[list[ShardJob], list[int]]:
    """All shards to write, each with its number of bytes."""
    jobs, sizes = [], []
    for source in output_sources(context):
        for array, layout in _layouts(context, source).items():
            length = source.length(array)
            for number in range(layout.num_shards(length)):
                jobs.append(ShardJob(source=source.name, array=array, number=number))
                sizes.append(layout.values_in(number, length) * layout.value_bytes)
    return jobs, sizes


def _layouts(context: Context, source: OutputSource) -> dict[str, ShardLayout]:
    """Of the arrays of ``source``."""
    of_tokens = context.corpus.shard_tokens, context.corpus.chunk_tokens
    layouts = array_layouts(*of_tokens)
    layouts[DOCUMENTS_PREFIX + LABEL] = document_layout(LABEL, np.dtype("int32"), *of_tokens)
    return {array: layouts[array] for array in _READERS if source.length(array)}


def write_shard(context: Context, job: ShardJob, advance: Advance) -> None:
    """The task of a shard, with the hashes of its blocks."""
    record = context.work.entry(f"shards/{job.source}.{job.array}", job.number, ".json")
    (source,) = [source for source in output_sources(context) if source.name == job.source]
    layout, directory = _layouts(context, source)[job.array], context.work.store / job.source
    path = layout.path(directory / job.array, job.number)
    blocks_path = layout.hashes.path(directory / HASHES_DIR / job.array, job.number)
    # The record is written after the shard: where it is there, the shard is whole and its hash need not be made again.
    # Both are in other directories, whose names a power failure may have taken.
    if record.exists() and path.exists() and blocks_path.exists():
        return
    first = job.number * layout.shard_length
    stop = first + layout.values_in(job.number, source.length(job.array))
    before = source.length_before(job.array)
    # A shard that is full, or that nothing comes after, is the same file in both stores.
    if stop <= before and (stop - first == layout.shard_length or source.length(job.array) == before):
        assert context.base is not None
        write_json(record, asdict(context.base.link_shard(source.name, job.array, job.number, directory)))
        advance((stop - first) * layout.value_bytes)
        return
    token_counts = np.zeros(context.tokenizer.vocab_size, dtype=np.int64)
    with whole_file(blocks_path) as temporary_blocks, whole_file(path) as temporary:
        shard = ShardFileWriter(temporary, layout)
        try:
            if first < before:
                assert context.base is not None
                for part in context.base.values(source.name, job.array, first, min(stop, before)):
                    shard.append(part)
                    advance(part.nbytes)
            for part in _new_values(context, source, job.array, max(first - before, 0), stop - before):
                shard.append(part)
                advance(part.nbytes)
                # Counted here, where the tokens pass anyway: the entropy in the report costs no further reading.
                if job.array == "tokens":
                    token_counts += np.bincount(part, minlength=len(token_counts))
            assert shard.num_values == stop - first, "the units do not hold the counted number of values"
            hashes = finish_shard(shard, temporary_blocks)
        except BaseException:
            shard.abandon()
            raise
    if job.array == "tokens":
        write_array(record.with_suffix(".npy"), token_counts)
    write_json(record, asdict(hashes))


def _new_values(context: Context, source: OutputSource, array: str, first: int, stop: int) -> Iterator[NDArray[Any]]:
    """Values ``first`` … ``stop`` - 1 of an array, counted from the first that is not of the store that is added to."""
    for part in _READERS[array](context, source, first, stop) if stop > first else ():
        match array:
            case "doc_ends":
                yield part + np.uint64(source.before.tokens)
            case "id_ends":
                yield part + np.uint64(source.before.id_bytes)
            case "origins" if context.base is not None:
                part[:, 0] += np.uint32(context.base.files.num_files)
                yield part
            case _:
                yield part


def _overlapping(unit_sizes: list[int], first: int, stop: int) -> Iterator[tuple[int, int]]:
    """(index, position of its first value) of the units that hold the values ``first`` … ``stop`` - 1 of a source."""
    begin = 0
    for index, size in enumerate(unit_sizes):
        if begin < stop and begin + size > first:
            yield index, begin
        begin += size


def _tokens(context: Context, source: OutputSource, first: int, stop: int) -> Iterator[NDArray[np.uint32]]:
    """Tokens ``first`` … ``stop`` - 1 of a source, some documents at a time."""
    return _per_token(context, source, first, stop, "tokens", of_end=context.tokenizer.eot_id)


def _loss_mask(context: Context, source: OutputSource, first: int, stop: int) -> Iterator[NDArray[np.uint8]]:
    """Whether tokens ``first`` … ``stop`` - 1 of a source count; the end of a conversation is its template's."""
    return _per_token(context, source, first, stop, LOSS_MASK, of_end=0)


def _per_token(
    context: Context, source: OutputSource, first: int, stop: int, array: str, *, of_end: int
) -> Iterator[NDArray[Any]]:
    """Values ``first`` … ``stop`` - 1 of an array of tokens; ``of_end``: of the end-of-text tokens."""
    for index, begin in _overlapping(source.unit_tokens, first, stop):
        files = unit_files(context, source.units[index])
        chosen = _chosen(context, source, index, files)
        # Where each document ends: among the unit's tokens as they lie, and in the source, where dropped documents take
        # no room and every kept one has an end-of-text token more.
        in_file = np.cumsum(files.records["tokens"], dtype=np.int64)
        in_source = begin + np.cumsum((files.records["tokens"].astype(np.int64) + 1) * chosen)
        tokens = files.tokens(array)
        # The first document with tokens at or after `first`, and the one after the last with any before `stop`.
        document = int(np.searchsorted(in_source, first, side="right"))
        last = int(np.searchsorted(in_source, stop, side="left")) + 1
        while document < min(last, len(chosen)):
            begins_in_file = int(in_file[document - 1]) if document else 0
            begins_in_source = int(in_source[document - 1]) if document else begin
            after = max(document + 1, int(np.searchsorted(in_file, begins_in_file + _TOKENS_AT_ONCE, side="right")))
            after = min(after, last, len(chosen))
            part = np.asarray(tokens[begins_in_file : int(in_file[after - 1])])
            part_with_ends = _with_end_of_text(
                part, files.records["tokens"][document:after], chosen[document:after], of_end
            )
            cut = part_with_ends[max(first - begins_in_source, 0) : stop - begins_in_source]
            if len(cut):
                yield cut
            document = after


def _with_end_of_text(
    tokens: NDArray[Any], lengths: NDArray[np.uint32], chosen: NDArray[np.bool_], eot: int
) -> NDArray[Any]:
    """Of documents of (n,) ``lengths`` one after the other, the ``chosen`` ones, each after an end of text."""
    kept = tokens if chosen.all() else tokens[np.repeat(chosen, lengths)]
    ends = np.cumsum(lengths[chosen], dtype=np.int64)
    return np.insert(kept, ends - lengths[chosen], eot)


_Values = Callable[[int, NDArray[np.void]], NDArray[Any]]


def _of_documents(
    context: Context, source: OutputSource, first: int, stop: int, values: _Values
) -> Iterator[NDArray[Any]]:
    """Of documents ``first`` … ``stop`` - 1 the ``values`` of (index of the unit, records that are in ``source``)."""
    for index, begin in _overlapping(source.unit_documents, first, stop):
        files = unit_files(context, source.units[index])
        chosen = files.records[_chosen(context, source, index, files)]
        yield values(index, chosen)[max(first - begin, 0) : stop - begin]


def _ends(context: Context, source: OutputSource, first: int, stop: int) -> Iterator[NDArray[np.uint64]]:
    """Where documents ``first`` … ``stop`` - 1 of a source end in its tokens, a unit at a time."""
    begins = [0, *itertools.accumulate(source.unit_tokens)]

    def ends(index: int, records: NDArray[np.void]) -> NDArray[np.uint64]:
        return (begins[index] + np.cumsum(records["tokens"].astype(np.int64) + 1)).astype(np.uint64)

    return _of_documents(context, source, first, stop, ends)


def _origins(context: Context, source: OutputSource, first: int, stop: int) -> Iterator[NDArray[np.uint32]]:
    """Where documents ``first`` … ``stop`` - 1 of a source came from, a unit at a time."""

    def rows(index: int, records: NDArray[np.void]) -> NDArray[np.uint32]:
        return origin_rows(records["file"], records["begin"], records["length"])

    return _of_documents(context, source, first, stop, rows)


def _id_ends(context: Context, source: OutputSource, first: int, stop: int) -> Iterator[NDArray[np.uint64]]:
    """Where the own ids of documents ``first`` … ``stop`` - 1 of a source end, a unit at a time."""
    begins = [0, *itertools.accumulate(source.unit_id_bytes)]

    def ends(index: int, records: NDArray[np.void]) -> NDArray[np.uint64]:
        return (begins[index] + np.cumsum(records["id_bytes"], dtype=np.int64)).astype(np.uint64)

    return _of_documents(context, source, first, stop, ends)


def _ids(context: Context, source: OutputSource, first: int, stop: int) -> Iterator[NDArray[np.uint8]]:
    """Bytes ``first`` … ``stop`` - 1 of the documents' own ids, a unit at a time."""
    for index, begin in _overlapping(source.unit_id_bytes, first, stop):
        files = unit_files(context, source.units[index])
        chosen = _chosen(context, source, index, files)
        ids = files.ids()[np.repeat(chosen, files.records["id_bytes"])]
        yield ids[max(first - begin, 0) : stop - begin]


def _labels(context: Context, source: OutputSource, first: int, stop: int) -> Iterator[NDArray[np.int32]]:
    """The numbers of the classes of documents ``first`` … ``stop`` - 1 of a source, a unit at a time."""
    numbers = {name: number for number, name in enumerate(classes(context))}
    for index, begin in _overlapping(source.unit_documents, first, stop):
        files = unit_files(context, source.units[index])
        of_unit = np.array([numbers.get(name, -1) for name in files.classes()], dtype=np.int32)
        chosen = of_unit[files.labels()[_chosen(context, source, index, files)]]
        yield chosen[max(first - begin, 0) : stop - begin]


_READERS: dict[str, Callable[[Context, OutputSource, int, int], Iterator[NDArray[Any]]]] = {
    "tokens": _tokens,
    LOSS_MASK: _loss_mask,
    "doc_ends": _ends,
    ORIGINS: _origins,
    IDS: _ids,
    ID_ENDS: _id_ends,
    DOCUMENTS_PREFIX + LABEL: _labels,
}
"""The values of every array of a source."""


def _chosen(context: Context, source: OutputSource, index: int, files: UnitFiles) -> NDArray[np.bool_]:
    """Which documents of a unit are in ``source``."""
    kept = UnitDuplicates(context.work, source.units[index]).kept_mask(len(files.records))
    return kept & _of_split(files.records, source.split)


def write_source(context: Context, source: OutputSource) -> NDArray[np.int64]:
    """The metadata of a source whose shards are written; (vocab_size,) how often each token is in it."""
    directory = context.work.store / source.name
    hashes: dict[str, list[ShardHashes]] = {}
    counts = np.zeros(context.tokenizer.vocab_size, dtype=np.int64)
    for array, layout in _layouts(context, source).items():
        length = source.length(array)
        hashes[array] = []
        for number in range(layout.num_shards(length)):
            record = context.work.entry(f"shards/{source.name}.{array}", number, ".json")
            hashes[array].append(ShardHashes(**json.loads(record.read_bytes())))
            # A shard of the store that is added to has no counts: they are of what is new.
            if array == "tokens" and record.with_suffix(".npy").exists():
                counts += np.load(record.with_suffix(".npy"))
        write_array_metadata(directory, array, layout, length)
    write_source_attributes(directory, source.split, source.counts, hashes, chat=source.chat, pairs=source.pairs)
    return counts
