import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightscale.data_pipeline.store import sharded_array
from lightscale.data_pipeline.store.sharded_array import ShardedArray
from lightscale.data_pipeline.store.shards import ShardLayout, ShardWriter
from lightscale.errors import UserError

SHARD, CHUNK = 64, 8


def write(directory: Path, values: NDArray[Any], parts: int = 1) -> ShardWriter:
    layout = ShardLayout(dtype=str(values.dtype), shard_length=SHARD, chunk_length=CHUNK)
    writer = ShardWriter(directory, layout)
    for part in np.array_split(values, parts):
        writer.append(part)
    writer.close()
    return writer


def files_under(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64, 65, 128, 130, 200])
@pytest.mark.parametrize("parts", [1, 3])
def test_files_are_byte_for_byte_those_that_zarr_writes(tmp_path: Path, dtype: str, length: int, parts: int) -> None:
    values = np.random.default_rng(length).integers(0, 2**31, length).astype(dtype)
    values[:20] = 0  # whole chunks of the fill value are written too
    write(tmp_path / "ours", values, parts)
    theirs = zarr.create_array(
        tmp_path / "theirs",
        shape=(length,),
        dtype=dtype,
        shards=(SHARD,),
        chunks=(CHUNK,),
        compressors=None,
        fill_value=0,
        config={"write_empty_chunks": True},
    )
    theirs[:] = values
    assert files_under(tmp_path / "ours") == files_under(tmp_path / "theirs")
    ours = zarr.open_array(tmp_path / "ours", mode="r")
    np.testing.assert_array_equal(np.asarray(ours[:]), values)
    for shard, start in enumerate(range(0, length, SHARD)):
        raw = (tmp_path / "ours" / "c" / str(shard)).read_bytes()
        assert raw.startswith(values[start : start + SHARD].tobytes())


@pytest.fixture(scope="module")
def long_array(tmp_path_factory: pytest.TempPathFactory) -> tuple[ShardedArray, NDArray[np.uint64]]:
    directory = tmp_path_factory.mktemp("array")
    values = np.cumsum(np.random.default_rng(0).integers(0, 5, 400)).astype(np.uint64)
    write(directory, values)
    return ShardedArray(directory), values


@given(bounds=st.tuples(st.integers(0, 400), st.integers(0, 400)).map(sorted))
def test_any_range_reads_back(long_array: tuple[ShardedArray, NDArray[np.uint64]], bounds: list[int]) -> None:
    array, values = long_array
    np.testing.assert_array_equal(array.read(*bounds), values[slice(*bounds)])


@given(value=st.integers(-5, 1200))
def test_searchsorted_counts_the_values_up_to_one(
    long_array: tuple[ShardedArray, NDArray[np.uint64]], value: int
) -> None:
    array, values = long_array
    assert array.searchsorted(value) == sum(1 for other in values.tolist() if other <= value)


@pytest.mark.parametrize("bounds", [(-1, 3), (3, 2), (399, 401)])
def test_ranges_outside_are_refused(
    long_array: tuple[ShardedArray, NDArray[np.uint64]], bounds: tuple[int, int]
) -> None:
    with pytest.raises(IndexError):
        long_array[0].read(*bounds)


def test_open_files_are_bounded_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, np.arange(SHARD * 10, dtype=np.uint32))
    monkeypatch.setattr(sharded_array, "_MAX_OPEN_SHARDS", 3)

    def num_open() -> int:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum(link.readlink().is_relative_to(tmp_path) for link in links)

    array = ShardedArray(tmp_path)
    assert num_open() == 0
    np.testing.assert_array_equal(array.read(0, SHARD * 10), np.arange(SHARD * 10))
    assert num_open() == 3


def damaged_array(directory: Path) -> Path:
    write(directory, np.arange(100, dtype=np.uint32))
    ShardedArray(directory)
    return directory


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("change", ["cut", "emptied", "longer", "removed", "index", "offset"])
def test_a_damaged_shard_is_refused_by_name(tmp_path: Path, shard: int, change: str) -> None:
    path = damaged_array(tmp_path) / "c" / str(shard)
    raw = bytearray(path.read_bytes())
    index_bytes = 16 * (SHARD // CHUNK) + 4
    match change:
        case "cut":
            path.write_bytes(raw[:-1])
        case "emptied":
            path.write_bytes(b"")
        case "longer":
            path.write_bytes(raw + b"\0")
        case "removed":
            path.unlink()
        case "index":
            raw[-1] ^= 1
            path.write_bytes(raw)
        case "offset":
            raw[-index_bytes] ^= 32
            path.write_bytes(raw)
    if change == "removed":
        with pytest.raises(UserError, match=rf"c/{shard}: No such file"):
            ShardedArray(tmp_path)
        return
    array = ShardedArray(tmp_path)
    with pytest.raises(UserError, match=rf"c/{shard}: "):
        array.read(0, array.length)


def test_a_shard_that_is_cut_while_open_is_named(tmp_path: Path) -> None:
    array = ShardedArray(damaged_array(tmp_path))
    array.read(0, 100)
    os.truncate(tmp_path / "c" / "1", 40)
    with pytest.raises(UserError, match=r"c/1: ends at byte 40"):
        array.read(0, 100)


def test_a_shard_that_vanishes_while_open_is_named(tmp_path: Path) -> None:
    array = ShardedArray(damaged_array(tmp_path))
    (tmp_path / "c" / "1").unlink()
    with pytest.raises(UserError, match=r"c/1: No such file"):
        array.read(0, 100)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"{}"])
def test_damaged_metadata_is_refused_by_name(tmp_path: Path, content: bytes | None) -> None:
    path = damaged_array(tmp_path) / "zarr.json"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"zarr\.json: "):
        ShardedArray(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape", [101 + SHARD]),
        ("shape", [10, 10]),
        ("shape", ["many"]),
        ("data_type", "float64"),
        ("node_type", "group"),
        ("codecs", []),
        ("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [60]}}),
    ],
)
def test_metadata_that_does_not_fit_is_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    path = damaged_array(tmp_path) / "zarr.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match=r"zarr\.json: |c/\d: "):
        ShardedArray(tmp_path)


def test_compressed_arrays_are_refused(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "a", shape=(100,), dtype="uint32", shards=(SHARD,), chunks=(CHUNK,))
    array[:] = np.arange(100)
    with pytest.raises(UserError, match=r"a/zarr\.json: not an array of uncompressed"):
        ShardedArray(tmp_path / "a")


def test_shards_that_chunks_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="a shard of 60 values cannot be divided into zarr chunks of 8"):
        ShardLayout(dtype="uint32", shard_length=60, chunk_length=8)
