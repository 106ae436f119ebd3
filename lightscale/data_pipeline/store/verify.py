"""Verifies a store: every shard's hash, the document ends, the range of the tokens, the tokenizer.

A damaged shard is named with its damaged blocks, where the store has hashes of blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightscale.data_pipeline.executors import Progress, ProgressMeter
from lightscale.data_pipeline.store.array_group import ArrayGroup
from lightscale.data_pipeline.store.document_keys import DocumentKeys
from lightscale.data_pipeline.store.format import HASHES_DIR, INPUT_FILES_DIR, KEYS_DIR, TokenizerIdentity, read_root
from lightscale.data_pipeline.store.shards import ShardLayout, block_range, hash_shard, read_metadata
from lightscale.data_pipeline.store.token_store import TokenSource, source_identity
from lightscale.data_pipeline.tokenizers import load_tokenizer
from lightscale.errors import UserError

_READ_VALUES = 2**21
_MAX_RANGES = 10
_STEP = "verify"


@dataclass(kw_only=True)
class Verification:
    """The checked files and their faults."""

    store: Path
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Split, counts and content hash of the sources in which nothing is wrong."""
    num_shards: int = 0
    """Files that were read: shards, and those with the hashes of their blocks."""
    num_bytes: int = 0
    faults: list[str] = field(default_factory=list)
    """One line each: the file, the hash found, the hash recorded."""


def verify_store(path: Path, progress: Progress) -> Verification:
    """Read all of the store at ``path``.

    ``UserError`` where there is no store, or one of another version; all else that is wrong is in ``faults``.
    """
    root = read_root(path)
    verification = Verification(store=path)
    faults = verification.faults
    try:
        if load_tokenizer(path).sha256 != root.tokenizer.sha256:
            faults.append(
                f"{path / 'tokenizer'}: not the tokenizer with sha256 {root.tokenizer.sha256} of {path / 'zarr.json'}"
            )
    except UserError as error:
        faults.append(str(error))
    has_files = root.is_checked and (path / INPUT_FILES_DIR).is_dir()
    groups = [path / name for name in (*root.sources, *([INPUT_FILES_DIR] if has_files else ()))]
    meter = ProgressMeter(_STEP, sum(file.stat().st_size for group in groups for file in _shard_files(group)), progress)
    for group in groups:
        before = len(faults)
        faults.extend(_group_faults(group, verification, meter, is_checked=root.is_checked))
        if group.name not in root.sources:
            continue
        try:
            source = TokenSource(group, group.name)  # without checks: all its blocks were just compared
            if len(faults) == before:  # values of damaged shards would only repeat the fault
                faults.extend(_value_faults(source, group, root.tokenizer))
        except UserError as error:
            if str(error) not in faults:
                faults.append(str(error))
            continue
        if len(faults) == before:
            verification.sources[group.name] = source_identity(source)
    if (path / KEYS_DIR).is_dir():
        faults.extend(_key_faults(path, verification))
    return verification


def _key_faults(path: Path, verification: Verification) -> Iterator[str]:
    """What is wrong with the keys of the store's documents."""
    try:
        keys = DocumentKeys(path)
    except UserError as error:
        yield str(error)
        return
    for kind, files in keys.files.items():
        for number in range(len(files)):
            verification.num_bytes += keys.path(kind, number).stat().st_size
            if fault := keys.fault(kind, number):
                yield fault


def _shard_files(directory: Path) -> Iterator[Path]:
    """All files below ``directory`` that hold values, or should not be there."""
    for file in sorted(directory.rglob("*")):
        if "c" in file.relative_to(directory).parts and file.is_file():
            yield file


def _group_faults(
    directory: Path, verification: Verification, meter: ProgressMeter, *, is_checked: bool
) -> Iterator[str]:
    """Files that do not have the hash that the group says, and files it does not know."""
    try:
        group = ArrayGroup(directory, is_checked=is_checked)
    except UserError as error:
        yield str(error)
        return
    if directory.name != INPUT_FILES_DIR and not {"tokens", "doc_ends"} <= group.arrays.keys():
        return  # damaged attributes; opening the source says so
    known: set[Path] = set()
    for name, hashes in group.arrays.items():
        of_blocks = directory / HASHES_DIR / name
        try:
            length, layout = read_metadata(directory / name / "zarr.json")
            block_files = group.block_files(name) if is_checked else [""] * len(hashes)
        except UserError as error:
            yield str(error)
            known.update(_shard_files(directory / name), _shard_files(of_blocks))
            continue
        for number, (written, of_its_blocks) in enumerate(zip(hashes, block_files, strict=True)):
            shard = _Shard(layout=layout, length=length, number=number, directory=directory / name)
            file = layout.hashes.path(of_blocks, number)
            known |= {shard.file, file}
            expected = None
            if is_checked:
                fault, expected = _block_hashes(file, of_its_blocks, shard, verification, meter)
                yield from fault
            yield from _shard_faults(shard, written, expected, verification, meter)
    for file in sorted(set(_shard_files(directory)) - known):
        yield f"{file}: does not belong to a shard of this store"


@dataclass(frozen=True, kw_only=True)
class _Shard:
    layout: ShardLayout
    length: int
    number: int
    directory: Path

    @property
    def file(self) -> Path:
        return self.layout.path(self.directory, self.number)

    @property
    def num_values(self) -> int:
        return max(self.layout.values_in(self.number, self.length), 0)


def _block_hashes(
    file: Path, written: str, shard: _Shard, verification: Verification, meter: ProgressMeter
) -> tuple[list[str], NDArray[np.uint64] | None]:
    """(what is wrong with a file of block hashes, (blocks,) the hashes if nothing is)."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        return [f"{file}: {error.strerror}; the block-hash file of a shard is missing"], None
    _count(len(raw), verification, meter)
    verification.num_shards += 1
    if (found := xxhash.xxh3_128_hexdigest(raw)) != written:
        return [f"{file}: content hash {found} instead of {written}; the block hashes are damaged"], None
    num_blocks = shard.layout.num_blocks(shard.num_values)
    if len(raw) < num_blocks * 8:
        return [f"{file}: {len(raw)} bytes do not hold the hashes of {num_blocks} blocks; the store is damaged"], None
    return [], np.frombuffer(raw, dtype="<u8", count=num_blocks)


def _shard_faults(
    shard: _Shard,
    written: str,
    expected: NDArray[np.uint64] | None,
    verification: Verification,
    meter: ProgressMeter,
) -> Iterator[str]:
    """What is wrong with a shard file of the hash ``written`` whose (blocks,) hashes should be ``expected``."""
    try:
        found, hashes = hash_shard(
            shard.file, shard.layout, shard.num_values, lambda size: _count(size, verification, meter)
        )
    except OSError as error:
        yield f"{shard.file}: {error.strerror}; a shard is missing"
        return
    verification.num_shards += 1
    blocks = np.frombuffer(hashes, dtype="<u8")
    differing: list[int] | None = None
    if expected is not None:
        # A shard that was cut has fewer blocks than it should.
        same = np.zeros(len(expected), dtype=bool)
        num_found = min(len(blocks), len(expected))
        same[:num_found] = blocks[:num_found] == expected[:num_found]
        differing = np.flatnonzero(~same).tolist()
    if found != written:
        damage = "the shard is damaged"
        if differing is not None:
            damage += f": {_named(shard, differing)}" if differing else " after its values; all values are intact"
        yield f"{shard.file}: content hash {found} instead of {written}; {damage}"
    elif differing:
        yield f"{shard.file}: {_named(shard, differing)}: does not match the block hashes"


def _named(shard: _Shard, blocks: list[int]) -> str:
    """Damaged blocks, with what is in them."""
    ranges: list[tuple[int, int]] = []
    for block in blocks:
        if ranges and ranges[-1][1] == block - 1:
            ranges[-1] = ranges[-1][0], block
        else:
            ranges.append((block, block))
    shown = []
    for first, last in ranges[:_MAX_RANGES]:
        begin, end = (block_range(shard.layout, shard.length, shard.number, block) for block in (first, last))
        name = f"block {first}" if first == last else f"blocks {first} to {last}"
        shown.append(f"{name} ({shard.directory.name} {begin[0]:,} to {end[1] - 1:,})")
    more = f" and {len(ranges) - _MAX_RANGES:,} more ranges" if len(ranges) > _MAX_RANGES else ""
    return ", ".join(shown) + more


def _count(num_bytes: int, verification: Verification, meter: ProgressMeter) -> None:
    verification.num_bytes += num_bytes
    meter.advance(num_bytes)


def _value_faults(source: TokenSource, directory: Path, tokenizer: TokenizerIdentity) -> Iterator[str]:
    """Ends that do not ascend, ids beyond the vocabulary, end-of-text tokens that do not begin documents."""
    # Hashes hold what was written; these checks hold that what was written makes sense.
    begin = 0
    for first in range(0, source.num_documents, _READ_VALUES):
        ends = source.document_ends(first, min(first + _READ_VALUES, source.num_documents))
        starts = np.concatenate([[begin], ends[:-1]])
        if len(wrong := np.flatnonzero(ends <= starts)):
            at = int(wrong[0])
            yield (
                f"{directory / 'doc_ends'}: document {first + at} ends at {ends[at]}, the previous document at "
                f"{starts[at]}"
            )
            return
        begin = int(ends[-1])
    for first in range(0, source.num_tokens, _READ_VALUES):
        last = min(first + _READ_VALUES, source.num_tokens)
        tokens = source.read(first, last)
        if len(wrong := np.flatnonzero(tokens >= tokenizer.vocab_size)):
            at = int(wrong[0])
            yield (
                f"{directory / 'tokens'}: token {first + at} is {tokens[at]}, the last id is {tokenizer.vocab_size - 1}"
            )
        starts = source.document_starts(first, last)
        found = np.flatnonzero(tokens == tokenizer.eot_id) + first
        if source.chat is not None:  # whose templates may write the token inside of documents
            found = np.intersect1d(found, starts)
        if not np.array_equal(found, starts[starts >= first]):
            token = np.setxor1d(found, starts[starts >= first])[0]
            yield f"{directory / 'tokens'}: token {token} is a document start or end of text, but not both"
            return
