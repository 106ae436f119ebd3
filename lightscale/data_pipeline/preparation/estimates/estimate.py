"""Estimate of a store and its preparation, from the first documents of some files; writes no file.

Every source's files are listed, as for the preparation. Of some of them, chosen by a hash of their names, the first
documents go through the same reading, normalising, filters, tokenizer and keys of duplicates, and their counts are
scaled by the bytes of files. Which documents are duplicates is known only when all are there: none is taken for one.
"""

import heapq
import json
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash

from lightscale.data_pipeline.chat.prepared import Chat
from lightscale.data_pipeline.chat.shapes import ChatFault
from lightscale.data_pipeline.preparation import unit_parts
from lightscale.data_pipeline.preparation.corpus import DEFAULT_VOCAB_SIZE, Corpus
from lightscale.data_pipeline.preparation.dedup import NUM_BANDS, band_keys, document_key, signatures
from lightscale.data_pipeline.preparation.filters import Chain
from lightscale.data_pipeline.preparation.labels import class_of
from lightscale.data_pipeline.preparation.normalise import normalise, valid_unicode
from lightscale.data_pipeline.preparation.prepare import given_tokenizer
from lightscale.data_pipeline.preparation.readers import RawDocument, cut_into_ranges, has_parts, read
from lightscale.data_pipeline.preparation.readers.inputs import EMPTY, Problems, ReadOptions, SourceFile
from lightscale.data_pipeline.preparation.readers.streams import is_packed
from lightscale.data_pipeline.preparation.readers.table import format_of
from lightscale.data_pipeline.preparation.sources import FileLister
from lightscale.data_pipeline.tokenizers import Tokenizer, train_sentencepiece, with_fast_path
from lightscale.errors import UserError, counted

SAMPLE_DOCUMENTS = 200
# Of formats whose files hold many documents so many files are read in each source; of texts as many as documents are
# wanted.
_FILES = 8
# Of a file with many documents so much is read at least: what decompressing holds back is little beside it.
_SEEN_BYTES = 2**20
_TOKEN_BYTES = 4
# In a store: where it ends, and where it came from.
_STORED_DOCUMENT_BYTES = 24
# Of a document with a class, here and there.
_LABEL_BYTES = 4
# In the work directory: its record with its name, and its keys if duplicates of the kind are looked for.
_RECORD_BYTES, _EXACT_KEY_BYTES, _NEAR_KEYS_BYTES = 60, 24, 16 * NUM_BANDS
# What the store keeps of them, at most.
_KEPT_EXACT_BYTES, _KEPT_NEAR_BYTES = 16, 8 * NUM_BANDS
_WHOLE_FILE = 2**62
_SEED = 3
STAGES = ("read", "normalise", "filter", "tokenize", "keys")
"""The timed stages, in the order of a unit's work."""


@dataclass(kw_only=True)
class FileSample:
    """The sample of one file."""

    size_bytes: int
    """Bytes of the whole file on disk, compressed or not."""
    seen_file_bytes: float = 0.0
    """Of the part of the file that was read."""
    seen_documents: int = 0
    seen_bytes: int = 0
    """Bytes of the texts in the sample."""
    sampled: int = 0
    """Documents that went through all steps, the first of the sample."""
    sampled_bytes: int = 0
    """Of their texts."""
    kept: int = 0
    """Sampled documents that the filters kept."""
    kept_bytes: int = 0
    """Of their texts, normalised."""

    @property
    def scale(self) -> float:
        """Size of the file over the size of the sample."""
        return self.size_bytes / self.seen_file_bytes if self.seen_file_bytes else 0.0

    @property
    def text_bytes(self) -> float:
        """Estimated, of all its documents."""
        return self.seen_bytes * self.scale

    @property
    def kept_text_bytes(self) -> float:
        """Estimated number of kept documents."""
        return self.text_bytes * self.kept_bytes / self.sampled_bytes if self.sampled_bytes else 0.0

    @property
    def kept_documents(self) -> float:
        """Estimated number."""
        return self.seen_documents * self.scale * self.kept / self.sampled if self.sampled else 0.0


@dataclass(kw_only=True)
class SourceEstimate:
    """One source: its files, its sample and the estimate for the whole source."""

    files: int = 0
    file_bytes: int = 0
    """Of all files, compressed as they are."""
    whole_sizes: "array[int]" = field(default_factory=lambda: array("q"))
    """Sizes in bytes of files that are read as a whole; each takes 8 bytes of memory."""
    divided_sizes: "array[int]" = field(default_factory=lambda: array("q"))
    """Sizes in bytes of files that are read in ranges."""
    part_sizes: "array[int]" = field(default_factory=lambda: array("q"))
    """Sizes of files among ``whole_sizes`` that are read part after part, if each is a separate unit."""
    samples: list[FileSample] = field(default_factory=list)
    """Of some files. Each is scaled separately, and their sum to the source: files of a source may differ much."""
    kept_tokens: int = 0
    """Of the sampled documents that are kept, without end of text."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Of the sampled documents, by rule."""
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    """Processor time for the sampled documents, by stage."""
    problems: Problems = field(default_factory=Problems)

    @property
    def sampled(self) -> int:
        """Documents that went through all steps."""
        return sum(one.sampled for one in self.samples)

    @property
    def seconds(self) -> float:
        """Processor time for the sampled documents."""
        return sum(self.stage_seconds.values())

    @property
    def scale(self) -> float:
        """Size of the source over the size of the sampled files."""
        looked_at = sum(one.size_bytes for one in self.samples)
        return self.file_bytes / looked_at if looked_at else 0.0

    @property
    def text_bytes(self) -> float:
        """Estimated, of all texts."""
        return self.scale * sum(one.text_bytes for one in self.samples)

    @property
    def kept_share(self) -> float:
        """Estimated, of the bytes of text."""
        kept = self.scale * sum(one.kept_text_bytes for one in self.samples)
        return kept / self.text_bytes if kept else 0.0

    @property
    def bytes_per_token(self) -> float | None:
        """Of the kept documents; None: none is kept."""
        return sum(one.kept_bytes for one in self.samples) / self.kept_tokens if self.kept_tokens else None

    @property
    def documents(self) -> float:
        """Estimated number that is kept."""
        return self.scale * sum(one.kept_documents for one in self.samples)

    @property
    def tokens(self) -> float:
        """Estimated number of the source's tokens, ends of text included."""
        if self.bytes_per_token is None:
            return 0.0
        return self.text_bytes * self.kept_share / self.bytes_per_token + self.documents

    @property
    def seconds_per_megabyte(self) -> dict[str, float]:
        """Processor time by stage, for 10^6 bytes of text as it is read."""
        megabytes = sum(one.sampled_bytes for one in self.samples) / 1e6
        return {name: own / megabytes if megabytes else 0.0 for name, own in self.stage_seconds.items()}

    @property
    def total_seconds(self) -> float:
        """Estimated processor time for all of it."""
        return self.text_bytes / 1e6 * sum(self.seconds_per_megabyte.values())

    def record(self) -> dict[str, Any]:
        """For JSON: counts as they are, estimates rounded."""
        return {
            "files": self.files,
            "bytes": self.file_bytes,
            "sampled_documents": self.sampled,
            "kept_share": self.kept_share,
            "bytes_per_token": self.bytes_per_token,
            "documents": round(self.documents),
            "tokens": round(self.tokens),
            "seconds": self.total_seconds,
            "seconds_per_megabyte": self.seconds_per_megabyte,
            "dropped": dict(sorted(self.dropped.items())),
            "problems": self.problems.as_json(),
        }


@dataclass(frozen=True, kw_only=True)
class CorpusEstimate:
    """All sources, and the whole."""

    sources: dict[str, SourceEstimate]
    tokenizer: str
    """Its name."""
    is_trained: bool
    """The tokenizer was trained on the sample, whose text it therefore encodes better than the rest."""
    store_bytes: float
    work_bytes: float
    """Beside the store, until it is finished."""

    @property
    def tokens(self) -> float:
        """Of all sources."""
        return sum(source.tokens for source in self.sources.values())

    @property
    def seconds(self) -> float:
        """Processor time for all of it, on this machine; workers and ranks divide it."""
        return sum(source.total_seconds for source in self.sources.values())

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tokenizer": {"name": self.tokenizer, "trained_on_the_sample": self.is_trained},
            "sources": {name: source.record() for name, source in self.sources.items()},
            "tokens": round(self.tokens),
            "store_bytes": round(self.store_bytes),
            "work_bytes": round(self.work_bytes),
            "seconds": self.seconds,
        }


def estimate(corpus: Corpus, *, sample: int = SAMPLE_DOCUMENTS) -> CorpusEstimate:
    """Look at `sample` documents of every source, and estimate the whole.

    Raises ``UserError`` for mistakes in the corpus, as `prepare` does, and where no document of the sample is kept.
    """
    tokenizer = given_tokenizer(corpus)
    sources: dict[str, SourceEstimate] = {}
    texts: dict[str, list[str]] = {}
    seen: FileLister | None = None
    for name, config in corpus.sources.items():
        found = sources[name] = SourceEstimate()
        seen = FileLister(found.problems, after=seen)
        options = corpus.read_options(name)
        chosen = _chosen(_counted(seen.files(config.paths, suffixes=config.suffixes), found, options), sample, options)
        texts[name] = list(_kept_texts(corpus, name, chosen, sample, found))
    everything = [text for own in texts.values() for text in own]
    if not everything:
        rules = sum((source.dropped for source in sources.values()), Counter[str]())
        problems = [reason for source in sources.values() for reason in source.problems.counts]
        raise UserError(
            f"the sample keeps no document: {counted(sum(source.files for source in sources.values()), 'file')}; "
            f"{', '.join([*(f'{count} × {rule}' for rule, count in rules.items()), *problems]) or 'no documents'}"
        )
    encoder = _encoder(tokenizer, everything, corpus.vocab_size or DEFAULT_VOCAB_SIZE)
    for name, own in texts.items():
        _tokenize(corpus, encoder, own, sources[name], most_tokens=corpus.sources[name].max_tokens)
    documents = sum(source.documents for source in sources.values())
    labelled = sum(own.documents for name, own in sources.items() if corpus.sources[name].label_field is not None)
    token_bytes = _TOKEN_BYTES * sum(source.tokens for source in sources.values())
    duplicates = corpus.duplicates
    keys = duplicates.exact * _EXACT_KEY_BYTES + duplicates.near * _NEAR_KEYS_BYTES
    kept_keys = duplicates.exact * _KEPT_EXACT_BYTES + duplicates.near * _KEPT_NEAR_BYTES if duplicates.keep_keys else 0
    return CorpusEstimate(
        sources=sources,
        tokenizer=encoder.name,
        is_trained=tokenizer is None,
        store_bytes=token_bytes + documents * (_STORED_DOCUMENT_BYTES + kept_keys) + labelled * _LABEL_BYTES,
        work_bytes=token_bytes + documents * (_RECORD_BYTES + keys) + labelled * _LABEL_BYTES,
    )


def _counted(files: Iterable[SourceFile], found: SourceEstimate, options: ReadOptions) -> Iterator[SourceFile]:
    for file in files:
        found.files += 1
        found.file_bytes += file.size_bytes
        entry = format_of(file, options)
        is_whole = isinstance(entry, str) or is_packed(file) or not file.gives_parts or not entry.divides
        (found.whole_sizes if is_whole else found.divided_sizes).append(file.size_bytes)
        if file.size_bytes > unit_parts.PART_BYTES and has_parts(file, options):
            found.part_sizes.append(file.size_bytes)
        yield file


def _chosen(files: Iterable[SourceFile], sample: int, options: ReadOptions) -> list[SourceFile]:
    """Some of them, enough for ``sample`` documents. Memory does not grow with their number."""
    # By a hash of the name: every n-th could be always of one kind, where kinds take turns.
    some = heapq.nsmallest(sample, files, key=lambda file: xxhash.xxh3_64_intdigest(file.id.encode(), seed=_SEED))
    of_many = [file for file in some if _holds_many(file, options)]
    return [*of_many[:_FILES], *(file for file in some if not _holds_many(file, options))]


def _holds_many(file: SourceFile, options: ReadOptions) -> bool:
    entry = format_of(file, options)
    return not isinstance(entry, str) and entry.holds_many


def _kept_texts(
    corpus: Corpus, name: str, files: list[SourceFile], sample: int, found: SourceEstimate
) -> Iterator[str]:
    """The texts among the first documents of ``files`` that the filters keep; counts what it sees in ``found``."""
    options, rules, chat = corpus.read_options(name), corpus.filter_of(name), corpus.chats().get(name)
    for number, file in enumerate(files):
        # What a short file leaves of its share is for those behind it.
        wanted = -(-(sample - found.sampled) // (len(files) - number))
        if not wanted:
            return
        own = FileSample(size_bytes=file.size_bytes)
        found.samples.append(own)
        spent = _Stopwatch(found.stage_seconds)
        for raw in _first_documents(file, wanted, options, own, found.problems):
            spent.lap("read")
            own.sampled += 1
            own.sampled_bytes += raw.text_bytes
            texts = [normalise(one).text for one in raw.texts] if chat is None else [_text_of(chat, raw, name)]
            spent.lap("normalise")
            judged = [_judged(rules, text) for text in texts]
            rule = next((rule for _, rule in judged if rule is not None), None)
            spent.lap("filter")
            if rule is None:
                if options.label_field is not None:
                    class_of(raw.label, raw.id, field=options.label_field, classes=corpus.classes)
                own.kept += 1
                for text, _ in judged:
                    own.kept_bytes += len(text.encode())
                    yield text
            else:
                found.dropped[rule] += 1
            spent.begin()


def _text_of(chat: Chat, raw: RawDocument, source: str) -> str:
    try:
        # Of a preference both, one after the other.
        return "".join(one.text for one in chat.texts_of(json.loads(valid_unicode(raw.data).text)))
    except ChatFault as fault:
        raise UserError(f"{raw.id}: sources.{source}: {fault}") from fault


class _Stopwatch:
    """Adds processor time to the stage that it went into."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self.begin()

    def begin(self) -> None:
        """What was before does not count."""
        self._since = time.process_time()

    def lap(self, stage: str) -> None:
        """What was since the last call was ``stage``."""
        now = time.process_time()
        self._seconds[stage] += now - self._since
        self._since = now


def _judged(rules: Chain | None, text: str) -> tuple[str, str | None]:
    """The text as the filters leave it, and the reason to drop it."""
    if not text or text.isspace():
        return text, EMPTY
    if rules is None:
        return text, None
    verdict = rules.judge(text)
    return verdict.text, verdict.rule


def _first_documents(
    file: SourceFile, wanted: int, options: ReadOptions, own: FileSample, problems: Problems
) -> Iterator[RawDocument]:
    """The first ``wanted`` documents of a file, and in ``own`` how much of the file was read for how many.

    Files are read in buffers, and only at the end of one is it known how many bytes its documents take: the documents
    up to there are counted too, but not given. Some formats know their rows.
    """
    num_rows: int | None = None
    consumed = 0

    def advance(num_bytes: int) -> None:
        nonlocal consumed
        consumed += num_bytes

    for file_range in cut_into_ranges(file, _WHOLE_FILE, problems, options=options):
        entry = format_of(file, options)
        assert not isinstance(entry, str), "it has ranges"
        num_rows = entry.load(file).num_rows(file)
        for raw in read(file_range, problems, options=options, advance=advance):
            if own.seen_documents >= wanted and (consumed >= _SEEN_BYTES or num_rows is not None):
                break
            own.seen_documents += 1
            own.seen_bytes += raw.text_bytes
            if own.seen_documents <= wanted:
                yield raw
    if num_rows and own.seen_documents:
        own.seen_file_bytes = file.size_bytes * own.seen_documents / num_rows
    else:
        own.seen_file_bytes = consumed


def _encoder(tokenizer: Tokenizer | None, texts: list[str], vocab_size: int) -> Tokenizer:
    """The corpus's tokenizer, or one trained on the sample, ready to encode."""
    if tokenizer is None:
        tokenizer = train_sentencepiece(texts, vocab_size=vocab_size)
    encoder = with_fast_path(tokenizer)
    # What is done once does not count as time for each document.
    encoder.encode_batch(texts[:1])
    return encoder


def _tokenize(
    corpus: Corpus, encoder: Tokenizer, texts: list[str], found: SourceEstimate, *, most_tokens: int | None
) -> None:
    spent = _Stopwatch(found.stage_seconds)
    ids = encoder.encode_batch(texts) if texts else []
    spent.lap("tokenize")
    if corpus.duplicates.exact:
        for text in texts:
            document_key(text)
    if corpus.duplicates.near and ids:
        band_keys(signatures(ids))
    spent.lap("keys")
    found.kept_tokens = sum(len(one) if most_tokens is None else min(len(one), most_tokens - 1) for one in ids)
