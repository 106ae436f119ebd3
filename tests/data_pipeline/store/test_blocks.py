"""What is read is what was prepared: every block is compared, and what changes under a process is found."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zarr
from numpy.typing import NDArray

from lightscale.data_pipeline.store import sharded_array
from lightscale.data_pipeline.store.blocks import BlockHasher, hash_blocks
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenSource, TokenStore
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer
from lightscale.errors import UserError

SHARD = 4 * 4096
"""Tokens: four blocks."""
MakeStore = Callable[..., tuple[Path, NDArray[np.uint32]]]


@pytest.fixture(autouse=True)
def every_read_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test changes a file within the millisecond after a read."""
    monkeypatch.setattr(sharded_array, "_LOOK_EVERY_NS", -1)


@pytest.fixture
def make_store(tmp_path: Path, byte_tokenizer: TiktokenTokenizer) -> MakeStore:
    """``make_store(num_documents, length)``: (a store of one source, its tokens)."""

    def make(num_documents: int = 100, length: int = 400) -> tuple[Path, NDArray[np.uint32]]:
        path = tmp_path / "store"
        generator = np.random.default_rng(0)
        with StoreWriter(path, byte_tokenizer, shard_tokens=SHARD, chunk_tokens=4096) as writer:
            source = writer.source("words", has_loss_mask=True, documents={"label": "int32"})
            for number in range(num_documents):
                ids = generator.integers(0, 256, length, dtype=np.uint32)
                source.append(ids, num_bytes=length, loss_mask=ids % 2, documents={"label": number})
            writer.finish({})
        return path, zarr.open_array(path / "words" / "tokens", mode="r")[:]  # type: ignore[return-value]

    return make


def source_of(path: Path) -> TokenSource:
    return TokenStore(path).source("words")


def change(path: Path, offset: int, by: int = 1) -> None:
    """A byte of a file, as a program would that writes into it."""
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ by]))


@pytest.mark.parametrize("sizes", [[0], [1], [99], [100], [101], [30, 70, 250, 5], [100, 100], [350]])
def test_hashes_of_a_stream_do_not_depend_on_how_it_comes(sizes: list[int]) -> None:
    raw = np.random.default_rng(0).bytes(sum(sizes))
    hasher = BlockHasher(100)
    for end, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True):
        hasher.update(memoryview(raw)[end - size : end])
    blocks = [raw[start : start + 100] for start in range(0, len(raw), 100)]
    assert np.frombuffer(hasher.finish(), dtype="<u8").tolist() == [xxhash.xxh3_64_intdigest(block) for block in blocks]


def test_the_hashes_are_a_zarr_array_and_those_of_the_blocks(make_store: MakeStore) -> None:
    path, tokens = make_store()
    hashes = zarr.open_group(path, mode="r")["words/hashes/tokens"]
    assert isinstance(hashes, zarr.Array)
    blocks = [tokens[start : start + 4096].tobytes() for start in range(0, len(tokens), 4096)]
    assert np.asarray(hashes[:]).tolist() == [xxhash.xxh3_64_intdigest(block) for block in blocks]


def test_room_that_hashes_take(tmp_path: Path, byte_tokenizer: TiktokenTokenizer) -> None:
    """8 bytes for 16 KiB, an index, and 2 characters of the attributes for 1 MiB."""
    with StoreWriter(tmp_path / "store", byte_tokenizer, shard_tokens=2**20, chunk_tokens=2**16) as writer:
        source = writer.source("words")
        for _ in range(4):
            source.append(np.zeros(2**20 - 1, dtype=np.uint32), num_bytes=1)
        writer.finish({})
    directory = tmp_path / "store" / "words"
    tokens, hashes = (
        sum(file.stat().st_size for file in (directory / name).glob("c/*")) for name in ("tokens", "hashes/tokens")
    )
    assert tokens >= 2**24
    assert hashes == 2**24 // 2**14 * 8 + 4 * (16 + 4)
    assert hashes < 0.0006 * tokens


@pytest.mark.parametrize("is_read_before", [False, True])
@pytest.mark.parametrize(
    ("token", "shard", "block"), [(0, 0, 0), (8191, 0, 1), (SHARD + 3 * 4096, 1, 3), (40_099, 2, 1)]
)
def test_changed_tokens_are_named_whether_they_were_read_before_or_not(
    make_store: MakeStore, token: int, shard: int, block: int, is_read_before: bool
) -> None:
    path, tokens = make_store()
    source = source_of(path)
    if is_read_before:
        assert np.array_equal(source.read(0, source.num_tokens), tokens)
    change(path / "words" / "tokens" / "c" / str(shard), (token - shard * SHARD) * 4)
    first = shard * SHARD + block * 4096
    last = min(first + 4096, source.num_tokens) - 1
    message = (
        f"words/tokens/c/{shard}: source words, shard {shard}, block {block} (tokens {first:,} to {last:,}) "
        f"has changed since preparation; `lightscale data verify {path}`"
    )
    for start, stop in ((token, token + 1), (0, source.num_tokens), (max(first - 5, 0), last)):
        with pytest.raises(UserError, match=re.escape(message)):
            source.read(start, stop)
    # All other blocks can be read.
    assert np.array_equal(source.read(0, first), tokens[:first])
    assert np.array_equal(source.read(last + 1, source.num_tokens), tokens[last + 1 :])
    (fault,) = verify_store(path, lambda step, done, total: None).faults
    assert f"the shard is damaged: block {block} (tokens {first:,} to {last:,})" in fault


def test_a_write_through_a_memory_map_is_found_too(make_store: MakeStore) -> None:
    path, tokens = make_store()
    source = source_of(path)
    source.read(0, source.num_tokens)
    mapped = np.memmap(path / "words" / "tokens" / "c" / "0", dtype="<u4", mode="r+")
    mapped[::10] ^= 1
    mapped.flush()
    with pytest.raises(UserError, match=r"shard 0, block 0 \(tokens 0 to 4,095\)"):
        source.read(0, 100)
    assert np.array_equal(source.read(SHARD, SHARD + 9), tokens[SHARD : SHARD + 9])


def test_a_file_that_only_looks_changed_is_read_on(make_store: MakeStore) -> None:
    path, tokens = make_store()
    source = source_of(path)
    source.read(0, source.num_tokens)
    shard = path / "words" / "tokens" / "c" / "0"
    os.utime(shard)
    copy = shard.with_name("copy")
    copy.write_bytes((path / "words" / "tokens" / "c" / "1").read_bytes())
    copy.rename(path / "words" / "tokens" / "c" / "1")
    assert np.array_equal(source.read(0, source.num_tokens), tokens)


@pytest.mark.parametrize("array", ["loss_mask", "documents.label", "doc_ends"])
def test_a_change_of_any_array_is_named(make_store: MakeStore, array: str) -> None:
    path, _ = make_store()
    source = source_of(path)
    reads: dict[str, Callable[[], object]] = {
        "loss_mask": lambda: source.loss_mask(0, 10),
        "documents.label": lambda: source.document_values("label", 3, 4),
        "doc_ends": lambda: source.document_starts(500, 2000),
    }
    reads[array]()
    change(path / "words" / array / "c" / "0", 8)
    with pytest.raises(UserError, match=rf"words/{array}/c/0: source words, shard 0, block 0 \({array} 0 to"):
        reads[array]()
    reopened = TokenStore if array == "doc_ends" else None
    if reopened:
        with pytest.raises(UserError, match=rf"words/{array}/c/0: "):
            reopened(path)


def test_damaged_document_ends_give_an_error_or_what_was_prepared(make_store: MakeStore) -> None:
    """Also where the damage leads a bisection astray: five blocks of ends, a change anywhere in them."""
    path, _ = make_store(num_documents=9000, length=3)
    shard = path / "words" / "doc_ends" / "c" / "0"
    raw = shard.read_bytes()
    source = source_of(path)
    queries = np.random.default_rng(1).integers(0, source.num_tokens - 50, 40)
    expected = [source.document_starts(start, start + 50).tolist() for start in queries.tolist()]
    at = [source.document_at(start) for start in queries.tolist()]
    every = source.document_starts_each(queries, 50)
    errors = 0
    for seed in range(25):
        generator = np.random.default_rng(seed)
        damaged = (
            np.frombuffer(raw, dtype="<u8").copy() if len(raw) % 8 == 0 else np.frombuffer(raw[:72_000], "<u8").copy()
        )
        first = int(generator.integers(0, 8900))
        damaged[first : first + int(generator.integers(1, 3000))] = generator.integers(0, 2**40)
        shard.write_bytes(damaged.tobytes() + raw[72_000:])
        try:
            found = source.document_starts_each(queries, 50)
            assert all(np.array_equal(one, other) for one, other in zip(found, every, strict=True))
        except UserError:
            errors += 1
        for start, starts, document in zip(queries.tolist(), expected, at, strict=True):
            try:
                assert source.document_starts(start, start + 50).tolist() == starts
                assert source.document_at(start) == document
            except UserError:
                errors += 1
    assert 0 < errors < 25 * 40
    shard.write_bytes(raw)
    assert [source.document_starts(start, start + 50).tolist() for start in queries.tolist()] == expected


@pytest.mark.parametrize("array", ["tokens", "doc_ends"])
@pytest.mark.parametrize("is_read_before", [False, True])
def test_a_shard_that_is_cut_while_open_is_named(make_store: MakeStore, array: str, is_read_before: bool) -> None:
    """Of document ends, which are mapped, without the signal that reading beyond the end of a file gives."""
    path, _ = make_store()
    source = source_of(path)

    def read() -> object:
        return source.read(0, 10) if array == "tokens" else source.document_starts_each(np.array([5000, 9000]), 100)

    if is_read_before:
        read()
    os.truncate(path / "words" / array / "c" / "0", 4)
    with pytest.raises(UserError, match=rf"words/{array}/c/0: .* while in use|4 bytes instead of"):
        read()


@pytest.mark.parametrize("damage", ["changed", "cut", "removed"])
def test_damaged_hashes_are_named_as_such(make_store: MakeStore, damage: str) -> None:
    path, tokens = make_store()
    source = source_of(path)
    file = path / "words" / "hashes" / "tokens" / "c" / "1"
    match damage:
        case "changed":
            change(file, 9)
        case "cut":
            os.truncate(file, 8)
        case "removed":
            file.unlink()
    assert np.array_equal(source.read(0, SHARD), tokens[:SHARD])
    with pytest.raises(UserError, match=r"words/hashes/tokens/c/1: .*(have changed|No such file)"):
        source.read(SHARD, SHARD + 1)
    faults = verify_store(path, lambda step, done, total: None).faults
    assert [fault for fault in faults if str(file) in fault]
    assert not any("words/tokens" in fault for fault in faults)


def test_a_shard_and_its_hashes_of_another_preparation_are_found(
    make_store: MakeStore, tmp_path: Path, byte_tokenizer: TiktokenTokenizer
) -> None:
    """Hashes are compared with what was in the attributes when the store was opened."""
    path, _ = make_store()
    source = source_of(path)
    with StoreWriter(tmp_path / "other", byte_tokenizer, shard_tokens=SHARD, chunk_tokens=4096) as writer:
        writer.source("words").append(np.full(3 * SHARD, 7, dtype=np.uint32), num_bytes=1)
        writer.finish({})
    for name in ("tokens/c/0", "hashes/tokens/c/0"):
        (path / "words" / name).write_bytes((tmp_path / "other" / "words" / name).read_bytes())
    with pytest.raises(UserError, match=r"words/hashes/tokens/c/0: "):
        source.read(0, 1)


def test_blocks_are_hashed_when_they_are_read_first_and_not_again(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokens = make_store()
    source = source_of(path)
    hashed: list[int] = []

    def counting(raw: memoryview, block_bytes: int) -> bytes:
        hashed.append(len(raw))
        return hash_blocks(raw, block_bytes)

    monkeypatch.setattr(sharded_array, "hash_blocks", counting)
    assert np.array_equal(source.read(100, 5000), tokens[100:5000])
    assert sum(hashed) == 2 * 4096 * 4
    source.read(100, 5000)
    source.read(0, 8192)
    assert sum(hashed) == 2 * 4096 * 4
    source.read(8191, 8193)
    assert sum(hashed) == 4 * 4096 * 4
