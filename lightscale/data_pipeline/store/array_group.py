"""Groups of arrays: a source of a store, or its list of input files. Opens them with the hashes of their blocks."""

from pathlib import Path
from typing import Any

from lightscale.data_pipeline.store.blocks import BLOCK_BYTES, BlockHashes, num_digits
from lightscale.data_pipeline.store.format import HASHES_DIR, array_layouts, read_attributes
from lightscale.data_pipeline.store.sharded_array import ShardedArray
from lightscale.data_pipeline.store.shards import ShardHashes, is_count, read_metadata
from lightscale.errors import UserError

# (type of number, numbers in a value) of the arrays whose name says it.
_TYPES = {name: (layout.dtype, layout.width) for name, layout in array_layouts(1, 1).items()}


class ArrayGroup:
    """The attributes and the arrays of a group."""

    def __init__(self, directory: Path, *, is_checked: bool) -> None:
        """``is_checked``: whether blocks are compared with their hashes, which must be there then."""
        self.directory = directory
        self.metadata_path = directory / "zarr.json"
        self.attributes = read_attributes(self.metadata_path)
        self._is_checked = is_checked
        self.arrays: dict[str, list[str]] = self._lists(self.attributes.get("shard_hashes"), "shard_hashes")
        """The hashes of the shards of every array, by its name."""
        if is_checked and self.attributes.get("block_bytes") != BLOCK_BYTES:
            found = self.attributes.get("block_bytes")
            raise UserError(
                f"{self.metadata_path}: block_bytes = {found!r}: this version of lightscale reads {BLOCK_BYTES}"
            )

    def open(self, name: str, length: int | None = None) -> ShardedArray:
        """The array ``name``; ``UserError`` where it is damaged or not of ``length`` values."""
        hashes = self.block_hashes(name) if self._is_checked else None
        array = ShardedArray(self.directory / name, hashes=hashes)
        found, expected = (array.layout.dtype, array.layout.width), _TYPES.get(name)
        if expected is not None and found != expected:
            raise UserError(f"{array.directory}: values of type {found}, not {expected}; the store is damaged")
        if length is not None and array.length != length:
            raise UserError(f"{array.directory}: {array.length} values instead of {length}; the store is damaged")
        return array

    def block_hashes(self, name: str) -> BlockHashes:
        """The hashes of the blocks of the array ``name``."""
        length, layout = read_metadata(self.directory / name / "zarr.json")
        digests = self._strings(self._of_blocks(name).get("digests"), f"block_hashes of {name}")
        expected = [num_digits(layout.num_blocks(layout.values_in(shard, length))) for shard in range(len(digests))]
        if len(digests) != layout.num_shards(length) or [len(one) for one in digests] != expected:
            raise UserError(
                f"{self.metadata_path}: block_hashes of {name} do not cover {length} values; the store is damaged"
            )
        directory = self.directory / HASHES_DIR / name
        return BlockHashes(lambda shard: layout.hashes.path(directory, shard), digests)

    def block_files(self, name: str) -> list[str]:
        """The hashes of the files with the block hashes of the array ``name``, as many as it has shards."""
        files = self._strings(self._of_blocks(name).get("shards"), f"block_hashes of {name}")
        if len(files) != len(self.arrays[name]):
            raise UserError(
                f"{self.metadata_path}: block_hashes: {len(files)} hash files of {name} do not match its shards; the "
                "store is damaged"
            )
        return files

    def hashes_of_shard(self, name: str, number: int) -> ShardHashes:
        """The record of shard ``number`` of the array ``name``."""
        digests = self._strings(self._of_blocks(name).get("digests"), f"block_hashes of {name}")
        return ShardHashes(
            shard=self.arrays[name][number], blocks=self.block_files(name)[number], digests=digests[number]
        )

    def count(self, key: str) -> int:
        """The attribute ``key``, a number of things."""
        value = self.attributes.get(key)
        if not is_count(value):
            raise UserError(f"{self.metadata_path}: damaged attributes ({key} = {value!r}: must be a whole number)")
        return value

    def text(self, key: str) -> str:
        """The attribute ``key``, a string."""
        value = self.attributes.get(key)
        if not isinstance(value, str):
            raise UserError(f"{self.metadata_path}: damaged attributes ({key} = {value!r}: must be a string)")
        return value

    def _of_blocks(self, name: str) -> dict[str, Any]:
        every = self._table(self.attributes.get("block_hashes"), "block_hashes")
        return self._table(every.get(name), f"block_hashes of {name}")

    def _lists(self, value: Any, key: str) -> dict[str, list[str]]:
        return {name: self._strings(one, f"{key} of {name}") for name, one in self._table(value, key).items()}

    def _table(self, value: Any, key: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise UserError(f"{self.metadata_path}: damaged attributes ({key}: must be a table)")
        return value

    def _strings(self, value: Any, key: str) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise UserError(f"{self.metadata_path}: damaged attributes ({key}: must be a list of strings)")
        return value
