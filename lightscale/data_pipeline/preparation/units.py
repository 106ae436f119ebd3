"""The work on a unit: read ▸ normalise ▸ filter ▸ tokenize ▸ keys of duplicates, document after document, into files.

units/NNNNNN/tokens        uint32: the tokens of its documents, one after the other, without end of text
units/NNNNNN/loss_mask     uint8: of conversations, 1 for each of these tokens that counts
units/NNNNNN/documents     one record per document: tokens, bytes, split, origin
units/NNNNNN/names         the documents' ids, one per line
units/NNNNNN/ids           the documents' own ids from their files, one after the other
units/NNNNNN/labels        uint32: the class of each, if they have classes, as its place in classes.json
units/NNNNNN/removed       documents that filters dropped, if requested: ``removed.py``
units/NNNNNN/exact-NNNN    keys of texts, near-NNNN keys of bands, for ``deduplication.py``
units/NNNNNN/counts.json   counts, and the dropped documents
"""

import contextlib
import functools
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightscale.data_pipeline.chat.files import TemplateFiles
from lightscale.data_pipeline.chat.prepared import Chat, ChatText, encode
from lightscale.data_pipeline.chat.shapes import ChatFault
from lightscale.data_pipeline.executors import Advance
from lightscale.data_pipeline.preparation import unit_parts
from lightscale.data_pipeline.preparation.base import BaseStore
from lightscale.data_pipeline.preparation.corpus import ChatConfig, Corpus
from lightscale.data_pipeline.preparation.counts import StepCounts
from lightscale.data_pipeline.preparation.dedup import (
    band_keys,
    document_key,
    signatures,
    write_band_records,
    write_exact_records,
)
from lightscale.data_pipeline.preparation.filters import Chain
from lightscale.data_pipeline.preparation.labels import check_number, class_of
from lightscale.data_pipeline.preparation.normalise import INVALID_UTF8, LONE_SURROGATE, normalise, valid_unicode
from lightscale.data_pipeline.preparation.plan import UNIT_SHIFT, PreparationPlan, UnitSummary, read_plan
from lightscale.data_pipeline.preparation.readers import FilePart, has_parts, read
from lightscale.data_pipeline.preparation.readers.inputs import EMPTY, Problems, SourceFile
from lightscale.data_pipeline.preparation.readers.interface import RawDocument
from lightscale.data_pipeline.preparation.readers.streams import line_ends_before
from lightscale.data_pipeline.preparation.removed import FILE as REMOVED
from lightscale.data_pipeline.preparation.removed import RemovedWriter
from lightscale.data_pipeline.preparation.tokenizer_sample import TextSample
from lightscale.data_pipeline.preparation.unit_parts import join_parts, write_parts
from lightscale.data_pipeline.preparation.work_directory import WorkDirectory
from lightscale.data_pipeline.store.format import LOSS_MASK, TOKENIZER_DIR, Split
from lightscale.data_pipeline.tokenizers import DESCRIPTION_FILE, Tokenizer, load_tokenizer, with_fast_path
from lightscale.data_pipeline.whole_files import whole_directory, write_json
from lightscale.errors import UserError

DOCUMENT = np.dtype(
    [
        ("tokens", "<u4"),
        ("bytes", "<u4"),
        ("validation", "?"),
        ("file", "<u4"),
        ("begin", "<u8"),
        ("length", "<u4"),
        ("id_bytes", "<u4"),
    ]
)
"""Of a document: its tokens without end of text, bytes of text, split; number of its file, first byte there (or row),
bytes there (or 0), and bytes of its own id."""
STEPS_OF_A_UNIT = ("read", "normalise", "filter")
STEPS_THAT_CHANGE = ("normalise", "filter")
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 512, 2**20
# Keys of so many documents are held in memory, then sorted and written.
_KEYS_DOCUMENTS = 2**16
# Which documents are held out and which excerpts train the tokenizer must not depend on each other, so
# each hash has a seed of its own.
_SPLIT_SEED = 1
_SAMPLE = "sample.json"


class Context:
    """The objects that every task needs; each process makes its own from the work directory."""

    def __init__(self, work: WorkDirectory, *, strict: bool) -> None:
        self.work = work
        self.strict = strict
        state = work.read_state()
        assert state is not None, "tasks begin after the state was written"
        self.corpus = Corpus.model_validate(state["corpus"])
        self.keep_removed = state["keep_removed"] is not None
        self._base_path = state.get("base")
        self._filters: dict[str, Chain | None] = {}

    @cached_property
    def plan(self) -> PreparationPlan:
        """All units."""
        return read_plan(self.work.plan)

    @cached_property
    def base(self) -> BaseStore | None:
        """The store that is added to; None: one is made from nothing."""
        return None if self._base_path is None else BaseStore(Path(self._base_path))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the store."""
        description = self.work.path / TOKENIZER_DIR / DESCRIPTION_FILE
        return _load_once(self.work.path, description.stat().st_mtime_ns)

    @cached_property
    def encoder(self) -> Tokenizer:
        """The same with its fast path, where it has one."""
        return with_fast_path(self.tokenizer)

    @cached_property
    def classes(self) -> dict[str, int] | None:
        """The numbers of the classes that the corpus lists, by name; None: any name is a class."""
        listed = self.corpus.classes
        return None if listed is None else {name: number for number, name in enumerate(listed)}

    @cached_property
    def chats(self) -> dict[str, Chat]:
        """How conversations become texts, by source."""
        state = self.work.read_state()
        assert state is not None
        # What the preparation began with: a template may have changed since.
        return {
            name: self.corpus.chat_of(name, TemplateFiles(**files)) for name, files in state["chat_templates"].items()
        }

    def filter_of(self, source: str) -> Chain | None:
        """The filter of a source; None: every document is kept."""
        if source not in self._filters:
            self._filters[source] = self.corpus.filter_of(source)
        return self._filters[source]


@lru_cache(maxsize=1)
def _load_once(path: Path, changed_ns: int) -> Tokenizer:
    """A process makes more than one context, and large tokenizers take a second to load."""
    return load_tokenizer(path)


@dataclass(kw_only=True)
class Changes:
    """The changes of a step in the texts that it kept."""

    documents: Counter[str] = field(default_factory=Counter)
    """Number of changed documents, by kind of change."""
    times: Counter[str] = field(default_factory=Counter)
    """Number of changes, by kind."""

    def add(self, changes: Mapping[str, int]) -> None:
        """Count those of one document."""
        self.documents.update(changes.keys())
        self.times.update(changes)

    def as_json(self) -> dict[str, dict[str, int]]:
        """Plain values."""
        return {
            change: {"documents": self.documents[change], "times": times}
            for change, times in sorted(self.times.items())
        }

    def merge(self, content: dict[str, dict[str, int]]) -> None:
        """Add another part, in the form of ``as_json``."""
        for change, counts in content.items():
            self.documents[change] += counts["documents"]
            self.times[change] += counts["times"]


@dataclass(kw_only=True)
class UnitCounts:
    """Counts of a unit, or of several."""

    steps: dict[str, StepCounts] = field(default_factory=lambda: {name: StepCounts() for name in STEPS_OF_A_UNIT})
    changes: dict[str, Changes] = field(default_factory=lambda: {name: Changes() for name in STEPS_THAT_CHANGE})
    problems: Problems = field(default_factory=Problems)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "stages": {name: step.as_json() for name, step in self.steps.items()},
            "changes": {name: changes.as_json() for name, changes in self.changes.items()},
            "problems": self.problems.as_part(),
        }

    def merge(self, content: dict[str, Any]) -> None:
        """Add a later unit, in the form of ``as_json``."""
        for name, step in content["stages"].items():
            self.steps[name].merge(StepCounts.from_json(step))
        for name, changes in content["changes"].items():
            self.changes[name].merge(changes)
        self.problems.merge(content["problems"])


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanDocument:
    """A text that passed the filters."""

    id: str
    text: str
    num_bytes: int
    """Of the text."""
    file: int
    """Number of its file, and"""
    begin: int
    length: int
    """where it was in that; see ``RawDocument``."""
    own_id: bytes
    label: str | None = None
    """Name of its class."""
    chat: ChatText | None = None
    """Of a conversation: ``text`` with the characters that count."""
    key: str | None = None
    """What duplicates share; None: the text. The documents of a pair are kept or dropped together."""
    where: Callable[[], str] = str
    """Its place in the corpus, for a message."""


def split_of(document_id: str, validation: float) -> Split:
    """The split of a document: a pure function of its id, so it stays when the corpus grows."""
    share = xxhash.xxh3_64_intdigest(document_id.encode(), seed=_SPLIT_SEED) / 2**64
    return "validation" if share < validation else "train"


def prepare_unit(context: Context, unit: UnitSummary, advance: Advance) -> None:
    """The task of a unit. Finished parts are not repeated."""
    target = context.work.entry("units", unit.number)
    if target.exists():
        advance(unit.num_bytes)
        return

    def write(directory: Path, part: FilePart | None, before: Sequence[Path]) -> None:
        num_before = sum(len(UnitFiles(directory=one).records) for one in before)
        counts = UnitCounts(problems=Problems(strict=context.strict))
        with contextlib.ExitStack() as stack:
            writer = stack.enter_context(UnitWriter(directory, unit, context, first_document=num_before))
            removed = stack.enter_context(RemovedWriter(directory / REMOVED)) if context.keep_removed else None
            for document in clean_documents(context, unit, counts, advance, removed=removed, part=part):
                writer.append(document)
            writer.finish()
        _write_counts(directory, counts)

    # The directory gets its name when everything in it is written: a unit that has its name is never half a unit.
    if not _is_in_parts(context, unit):
        with whole_directory(target) as directory:
            write(directory, None, ())
        return
    parts_directory = context.work.entry("parts", unit.number)
    parts = write_parts(parts_directory, "unit", write, advance)
    with whole_directory(target) as directory:
        join_parts(parts, directory, unit.source)
        counts = UnitCounts()
        for part in parts:
            counts.merge(UnitFiles(directory=part).counts())
        _write_counts(directory, counts)
    shutil.rmtree(parts_directory, ignore_errors=True)


def _write_counts(directory: Path, counts: UnitCounts) -> None:
    (directory / "counts.json").write_text(json.dumps(counts.as_json(), ensure_ascii=False), encoding="utf-8")


def _is_in_parts(context: Context, unit: UnitSummary) -> bool:
    """Whether a unit is one compressed file of several parts."""
    if unit.num_bytes <= unit_parts.PART_BYTES:
        return False
    first, *others = itertools.islice(context.plan.file_ranges(unit), 2)
    return not others and has_parts(first.file, context.corpus.read_options(unit.source))


def sample_unit(context: Context, unit: UnitSummary, advance: Advance) -> None:
    """The task of a unit before there is a tokenizer: its share of the texts to train one on."""
    target = context.work.entry("samples", unit.number, ".json")
    if target.exists():
        advance(unit.num_bytes)
        return
    validation = context.corpus.validation_of(unit.source)

    def content(part: FilePart | None) -> dict[str, Any]:
        sample = TextSample()
        # The pass that writes meets the same problems; it counts them.
        counts = UnitCounts(problems=Problems(strict=context.strict))
        for document in clean_documents(context, unit, counts, advance, part=part):
            if split_of(document.id, validation) == "train":
                sample.add(document.id, document.text)
        return {"sample": sample.as_json(), "counts": counts.as_json()}

    if not _is_in_parts(context, unit):
        write_json(target, content(None))
        return
    parts_directory = context.work.entry("parts", unit.number)
    parts = write_parts(
        parts_directory, "sample", lambda new, part, before: write_json(new / _SAMPLE, content(part)), advance
    )
    sample, counts = TextSample(), UnitCounts()
    for part in parts:
        found = json.loads((part / _SAMPLE).read_bytes())
        sample.merge(found["sample"])
        counts.merge(found["counts"])
    write_json(target, {"sample": sample.as_json(), "counts": counts.as_json()})
    shutil.rmtree(parts_directory, ignore_errors=True)


def clean_documents(
    context: Context,
    unit: UnitSummary,
    counts: UnitCounts,
    advance: Advance,
    *,
    removed: RemovedWriter | None = None,
    part: FilePart | None = None,
) -> Iterator[CleanDocument]:
    """The documents of a unit, in order, that are left after reading, normalising and filtering.

    Documents that filters drop are written to ``removed``. ``part``: the part to read of the unit's only file.
    """
    # A generator, document after document: memory does not grow with the unit, and one pass does all four steps.
    rules = context.filter_of(unit.source)
    options = context.corpus.read_options(unit.source)
    was_read, normalised, filtered = (counts.steps[name] for name in STEPS_OF_A_UNIT)
    chat = context.chats.get(unit.source)
    label_field, classes = options.label_field, context.classes
    for file_range in context.plan.file_ranges(unit):
        documents = read(file_range, counts.problems, options=options, advance=advance, part=part)
        for raw in documents:
            was_read.keep(raw.text_bytes)
            texts = []
            for data in raw.texts:
                clean = normalise(data) if chat is None else valid_unicode(data)
                counts.changes["normalise"].add(clean.counts)
                for change in (INVALID_UTF8, LONE_SURROGATE):
                    if change in clean.counts:
                        counts.problems.add(change, raw.id)
                texts.append(clean.text)
            where = functools.partial(_place, file_range.file, raw, unit.source)
            conversations = None if chat is None else _texts(chat, texts[0], where)
            if conversations is not None:
                texts = [conversation.text for conversation in conversations]
            # A pair without one of its texts is none.
            is_empty = any(not text or text.isspace() for text in texts)
            for number, (text, key) in enumerate(zip(texts, _keys(texts), strict=True)):
                num_bytes = utf8_bytes(text)
                if is_empty:
                    normalised.drop(EMPTY, num_bytes, raw.id, text)
                    continue
                normalised.keep(num_bytes)
                if rules is not None:
                    verdict = rules.judge(text)
                    if verdict.rule is not None:
                        filtered.drop(verdict.rule, num_bytes, raw.id, text)
                        if removed is not None:
                            removed.add(raw.id, verdict.rule, verdict.score, text)
                        continue
                    counts.changes["filter"].add(verdict.changes)
                    if verdict.text is not text:
                        text = verdict.text
                        num_bytes = utf8_bytes(text)
                filtered.keep(num_bytes)
                label = None if label_field is None else class_of(raw.label, raw.id, field=label_field, classes=classes)
                yield CleanDocument(
                    id=raw.id,
                    text=text,
                    num_bytes=num_bytes,
                    file=file_range.file_number,
                    begin=raw.begin,
                    length=raw.num_bytes,
                    own_id=(raw.own_id or "").encode(errors="replace"),
                    label=label,
                    chat=None if conversations is None else conversations[number],
                    key=key,
                    where=where,
                )


def _keys(texts: Sequence[str]) -> list[str | None]:
    """What duplicates share: of a pair both texts, so that its two documents are kept or dropped together."""
    if len(texts) == 1:
        return [None]
    both = "\0".join(texts)
    return [f"{side}{both}" for side in range(len(texts))]


def _texts(chat: Chat, record: str, where: Callable[[], str]) -> Sequence[ChatText]:
    try:
        return chat.texts_of(json.loads(record))
    except ChatFault as fault:
        raise UserError(f"{where()}: {fault}") from fault


def _place(file: SourceFile, document: RawDocument, source: str) -> str:
    """File and line of a document, with the table of its source; of a remote file its byte, of a table its row."""
    if not document.num_bytes:
        place = f"row {document.begin}"
    elif isinstance(file.path, Path):
        place = f"line {1 + line_ends_before(file.path, document.begin)}"
        # An array of objects may be one line.
        place += f", byte {document.begin}" if ".json" in map(str.lower, file.path.suffixes) else ""
    else:
        place = f"byte {document.begin}"
    return f"{file.path}, {place}: sources.{source}"


def utf8_bytes(text: str) -> int:
    """The length of ``text`` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


class UnitWriter:
    """Writes tokens, records and keys of a unit's documents batch by batch: memory does not grow with the unit."""

    def __init__(self, directory: Path, unit: UnitSummary, context: Context, *, first_document: int = 0) -> None:
        """``first_document``: the number in the unit of the first one."""
        self._directory = directory
        self._first_id = (unit.number << UNIT_SHIFT) + first_document
        self._tokenizer = context.encoder
        self._validation = context.corpus.validation_of(unit.source)
        self._duplicates = context.corpus.duplicates
        self._batch: list[CleanDocument] = []
        self._batch_characters = 0
        self._keys: list[bytes] = []
        self._bands: list[NDArray[np.uint64]] = []
        self._num_keyed = self._num_documents = self._num_key_files = 0
        self._source, self._classes = unit.source, dict[str, int]()
        source = context.corpus.sources[unit.source]
        self._chat = source.chat if unit.source in context.chats else None
        self._has_pairs, self._most_tokens = source.has_text_pairs, source.max_tokens

    def __enter__(self) -> "UnitWriter":
        names = ["tokens", "documents", "names", "ids", "labels", *([] if self._chat is None else [LOSS_MASK])]
        self._files: dict[str, BinaryIO] = {name: (self._directory / name).open("wb") for name in names}
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def append(self, document: CleanDocument) -> None:
        """Add a document."""
        self._batch.append(document)
        self._batch_characters += len(document.text)
        if len(self._batch) == _BATCH_DOCUMENTS or self._batch_characters >= _BATCH_CHARACTERS:
            self._write_batch()

    def finish(self) -> None:
        """Write the data that is still in memory."""
        self._write_batch()
        self._write_keys()
        (self._directory / "classes.json").write_text(json.dumps(list(self._classes)), encoding="utf-8")
        for file in self._files.values():
            file.flush()

    def _write_batch(self) -> None:
        batch = self._batch
        if not batch:
            return
        # In batches: one call over many short documents costs less than a call for each.
        if self._chat is None:
            ids = self._tokenizer.encode_batch([document.text for document in batch])
            if self._most_tokens is not None:
                batch, ids = self._cut(batch, ids, self._most_tokens)
        else:
            conversations = [self._encoded(document, self._chat) for document in batch]
            ids = [one for one, _ in conversations]
            self._files[LOSS_MASK].write(np.concatenate([mask for _, mask in conversations]).tobytes())
        records = np.empty(len(batch), dtype=DOCUMENT)
        records["tokens"] = [len(tokens) for tokens in ids]
        records["bytes"] = [document.num_bytes for document in batch]
        records["file"] = [document.file for document in batch]
        records["begin"] = [document.begin for document in batch]
        records["length"] = [document.length for document in batch]
        records["id_bytes"] = [len(document.own_id) for document in batch]
        records["validation"] = [split_of(document.id, self._validation) == "validation" for document in batch]
        self._files["tokens"].write(np.concatenate(ids).astype("<u4", copy=False).tobytes())
        self._files["documents"].write(records.tobytes())
        self._files["names"].write("".join(f"{_one_line(document.id)}\n" for document in batch).encode())
        self._files["ids"].write(b"".join(document.own_id for document in batch))
        labels = [
            self._classes.setdefault(document.label, len(self._classes))
            for document in batch
            if document.label is not None
        ]
        check_number(self._classes, f"sources.{self._source}")
        self._files["labels"].write(np.array(labels, dtype="<u4").tobytes())
        if self._duplicates.exact:
            self._keys += [document_key(document.key or document.text) for document in batch]
        # Conversations of one kind share most of their text: instructions, descriptions of tools. A text is in many
        # pairs.
        if self._duplicates.near and self._chat is None and not self._has_pairs:
            self._bands.append(band_keys(signatures(ids)))
        self._num_documents += len(batch)
        self._batch, self._batch_characters = [], 0
        if self._num_documents - self._num_keyed >= _KEYS_DOCUMENTS:
            self._write_keys()

    def _cut(
        self, batch: Sequence[CleanDocument], ids: Sequence[NDArray[np.uint32]], most: int
    ) -> tuple[list[CleanDocument], list[NDArray[np.uint32]]]:
        """Documents and tokens of at most ``most`` tokens, the end-of-text token included; bytes of what is left."""
        cut = [one[: most - 1] for one in ids]
        left = [
            document if len(one) == len(whole) else replace(document, num_bytes=utf8_bytes(self._tokenizer.decode(one)))
            for document, one, whole in zip(batch, cut, ids, strict=True)
        ]
        return left, cut

    def _encoded(self, document: CleanDocument, chat: ChatConfig) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        assert document.chat is not None
        try:
            is_cut = chat.too_long == "cut"
            return encode(self._tokenizer, document.chat, most_tokens=chat.max_tokens, is_cut=is_cut)
        except ChatFault as fault:
            raise UserError(f"{document.where()}: {fault}") from fault

    def _write_keys(self) -> None:
        ids = np.arange(self._num_keyed, self._num_documents, dtype=np.uint64) + np.uint64(self._first_id)
        if not len(ids):
            return
        number = f"{self._num_key_files:04}"
        if self._keys:
            write_exact_records(self._directory / f"exact-{number}", self._keys, ids)
        if self._bands:
            write_band_records(self._directory / f"near-{number}", np.concatenate(self._bands), ids)
        # Each file of keys is sorted by itself; a range of keys is then read from all of them by bisection.
        self._keys, self._bands = [], []
        self._num_keyed = self._num_documents
        self._num_key_files += 1


def _one_line(name: str) -> str:
    return name.replace("\n", "\\n").replace("\r", "\\r")


@dataclass(frozen=True, kw_only=True)
class UnitFiles:
    """The files of a finished unit."""

    directory: Path

    @cached_property
    def records(self) -> NDArray[np.void]:
        """A ``DOCUMENT`` for every document."""
        return np.fromfile(self.directory / "documents", dtype=DOCUMENT)

    def tokens(self, array: str = "tokens") -> NDArray[Any]:
        """The tokens of all documents, or their values in another array of tokens, mapped."""
        path, dtype = self.directory / array, "<u4" if array == "tokens" else "u1"
        return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype=dtype)

    def ids(self) -> NDArray[np.uint8]:
        """The documents' own ids, one after the other."""
        return np.fromfile(self.directory / "ids", dtype=np.uint8)

    def labels(self) -> NDArray[np.uint32]:
        """The classes of the documents, by their places in ``classes``; none where they have none."""
        return np.fromfile(self.directory / "labels", dtype="<u4")

    def classes(self) -> list[str]:
        """The names of the classes of its documents."""
        names: list[str] = json.loads((self.directory / "classes.json").read_bytes())
        return names

    def names(self, numbers: list[int]) -> list[str]:
        """The ids of some documents, ascending ``numbers``."""
        wanted, found = iter(numbers), []
        next_wanted = next(wanted, None)
        with (self.directory / "names").open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if number == next_wanted:
                    found.append(line.rstrip("\n"))
                    next_wanted = next(wanted, None)
                if next_wanted is None:
                    break
        return found

    def counts(self) -> dict[str, Any]:
        """Its counts, as ``UnitCounts.as_json`` gave them."""
        content: dict[str, Any] = json.loads((self.directory / "counts.json").read_bytes())
        return content
