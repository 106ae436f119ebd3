import itertools
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightscale.data_pipeline.preparation.dedup import (
    document_key,
    find_pairs,
    merge_pairs,
    write_band_records,
    write_exact_records,
)
from lightscale.data_pipeline.preparation.dedup.records import Kind
from lightscale.errors import UserError

SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd: small numbers become different keys all over the range
Write = Callable[..., list[Path]]


def drops(files: Sequence[Path], kind: Kind, num_ranges: int = 1) -> NDArray[np.uint64]:
    """What the ranges together drop."""
    parts = (find_pairs(files, kind, range_index=index, num_ranges=num_ranges) for index in range(num_ranges))
    return merge_pairs(parts)[0]


def plain_drops(keys: Sequence[Sequence[int]], documents: Sequence[int]) -> list[int]:
    """By breadth-first search over documents that share a key: all but the lowest of each cluster."""
    holders: dict[int, set[int]] = defaultdict(set)
    own: dict[int, set[int]] = defaultdict(set)
    for document, row in zip(documents, keys, strict=True):
        for key in row:
            holders[key].add(document)
            own[document].add(key)
    drops, seen = [], set()
    for document in sorted(documents):
        if document in seen:
            continue
        waiting, cluster = [document], set()
        while waiting:
            one = waiting.pop()
            if one not in cluster:
                cluster.add(one)
                waiting += itertools.chain.from_iterable(holders[key] for key in own[one])
        drops += sorted(cluster)[1:]
        seen |= cluster
    return sorted(drops)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """``write(keys, documents, num_files=1)``: (docs, bands) keys and (docs,) ids into files, in turn."""

    def write_files(keys: NDArray[np.uint64], documents: NDArray[np.uint64], num_files: int = 1) -> list[Path]:
        files = []
        for number in range(num_files):
            files.append(tmp_path / f"records-{number}")
            write_band_records(files[-1], keys[number::num_files], documents[number::num_files])
        return files

    return write_files


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), num_documents=st.integers(0, 60), num_keys=st.integers(1, 1000))
def test_the_lowest_of_each_cluster_stays(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_documents: int, num_keys: int
) -> None:
    generator = np.random.default_rng(seed)
    documents = generator.permutation(2**40 + np.arange(num_documents) * 977).astype(np.uint64)
    keys = generator.integers(0, num_keys, (num_documents, 14)).astype(np.uint64) * SPREAD
    expected = plain_drops(keys.tolist(), documents.tolist())
    directory = tmp_path_factory.mktemp("records")
    for num_files, num_ranges in ((1, 1), (3, 4), (2, 70)):
        files = []
        for number in range(num_files):
            files.append(directory / f"{num_files}-{number}")
            write_band_records(files[-1], keys[number::num_files], documents[number::num_files])
        found = drops(files[::-1], "near", num_ranges)
        assert found.dtype == np.uint64
        assert found.tolist() == expected


def test_ranges_merge_to_the_same_in_any_order_and_grouping(write: Write) -> None:
    generator = np.random.default_rng(5)
    documents = np.arange(3000, dtype=np.uint64)
    keys = generator.integers(0, 9000, (3000, 6)).astype(np.uint64) * SPREAD
    files = write(keys, documents, 5)
    whole = find_pairs(files, "near")
    parts = [find_pairs(files, "near", range_index=index, num_ranges=6) for index in range(6)]
    assert sum(part.shape[1] for part in parts) > whole.shape[1] > 0
    two_ranks = [merge_pairs(parts[::2]), merge_pairs(parts[1::2])]
    for order in (parts, parts[::-1], two_ranks, [*parts, *parts], [whole]):
        np.testing.assert_array_equal(merge_pairs(order), whole)
    # What pairs say: the documents ascending, each with the lowest of its cluster, which is in no pair itself.
    assert (np.diff(whole[0].astype(np.int64)) > 0).all()
    assert (whole[1] < whole[0]).all()
    assert not np.isin(whole[1], whole[0]).any()
    assert whole[0].tolist() == plain_drops(keys.tolist(), documents.tolist())
    assert merge_pairs([]).shape == (2, 0)


def test_a_long_chain_in_any_order_is_one_cluster(write: Write) -> None:
    for order in (np.arange(20_000), np.arange(20_000)[::-1], np.random.default_rng(1).permutation(20_000)):
        keys = (np.arange(20_000)[:, None] + np.arange(2)).astype(np.uint64) * SPREAD
        files = write(keys, order.astype(np.uint64), 3)
        found = drops(files, "near", 3)
        np.testing.assert_array_equal(found, np.arange(1, 20_000))


def test_exact_keys_are_compared_whole(tmp_path: Path) -> None:
    texts = ["a", "b", "a", "", "字", "a", ""]
    keys = [document_key(text) for text in texts]
    keys += [keys[1][:8] + bytes(8), bytes(8) + keys[1][8:]]  # one half is the same: another text
    documents = np.arange(10, 10 + len(keys), dtype=np.uint64)
    files = [tmp_path / "even", tmp_path / "odd"]
    for start, file in enumerate(files):
        write_exact_records(file, keys[start::2], documents[start::2])
    for num_ranges in (1, 5):
        assert drops(files, "exact", num_ranges).tolist() == [12, 15, 16]


def test_the_key_of_a_text_is_xxh3_128_of_its_utf8() -> None:
    assert document_key("").hex() == "99aa06d3014798d86001c324468d497f"  # published test vector
    assert len({document_key(text) for text in ("a", "a ", "A", "\u00e1", "a\u0301")}) == 5


def test_records_written_twice_count_once(write: Write) -> None:
    keys = np.arange(20, dtype=np.uint64).reshape(10, 2) * SPREAD
    files = write(keys, np.arange(10, dtype=np.uint64))
    assert drops([*files, *files], "near").tolist() == []


def test_a_file_is_the_same_for_the_same_records(write: Write, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 50, (100, 14)).astype(np.uint64) * SPREAD
    documents = generator.permutation(100).astype(np.uint64)
    first = write(keys, documents)[0].read_bytes()
    again = write(keys[::-1], documents[::-1])[0].read_bytes()
    assert first == again
    assert len(first) == 100 * 14 * 16
    assert [path.name for path in tmp_path.iterdir()] == ["records-0"]  # nothing temporary is left


def test_damaged_files_are_named(write: Write, tmp_path: Path) -> None:
    keys = np.arange(14, dtype=np.uint64).reshape(1, 14) * SPREAD
    (path,) = write(keys, np.zeros(1, dtype=np.uint64))
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(
        UserError, match="records-0: 221 bytes are not a whole number of near records; the file is truncated"
    ):
        drops([path], "near")
    path.write_bytes(whole[16:] + whole[:16])
    with pytest.raises(UserError, match="records-0: records are not sorted"):
        drops([path], "near")
    with pytest.raises(UserError, match="absent: No such file"):
        drops([tmp_path / "absent"], "near")
    (tmp_path / "empty").write_bytes(b"")
    assert drops([tmp_path / "empty"], "near").tolist() == []


def peak_bytes(files: Sequence[Path], num_ranges: int) -> int:
    tracemalloc.start()
    try:
        drops(files, "near", num_ranges)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_bounded_as_the_readme_says(write: Write) -> None:
    """README: 2 MB, 35 bytes a record in hand, and 110 a document that has a duplicate."""
    generator = np.random.default_rng(2)
    records = 2**17  # in hand

    def peak(num_documents: int, num_twins: int) -> int:
        keys = generator.integers(0, 2**64, (num_documents, 14), dtype=np.uint64)
        keys[num_documents - num_twins :] = keys[:num_twins]
        return peak_bytes(write(keys, np.arange(num_documents, dtype=np.uint64), 4), -(-num_documents * 14 // records))

    few, many = peak(28_000, 0), peak(84_000, 0)
    assert many < 35 * records + 2**21
    assert many < 1.3 * few + 2**18  # how many documents there are does not matter
    with_twins = peak(84_000, 42_000)
    assert with_twins - many < 110 * 42_000


def test_memory_of_long_chains() -> None:
    """README: 170 bytes a document, where each part links every tenth document to the next."""
    num_documents = 400_000
    ids = np.arange(num_documents, dtype=np.uint64)
    parts = (np.stack([ids[first + 1 :: 10], ids[first:-1:10]]) for first in range(10))
    tracemalloc.start()
    try:
        found = merge_pairs(parts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(found[0], ids[1:])
    assert not found[1].any()
    assert peak < 170 * num_documents
