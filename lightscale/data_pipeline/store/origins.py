"""Where documents came from: the names of the input files, and of each document its place in one.

    SOURCE/origins/             uint32, (documents, 4): number of the file; first byte, low and high half; bytes
    SOURCE/ids/, id_ends/       the documents' own ids or URLs, and where each ends in them; only where they had some
    STORE/input_files/names/    uint8: the names of all files of the corpus, in its order, one after another
    STORE/input_files/name_ends/  uint64: where each ends
    STORE/input_files/sizes/    uint64: the bytes of each, as it lay there

16 bytes per document, and each file name once. Bytes are counted in the unpacked file. A document that is a row of a
parquet file has 0 bytes, and its first byte is the number of the row.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.store.array_group import ArrayGroup
from lightscale.data_pipeline.store.format import (
    HASHES_DIR,
    ID_ENDS,
    IDS,
    INPUT_FILES_DIR,
    ORIGINS,
    array_layouts,
    hash_attributes,
    write_group,
)
from lightscale.data_pipeline.store.sharded_array import ShardedArray
from lightscale.data_pipeline.store.shards import ShardWriter
from lightscale.errors import UserError

_NAMES, _NAME_ENDS, _SIZES = "names", "name_ends", "sizes"
_NAMES_AT_ONCE = 2**12


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a document came from."""

    file: str
    """The name of the file in the corpus."""
    first_byte: int | None
    """Where its text, or the line with it, begins in the file; None in a parquet file."""
    num_bytes: int | None
    row: int | None
    """Its row in a parquet file."""
    id: str | None
    """Its own id or URL."""

    @property
    def place(self) -> str:
        """In the file, for people."""
        if self.first_byte is None or self.num_bytes is None:
            return f"row {self.row}"
        return f"bytes {self.first_byte} to {self.first_byte + self.num_bytes}"


def origin_rows(files: NDArray[Any], begins: NDArray[np.uint64], lengths: NDArray[Any]) -> NDArray[np.uint32]:
    """(n, 4) values of ``origins``, of (n,) numbers of files, first bytes (or rows) and bytes (or 0)."""
    rows = np.empty((len(files), 4), dtype="<u4")
    rows[:, 0] = files
    rows[:, 1:3] = begins.astype("<u8").view("<u4").reshape(-1, 2)
    rows[:, 3] = lengths
    return rows


def write_input_files(store: Path, files: Iterable[tuple[str, int]], *, shard_tokens: int, chunk_tokens: int) -> None:
    """The list of the ``files`` of a corpus, with at least one: (name, size in bytes) each."""
    directory = store / INPUT_FILES_DIR
    for metadata in directory.rglob("zarr.json"):  # of an interrupted attempt
        metadata.unlink()
    layouts = array_layouts(shard_tokens, chunk_tokens)
    text, ends, sizes = writers = [
        ShardWriter(directory / name, layouts[like], hashes=directory / HASHES_DIR / name)
        for name, like in ((_NAMES, IDS), (_NAME_ENDS, ID_ENDS), (_SIZES, ID_ENDS))
    ]
    try:
        end = num_files = 0
        for batch in _batches(files):
            encoded = [name.encode() for name, _ in batch]
            stops = end + np.cumsum([len(name) for name in encoded], dtype=np.int64)
            text.append(np.frombuffer(b"".join(encoded), dtype=np.uint8))
            ends.append(stops.astype(np.uint64))
            sizes.append(np.array([size for _, size in batch], dtype=np.uint64))
            end, num_files = int(stops[-1]), num_files + len(batch)
        for writer in writers:
            writer.close()
    finally:
        for writer in writers:
            writer.abandon()
    hashes = {name: one.shard_hashes for name, one in zip((_NAMES, _NAME_ENDS, _SIZES), writers, strict=True)}
    write_group(directory, {"files": num_files, **hash_attributes(hashes)})


class InputFiles:
    """The names of the files of a store's corpus."""

    def __init__(self, store: Path) -> None:
        group = ArrayGroup(store / INPUT_FILES_DIR, is_checked=True)
        self.num_files = group.count("files")
        self._ends = group.open(_NAME_ENDS, self.num_files)
        self._names = group.open(_NAMES)
        self._sizes = group.open(_SIZES, self.num_files) if _SIZES in group.arrays else None

    def names_and_sizes(self) -> Iterator[tuple[str, int]]:
        """Of all files, in order; stores that keep no sizes have none to tell."""
        if self._sizes is None:
            return
        for first in range(0, self.num_files, _NAMES_AT_ONCE):
            stop = min(first + _NAMES_AT_ONCE, self.num_files)
            for number, size in zip(range(first, stop), self._sizes.read(first, stop).tolist(), strict=True):
                yield self.name(number), size

    def name(self, number: int) -> str:
        """That of file ``number``."""
        return _text(self._names, self._ends, number)


class Origins:
    """Where the documents of a source came from."""

    def __init__(self, group: ArrayGroup, num_documents: int, files: InputFiles) -> None:
        self._files = files
        self._rows = group.open(ORIGINS, num_documents)
        self._ids: tuple[ShardedArray, ShardedArray] | None = None
        if IDS in group.arrays:
            self._ids = group.open(IDS), group.open(ID_ENDS, num_documents)

    def of(self, document: int) -> Origin:
        """That of a document."""
        row = self._rows.read(document, document + 1)
        file, num_bytes = int(row[0, 0]), int(row[0, 3])
        begin = int(np.ascontiguousarray(row[0, 1:3]).view("<u8")[0])
        if file >= self._files.num_files:
            raise UserError(
                f"{self._rows.directory}: document {document} refers to file {file} of {self._files.num_files}; "
                "the store is damaged"
            )
        return Origin(
            file=self._files.name(file),
            first_byte=begin if num_bytes else None,
            num_bytes=num_bytes or None,
            row=None if num_bytes else begin,
            id=_text(*self._ids, document) or None if self._ids else None,
        )


def _text(text: ShardedArray, ends: ShardedArray, number: int) -> str:
    bounds = ends.read(max(number - 1, 0), number + 1).tolist()
    begin = bounds[0] if number else 0
    if not begin <= bounds[-1] <= text.length:
        raise UserError(f"{ends.directory}: value {number} is {bounds[-1]}, of {text.length}; the store is damaged")
    return bytes(text.read(begin, bounds[-1])).decode(errors="replace")


def _batches(files: Iterable[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    batch: list[tuple[str, int]] = []
    for file in files:
        batch.append(file)
        if len(batch) == _NAMES_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
