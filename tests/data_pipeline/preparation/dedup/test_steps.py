"""The steps from key files to duplicates: the same whatever is merged, in any order, stopped anywhere."""

import os
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightscale.data_pipeline.preparation import deduplication
from lightscale.data_pipeline.preparation.corpus import DuplicatesConfig
from lightscale.data_pipeline.preparation.dedup import (
    clusters,
    find_pairs,
    key_files,
    records,
    write_band_records,
    write_exact_records,
)
from lightscale.data_pipeline.preparation.dedup.key_files import KeyFile, merge_key_files
from lightscale.data_pipeline.preparation.dedup.records import DTYPES, KEY_SPACE
from lightscale.data_pipeline.preparation.plan import UNIT_SHIFT
from lightscale.data_pipeline.preparation.work_directory import WorkDirectory
from lightscale.data_pipeline.store.document_keys import KEY_DTYPES, DocumentKeys, write_index, write_keys
from lightscale.data_pipeline.store.format import KEYS_DIR
from lightscale.errors import UserError

SPREAD = np.uint64(0x9E3779B97F4A7C15)
BANDS = 14


def write_units(path: Path, num_documents: int, per_unit: int, seed: int = 0) -> WorkDirectory:
    """Documents with random keys, some of which they share; long chains too."""
    work, generator = WorkDirectory(path), np.random.default_rng(seed)
    for unit, first in enumerate(range(0, num_documents, per_unit)):
        count = min(per_unit, num_documents - first)
        keys = generator.integers(0, num_documents * 60, (count, BANDS)).astype(np.uint64) * SPREAD
        folder = work.entry("units", unit)
        folder.mkdir(parents=True)
        ids = np.arange(count, dtype=np.uint64) + np.uint64(unit << UNIT_SHIFT)
        write_band_records(folder / "near-0000", keys, ids)
    return work


def ignore(num_bytes: int) -> None:
    pass


def run_steps(work: WorkDirectory, before: Callable[[int], None] = lambda number: None, seed: int = 0) -> bytes:
    """Run all, tasks of a step in random order, and give the result. ``before`` is told the number of each task."""
    corpus = SimpleNamespace(duplicates=DuplicatesConfig(keep_keys=False))
    context: Any = SimpleNamespace(work=work, base=None, corpus=corpus)
    number, generator = 0, np.random.default_rng(seed)
    for step in deduplication.steps(deduplication.list_key_files(work, "near"), "near"):
        for index in generator.permutation(len(step.items)):
            before(number)
            step.task(context, step.items[index], ignore)
            number += 1
    return (work.path / "duplicates/near.npy").read_bytes()


@pytest.fixture
def in_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three files at a time, ranges of 2 kB: some levels of everything with few documents."""
    monkeypatch.setattr(deduplication, "FAN_IN", 3)
    monkeypatch.setattr(key_files, "FAN_IN", 3)
    monkeypatch.setattr(key_files, "_MERGED_AT_ONCE_BYTES", 1500)
    monkeypatch.setattr(deduplication, "_RANGE_BYTES", 2048)
    monkeypatch.setattr(deduplication, "_RANGES_AT_ONCE", 3)
    monkeypatch.setattr(deduplication, "_RANGE_TASKS", 20)
    monkeypatch.setattr(records, "_BATCH_RECORDS", 50)
    monkeypatch.setattr(deduplication, "_UNITED_AT_ONCE", 2)
    monkeypatch.setattr(clusters, "_LINKS_AT_ONCE", 7)


def expected_pairs(work: WorkDirectory) -> NDArray[np.uint64]:
    """By a plain union-find over all records, one by one."""
    records = np.concatenate(
        [
            np.fromfile(path, dtype=[("high", "<u8"), ("document", "<u8")])
            for path in sorted((work.path / "units").glob("*/near-*"))
        ]
    )
    parents: dict[int, int] = {}

    def root(document: int) -> int:
        while (parent := parents.setdefault(document, document)) != document:
            document = parent
        return document

    holder: dict[int, int] = {}
    for key, document in zip(records["high"].tolist(), records["document"].tolist(), strict=True):
        one, other = root(holder.setdefault(key, document)), root(document)
        parents[max(one, other)] = min(one, other)
    found = sorted((document, root(document)) for document in parents if root(document) != document)
    return np.array(found, dtype=np.uint64).reshape(-1, 2).T


@pytest.mark.usefixtures("in_little")
@pytest.mark.parametrize("num_documents", [1, 40, 700])
def test_levels_of_merging_and_uniting_give_what_brute_force_gives(tmp_path: Path, num_documents: int) -> None:
    results = set()
    for per_unit in (25, 60, 1000):
        work = write_units(tmp_path / str(per_unit), num_documents, per_unit)
        expected = expected_pairs(work)
        results.add(np.array_equal(np.load(_loadable(run_steps(work, seed=per_unit), tmp_path)), expected))
        names = {path.name for path in (work.path / "duplicates").iterdir()}
        if num_documents == 700 and per_unit == 25:
            assert {"near-keys-1", "near-keys-2", "near-keys-3", "near-pairs-4"} <= names
            assert expected.shape[1] > 100
    assert results == {True}


def _loadable(content: bytes, folder: Path) -> Path:
    path = folder / "result.npy"
    path.write_bytes(content)
    return path


class Stopped(Exception):
    """As if the process had been killed."""


@pytest.mark.usefixtures("in_little")
def test_stopped_before_any_task_it_goes_on_to_the_same(tmp_path: Path) -> None:
    expected = run_steps(write_units(tmp_path / "whole", 300, 10))
    work = write_units(tmp_path / "stopped", 300, 10)
    stops = 0
    for stop_at in range(0, 200, 3):

        def stop(number: int, at: int = stop_at) -> None:
            if number == at:
                raise Stopped

        try:
            # Every call begins anew, over what those before have finished, in another order.
            found = run_steps(work, stop, seed=stop_at)
        except Stopped:
            stops += 1
        else:
            assert found == expected
            assert stops > 20
            return
    pytest.fail("there are fewer tasks than that")


@pytest.mark.long
@pytest.mark.usefixtures("in_little")
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
def test_stopped_at_any_rename_or_emptying_it_goes_on_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """In the middle of tasks: a merged file appears before those that it is made of are emptied."""
    expected = run_steps(write_units(tmp_path / "whole", 200, 10))
    rename, truncate = Path.rename, os.truncate
    calls, stop_at = 0, 0

    def stopping(call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != stop_at:
                return call(*arguments)
            if is_done:
                call(*arguments)
            raise Stopped

        return instead

    monkeypatch.setattr(Path, "rename", stopping(rename))
    monkeypatch.setattr(os, "truncate", stopping(truncate))
    for stop_at in range(1, 400, 5):
        work, calls = write_units(tmp_path / str(stop_at), 200, 10), 0
        try:
            run_steps(work)
        except Stopped:
            assert run_steps(work, seed=1) == expected
        else:
            assert stop_at > 60
            return
    pytest.fail("there are fewer calls than that")


@pytest.mark.usefixtures("in_little")
def test_what_was_emptied_or_cut_is_never_taken_for_a_file_without_keys(tmp_path: Path) -> None:
    work = write_units(tmp_path / "lost", 200, 10)
    run_steps(work)
    shutil.rmtree(work.path / "duplicates")
    with pytest.raises(UserError, match="near-0000: merged into a file that no longer exists; prepare with"):
        run_steps(work)
    work = write_units(tmp_path / "cut", 200, 10)
    deduplication.list_key_files(work, "near")
    path = work.entry("units", 3) / "near-0000"
    os.truncate(path, path.stat().st_size - 16 * BANDS)
    with pytest.raises(UserError, match="000003/near-0000: 2016 bytes instead of 2240"):
        run_steps(work)


@pytest.mark.usefixtures("in_little")
def test_merged_files_are_emptied_so_the_disk_holds_keys_once(tmp_path: Path) -> None:
    work = write_units(tmp_path, 300, 10)
    num_bytes = sum(path.stat().st_size for path in (work.path / "units").glob("*/near-*"))
    run_steps(work)
    held = [path.stat().st_size for path in work.path.rglob("*") if path.is_file() and "pairs" not in str(path)]
    assert num_bytes <= sum(held) < num_bytes + 10_000  # the list of files


@pytest.fixture(scope="module")
def opened() -> Iterator[list[str]]:
    """Names of all files that are opened while the list is wanted."""
    names: list[str] = []
    wanted = True

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if wanted and event == "open":
            names.append(str(arguments[0]))

    sys.addaudithook(audit)
    yield names
    wanted = False


def test_files_opened_and_bytes_read_grow_as_the_documents_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    monkeypatch.setattr(deduplication, "FAN_IN", 8)
    monkeypatch.setattr(key_files, "FAN_IN", 8)
    monkeypatch.setattr(deduplication, "_RANGE_BYTES", 2**15)
    for num_documents in (2_000, 20_000):
        work = write_units(tmp_path / str(num_documents), num_documents, 100)
        num_bytes = BANDS * 16 * num_documents
        del opened[:]
        before = _bytes_read()
        run_steps(work)
        num_read = _bytes_read() - before
        keys = [name for name in opened if "near-0000" in name or "near-keys-" in name]
        num_ranges, num_files = -(-num_bytes // 2**15), num_documents // 100
        # Each key file, merged ones too (and their folders, to be sure that they are there), and eight a range.
        assert len(keys) < 8 * num_ranges + 1.6 * num_files
        # Once for each of the two or three times that the files become fewer, and once by the ranges.
        assert num_read < 4.5 * num_bytes


@pytest.mark.parametrize("num_files", [5, 60])
def test_a_range_is_little_more_than_its_own_bytes(tmp_path: Path, num_files: int, opened: list[str]) -> None:
    """Of files in which its records are few, and neighbouring ranges without opening them again."""
    work = write_units(tmp_path, 200 * num_files, 200)
    files = sorted((work.path / "units").glob("*/near-*"))
    num_bytes = BANDS * 16 * 200 * num_files
    del opened[:]
    before = _bytes_read()
    parts = [find_pairs(files, "near", range_index=first, count=4, num_ranges=8) for first in (0, 4)]
    assert len([name for name in opened if "near-" in name]) == 2 * num_files
    # A few kB of each file to find where the ranges begin, and what is behind their ends.
    assert num_bytes < _bytes_read() - before < num_bytes + num_files * 8192
    singly = clusters.merge_pairs(find_pairs(files, "near", range_index=index, num_ranges=8) for index in range(8))
    np.testing.assert_array_equal(clusters.merge_pairs(parts), singly)
    np.testing.assert_array_equal(singly, expected_pairs(work))


@pytest.mark.parametrize(("kind", "record_bytes"), [("near", 35), ("exact", 50)])
def test_memory_of_a_range_is_what_the_readme_says(tmp_path: Path, kind: records.Kind, record_bytes: int) -> None:
    """With the keys that the store keeps, and as many of a store that is added to as new ones."""
    num_known = 2**17
    num_documents = num_known // (BANDS if kind == "near" else 1)
    generator, work = np.random.default_rng(0), WorkDirectory(tmp_path / "work")
    folder = work.entry("units", 1)
    folder.mkdir(parents=True)
    ids = np.arange(num_documents, dtype=np.uint64) + np.uint64(1 << UNIT_SHIFT)
    if kind == "near":
        write_band_records(folder / "near-0000", generator.integers(0, 2**64, (num_documents, BANDS), np.uint64), ids)
    else:
        write_exact_records(folder / "exact-0000", [generator.bytes(16) for _ in range(num_documents)], ids)
    keys = np.zeros(num_known, dtype=KEY_DTYPES[kind])
    keys["high"] = np.sort(generator.integers(0, 2**64, num_known, np.uint64))
    write_index(tmp_path, {kind: [write_keys(tmp_path / KEYS_DIR / kind / "000000", [keys])]})
    base = SimpleNamespace(keys=DocumentKeys(tmp_path))
    context: Any = SimpleNamespace(work=work, base=base, corpus=SimpleNamespace(duplicates=DuplicatesConfig()))
    listed = deduplication.list_key_files(work, kind, context.base)
    step = next(iter(deduplication.steps(listed, kind)))
    assert [item.count for item in step.items] == [1]
    tracemalloc.start()
    try:
        step.task(context, step.items[0], ignore)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 2**18 * DTYPES[kind].itemsize < peak < record_bytes * 2**18 + 2**21
    kept = np.fromfile(work.store / KEYS_DIR / kind / "000000", dtype=KEY_DTYPES[kind])
    assert len(kept) == num_known + num_documents * (BANDS if kind == "near" else 1)


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])


def test_a_key_is_found_wherever_it_stands(tmp_path: Path) -> None:
    """In files whose keys are spread as hashes are, or not at all."""
    generator = np.random.default_rng(0)
    even = generator.integers(0, 2**64, 5000, dtype=np.uint64)
    for name, keys in {
        "even": even,
        "all small": even >> np.uint64(40),
        "all large": ~(even >> np.uint64(40)),
        "one": np.full(5000, 77, dtype=np.uint64),
        "edges": np.array([0, 0, 2**64 - 1, 2**64 - 1], dtype=np.uint64),
    }.items():
        path = tmp_path / name
        write_band_records(path, keys[:, None], np.arange(len(keys), dtype=np.uint64))
        ordered = np.sort(keys)
        stops = sorted({0, 1, 77, 78, KEY_SPACE // 3, KEY_SPACE - 1, KEY_SPACE, *map(int, ordered[::611])})
        with KeyFile(path, "near") as file:
            parts = [file.take(stop)["high"] for stop in stops]
        np.testing.assert_array_equal(np.concatenate(parts), ordered)
        for stop, part in zip(stops, parts, strict=True):
            assert not len(part) or int(part[-1]) < stop
        for start in stops:
            with KeyFile(path, "near") as file:
                file.skip(start)
                assert len(file.take(KEY_SPACE)) == sum(int(key) >= start for key in ordered)


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "near-0000"
    write_band_records(path, np.arange(5000, dtype=np.uint64)[:, None] * SPREAD, np.arange(5000, dtype=np.uint64))
    with KeyFile(path, "near") as file:
        file.take(KEY_SPACE // 2)
        path.write_bytes(path.read_bytes()[:20_000])
        with pytest.raises(UserError, match="near-0000: truncated while it was read"):
            file.take(KEY_SPACE)
    with pytest.raises(UserError, match="absent: No such file or directory; expected a file of near records"):
        merge_key_files([tmp_path / "near-0000", tmp_path / "absent"], "near", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    path.write_bytes(path.read_bytes()[:16_000])
    assert find_pairs([path], "near").shape == (2, 0)
