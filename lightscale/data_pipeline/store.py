"""The token store: a zarr v3 group with one group per source, written once, whole or not at all.

    STORE/zarr.json                      format, tokenizer, names of the sources; written last
    STORE/SOURCE/zarr.json               split, counts, hashes
    STORE/SOURCE/tokens/                 uint32, (tokens,): every document as [end-of-text, t1, …, tn]
    STORE/SOURCE/doc_ends/               uint64, (documents,): where each document ends in tokens, ascending
    STORE/tokenizer/                     the tokenizer, complete
    STORE/report.json                    what the preparation counted

Hashes are XXH3-128: one for every shard file, and one of a source: the hash of its shards' hashes (binary,
those of tokens, then those of doc_ends), so that several writers can make it without reading anything twice.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import xxhash
import zarr
from numpy.typing import NDArray

from lightscale import __version__
from lightscale.data_pipeline.shards import ShardedArray, ShardLayout, ShardWriter, read_json
from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError

FORMAT = "lightscale-token-store"
FORMAT_VERSION = 1
SHARD_TOKENS = 64 * 2**20
CHUNK_TOKENS = 64 * 2**10
REPORT_FILE = "report.json"
TOKENIZER_DIR = "tokenizer"
_SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_RESERVED_NAMES = frozenset({TOKENIZER_DIR, REPORT_FILE, "zarr.json"})
_BUFFER_TOKENS = 2**18
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

Split = Literal["train", "validation"]


@dataclass(frozen=True, kw_only=True)
class TokenizerIdentity:
    """Which tokenizer a store was written with."""

    name: str
    sha256: str
    eot_id: int
    vocab_size: int


class SourceWriter:
    """Appends documents to one source of a store; made by ``StoreWriter.source``."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, split: Split, layout: tuple[int, int]) -> None:
        self._directory = directory
        self._split = split
        self._eot = np.array([tokenizer.eot_id], dtype=np.uint32)
        self._vocab_size = tokenizer.vocab_size
        shard_length, chunk_length = layout
        tokens_layout = ShardLayout(dtype="uint32", shard_length=shard_length, chunk_length=chunk_length)
        ends_layout = ShardLayout(dtype="uint64", shard_length=shard_length, chunk_length=chunk_length)
        self._tokens = ShardWriter(directory / "tokens", tokens_layout)
        self._doc_ends = ShardWriter(directory / "doc_ends", ends_layout)
        self._waiting: list[NDArray[np.uint32]] = []
        self._waiting_ends: list[int] = []
        self._num_waiting = 0
        self.num_documents = 0
        self.num_tokens = 0
        self.num_bytes = 0
        self.token_counts: NDArray[np.int64] = np.zeros(tokenizer.vocab_size, dtype=np.int64)

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
        attributes = {
            "split": self._split,
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "bytes": self.num_bytes,
            "content_hash": _hash_of_hashes([*self._tokens.shard_hashes, *self._doc_ends.shard_hashes]),
            "shard_hashes": {"tokens": self._tokens.shard_hashes, "doc_ends": self._doc_ends.shard_hashes},
        }
        zarr.create_group(self._directory, attributes=attributes, zarr_format=3)

    def abandon(self) -> None:
        """Let go of open files after an error."""
        self._tokens.abandon()
        self._doc_ends.abandon()

    def flush(self) -> None:
        """Write out what was appended; brings ``token_counts`` up to date."""
        if not self._waiting:
            return
        tokens = np.concatenate(self._waiting)
        counts = np.bincount(tokens, minlength=self._vocab_size)
        assert len(counts) == self._vocab_size, "a token id is beyond the tokenizer's vocabulary"
        self.token_counts += counts
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
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise UserError(
                f"{self.path}: no room left for the store ({error.strerror}); what was written is removed"
            ) from error

    def source(self, name: str, split: Split = "train") -> SourceWriter:
        """A new source. One that gets no document does not appear in the store."""
        if not _SOURCE_NAME.fullmatch(name) or name in _RESERVED_NAMES:
            raise UserError(
                f"source name {name!r}: a name is a letter or digit, then letters, digits, '_', '.' and '-'; "
                f"{', '.join(sorted(_RESERVED_NAMES))} are taken"
            )
        if name in self._sources:
            raise UserError(f"source name {name!r}: it is in the store already; every source needs its own")
        self._sources[name] = SourceWriter(self._temporary / name, self._tokenizer, split, self._layout)
        return self._sources[name]

    def finish(self, report: dict[str, Any]) -> None:
        """Complete everything, bring it to the disk, name it. ``report`` becomes ``report.json``."""
        written = {name: source for name, source in self._sources.items() if source.num_documents}
        if not written:
            raise UserError(f"{self.path}: no document to write; the corpus is empty")
        for source in written.values():
            source.finish()
        (self._temporary / TOKENIZER_DIR).mkdir()
        self._tokenizer.save(self._temporary / TOKENIZER_DIR)
        text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
        (self._temporary / REPORT_FILE).write_text(text, encoding="utf-8")
        identity = TokenizerIdentity(
            name=self._tokenizer.name,
            sha256=self._tokenizer.sha256,
            eot_id=self._tokenizer.eot_id,
            vocab_size=self._tokenizer.vocab_size,
        )
        attributes = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "created_by": f"lightscale {__version__}",
            "tokenizer": asdict(identity),
            "sources": sorted(written),
        }
        zarr.create_group(self._temporary, attributes=attributes, zarr_format=3)
        _sync_tree(self._temporary)
        require_absent(self.path)  # another process may have been faster
        self._temporary.rename(self.path)
        _sync(self.path.parent)


class TokenSource:
    """One source of an open store."""

    def __init__(self, directory: Path, name: str) -> None:
        """Opens and checks both arrays."""
        self.name = name
        attributes = _attributes(directory / "zarr.json")
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
        last_end = int(self._doc_ends.read(self.num_documents - 1, self.num_documents)[0])
        if last_end != self.num_tokens:
            at_fault = self._doc_ends.directory
            raise UserError(f"{at_fault}: the last document ends at {last_end} of {self.num_tokens} tokens")

    def read(self, start: int, stop: int) -> NDArray[np.uint32]:
        """(stop - start,) tokens from ``start`` on."""
        return self._tokens.read(start, stop)

    def document(self, index: int) -> tuple[int, int]:
        """(start, stop) of document ``index`` in the tokens; its end-of-text token comes first."""
        ends = self._doc_ends.read(max(index - 1, 0), index + 1)
        return (int(ends[0]) if index else 0), int(ends[-1])

    def document_starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """(m,) ascending: the starts of all documents with tokens in ``start`` … ``stop`` - 1.

        The first is the document that holds ``start``, so it starts there or before.
        """
        first, last = self._doc_ends.searchsorted(start), self._doc_ends.searchsorted(stop - 1)
        if first:
            return self._doc_ends.read(first - 1, last).astype(np.int64)
        return np.concatenate([np.zeros(1, dtype=np.int64), self._doc_ends.read(0, last).astype(np.int64)])


class TokenStore:
    """An open store. Opening reads metadata and every shard's size and index, no tokens."""

    def __init__(self, path: Path) -> None:
        """``UserError`` names the file where something is missing, damaged or of another version."""
        self.path = path
        if not path.is_dir():
            raise UserError(f"{path}: no token store there; `lightscale data prepare` writes one")
        metadata_path = path / "zarr.json"
        if not metadata_path.exists():
            raise UserError(f"{path}: it has no zarr.json; `lightscale data prepare` writes token stores")
        attributes = _attributes(metadata_path)
        if attributes.get("format") != FORMAT:
            raise UserError(f"{metadata_path}: format {attributes.get('format')!r} instead of {FORMAT!r}")
        if attributes.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"{metadata_path}: format version {attributes.get('format_version')}, this lightscale reads "
                f"{FORMAT_VERSION}; prepare the store again"
            )
        try:
            self.tokenizer = TokenizerIdentity(**attributes["tokenizer"])
            names: Sequence[str] = [str(name) for name in attributes["sources"]]
        except (KeyError, TypeError) as error:
            raise UserError(f"{metadata_path}: damaged attributes ({error!r})") from error
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

    def require_tokenizer(self, sha256: str, wanted_by: str) -> None:
        """``UserError`` if the store's tokenizer is not the one of ``wanted_by``, another store or a run."""
        if self.tokenizer.sha256 != sha256:
            raise UserError(
                f"{self.path}: written with the tokenizer {self.tokenizer.name} "
                f"(sha256 {self.tokenizer.sha256[:16]}…), {wanted_by} has another (sha256 {sha256[:16]}…); "
                "the same ids are other texts there"
            )

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


def require_absent(path: Path) -> None:
    """``UserError`` if there is something at ``path`` other than an empty directory."""
    is_empty_dir = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    if (path.exists() or path.is_symlink()) and not is_empty_dir:
        raise UserError(f"{path}: it exists and is never overwritten; remove it or choose another path")


def _attributes(path: Path) -> dict[str, Any]:
    metadata = read_json(path)
    attributes = metadata.get("attributes")
    if metadata.get("node_type") != "group" or not isinstance(attributes, dict):
        raise UserError(f"{path}: not the metadata of a zarr v3 group with attributes; the store is damaged")
    return attributes


def _hash_of_hashes(hashes: list[str]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(digest) for digest in hashes))


def _sync_tree(directory: Path) -> None:
    """Bring every file and directory below ``directory`` to the disk, and itself."""
    for entry in sorted(directory.rglob("*")):
        _sync(entry)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
