"""Token stores: written from documents, one process and one stream, or opened for reading.

``format.py`` says what is on disk; ``preparation/assemble.py`` writes the same by many processes.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.store.format import (
    CHUNK_TOKENS,
    FORMAT_VERSION,
    REPORT_FILE,
    SHARD_TOKENS,
    SourceCounts,
    Split,
    TokenizerIdentity,
    array_layouts,
    check_source_name,
    publish,
    read_attributes,
    read_root,
    require_absent,
    write_root,
    write_source_attributes,
)
from lightscale.data_pipeline.store.shards import ShardedArray, ShardWriter, read_json
from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.data_pipeline.whole_files import DISK_FULL_ERRNOS
from lightscale.errors import UserError

_BUFFER_TOKENS = 2**18


class SourceWriter:
    """Appends documents to one source of a store; made by ``StoreWriter.source``."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, split: Split, layout: tuple[int, int]) -> None:
        self._directory = directory
        self._split = split
        self._eot = np.array([tokenizer.eot_id], dtype=np.uint32)
        self._vocab_size = tokenizer.vocab_size
        layouts = array_layouts(*layout)
        self._tokens = ShardWriter(directory / "tokens", layouts["tokens"])
        self._doc_ends = ShardWriter(directory / "doc_ends", layouts["doc_ends"])
        self._waiting: list[NDArray[np.uint32]] = []
        self._waiting_ends: list[int] = []
        self._num_waiting = 0
        self.num_documents = 0
        self.num_tokens = 0
        self.num_bytes = 0

    def append(self, ids: NDArray[np.uint32], *, num_bytes: int) -> None:
        """Add a document: its (n,) ``ids`` without special ones, and the UTF-8 bytes of its text."""
        self._waiting += (self._eot, ids)
        self.num_tokens += len(ids) + 1
        self.num_documents += 1
        self.num_bytes += num_bytes
        self._waiting_ends.append(self.num_tokens)
        self._num_waiting += len(ids) + 1
        if self._num_waiting >= _BUFFER_TOKENS:
            self.flush()

    def finish(self) -> None:
        """Complete the arrays and write the source's attributes."""
        self.flush()
        self._tokens.close()
        self._doc_ends.close()
        counts = SourceCounts(documents=self.num_documents, tokens=self.num_tokens, bytes=self.num_bytes)
        hashes = {"tokens": self._tokens.shard_hashes, "doc_ends": self._doc_ends.shard_hashes}
        write_source_attributes(self._directory, self._split, counts, hashes)

    def abandon(self) -> None:
        """Close open files after an error."""
        self._tokens.abandon()
        self._doc_ends.abandon()

    def flush(self) -> None:
        """Write out what was appended."""
        if not self._waiting:
            return
        tokens = np.concatenate(self._waiting)
        assert tokens.max() < self._vocab_size, "a token id is beyond the tokenizer's vocabulary"
        self._tokens.append(tokens)
        self._doc_ends.append(np.array(self._waiting_ends, dtype=np.uint64))
        self._waiting.clear()
        self._waiting_ends.clear()
        self._num_waiting = 0


class StoreWriter:
    """Writes a store under a temporary name beside ``path``; ``finish`` makes it visible by one rename.

    Use it as a context manager. Leaving it without ``finish`` removes what was written. A full disk ends in a
    ``UserError`` that names ``path``, and leaves nothing behind.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        *,
        shard_tokens: int = SHARD_TOKENS,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        self.path = path
        self._tokenizer = tokenizer
        self._layout = (shard_tokens, chunk_tokens)
        self._temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
        self._sources: dict[str, SourceWriter] = {}

    def __enter__(self) -> Self:
        require_absent(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir()
        except OSError as error:
            raise UserError(f"{self.path}: {error.filename} cannot be made ({error.strerror})") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for source in self._sources.values():
            source.abandon()
        shutil.rmtree(self._temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
            raise UserError(
                f"{self.path}: cannot write the store ({error.strerror}); what was written is removed"
            ) from error

    def source(self, name: str, split: Split = "train") -> SourceWriter:
        """A new source. One that gets no document does not appear in the store."""
        check_source_name(name)
        if name in self._sources:
            raise UserError(f"source name {name!r}: it is in the store already; use another name")
        self._sources[name] = SourceWriter(self._temporary / name, self._tokenizer, split, self._layout)
        return self._sources[name]

    def finish(self, report: dict[str, Any]) -> None:
        """Complete everything, bring it to the disk, name it. ``report`` becomes ``report.json``."""
        written = {name: source for name, source in self._sources.items() if source.num_documents}
        if not written:
            raise UserError(f"{self.path}: no document to write; the corpus is empty")
        for source in written.values():
            source.finish()
        write_root(self._temporary, self._tokenizer, sorted(written), report)
        publish(self._temporary, self.path)


class TokenSource:
    """One source of an open store."""

    def __init__(self, directory: Path, name: str) -> None:
        """Opens and checks both arrays."""
        self.name = name
        attributes = read_attributes(directory / "zarr.json")
        try:
            self.split: str = attributes["split"]
            self.num_documents = int(attributes["documents"])
            self.num_tokens = int(attributes["tokens"])
            self.num_bytes = int(attributes["bytes"])
            self.content_hash = str(attributes["content_hash"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{directory / 'zarr.json'}: damaged attributes ({error!r})") from error
        self._tokens = ShardedArray(directory / "tokens")
        self._doc_ends = ShardedArray(directory / "doc_ends")
        for array, expected in ((self._tokens, self.num_tokens), (self._doc_ends, self.num_documents)):
            if array.length != expected or expected < 1:
                raise UserError(f"{array.directory}: {array.length} values, its source says {expected}")
        # Cheap, and it finds arrays of two different preparations in one directory.
        last_end = int(self._doc_ends.read(self.num_documents - 1, self.num_documents)[0])
        if last_end != self.num_tokens:
            at_fault = self._doc_ends.directory
            raise UserError(f"{at_fault}: the last document ends at {last_end} of {self.num_tokens} tokens")

    def read(self, start: int, stop: int) -> NDArray[np.uint32]:
        """(stop - start,) tokens from ``start`` on."""
        return self._tokens.read(start, stop)

    def read_into(self, start: int, out: NDArray[np.int32]) -> None:
        """The tokens from ``start`` on into (n,) ``out``; ids are far below 2^31."""
        self._tokens.read_into(start, out)

    def document(self, index: int) -> tuple[int, int]:
        """(start, stop) of document ``index`` in the tokens; its end-of-text token comes first."""
        ends = self._doc_ends.read(max(index - 1, 0), index + 1)
        return (int(ends[0]) if index else 0), int(ends[-1])

    def document_ends(self, first: int, last: int) -> NDArray[np.int64]:
        """(last - first,) where the documents ``first`` … ``last`` - 1 end in the tokens."""
        return self._doc_ends.read(first, last).astype(np.int64)

    def document_starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """(m,) ascending: the starts of all documents with tokens in ``start`` … ``stop`` - 1.

        The first is the document that holds ``start``, so it starts there or before.
        """
        return self._doc_ends.between(start, stop - 1).astype(np.int64)

    def document_starts_each(
        self, starts: NDArray[np.int64], num_tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``document_starts`` of the ``num_tokens`` from each of (k,) ``starts`` on: (m,) one after another, and (k,)
        how many there are of each.
        """
        found, counts = self._doc_ends.between_each(starts, starts + (num_tokens - 1))
        return found.astype(np.int64), counts

    def document_at(self, token: int) -> int:
        """The index of the document that holds ``token``; the number of documents for the end of the source."""
        return self._doc_ends.searchsorted(token)


class TokenStore:
    """An open store. Opening reads metadata and every shard's size and index, no tokens."""

    tokenizer: TokenizerIdentity
    """What it was written with."""
    weights: dict[str, float] | None
    """Default share of every training source in the samples; none: by their tokens."""

    def __init__(self, path: Path) -> None:
        """``UserError`` names the file where something is missing, damaged or of another version."""
        self.path = path
        self.tokenizer, names, self.weights = read_root(path)
        self.sources = {name: TokenSource(path / name, name) for name in names}

    def source(self, name: str) -> TokenSource:
        """The source called ``name``; ``UserError`` with the names there are."""
        if name not in self.sources:
            raise UserError(f"{self.path}: no source {name!r}; it has {', '.join(self.sources)}")
        return self.sources[name]

    def fingerprint(self) -> str:
        """sha256 over the format, the tokenizer, and every source's split, counts and content hash."""
        identity = {
            "format_version": FORMAT_VERSION,
            "tokenizer": asdict(self.tokenizer),
            "sources": {name: source_identity(source) for name, source in self.sources.items()},
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def report(self) -> dict[str, Any]:
        """What the preparation counted: the content of ``report.json``."""
        return read_json(self.path / REPORT_FILE)


def source_identity(source: TokenSource) -> dict[str, Any]:
    """What tells two sources apart, as plain values."""
    return {
        "split": source.split,
        "documents": source.num_documents,
        "tokens": source.num_tokens,
        "bytes": source.num_bytes,
        "content_hash": source.content_hash,
    }
