"""The header of a file of tensors, in the safetensors format; without torch.

It is JSON: of each box its number format, its sizes and its bytes, and beside these fields of the format the shapes of
the whole tensors, in ``__metadata__``. A box is named KEY@OFFSET, as in ``model.output.weight@128,0``.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightscale.parallel.shards import Box
from lightscale.training.checkpoints import schema
from lightscale.training.checkpoints.reading import DamagedCheckpoint, open_file, parse_object, read_bytes, shown
from lightscale.training.checkpoints.schema import checked

# The format begins with the length of the header as a little-endian number of 8 bytes.
_LENGTH_BYTES = 8
# Far above any model's: a box takes about 200 bytes, and a rank has a few thousand.
_MOST_BYTES, _MOST_BOXES = 1 << 24, 1 << 17
_BOX_NAME = re.compile(r"(?P<key>.{1,500})@(?P<offset>(\d{1,15}(,\d{1,15}){0,7})?)", re.ASCII)
_ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A box in a file."""

    box: Box
    dtype: str
    """As the format names it, such as BF16."""
    first_byte: int
    """In the file."""

    @property
    def num_bytes(self) -> int:
        """Of the box's elements."""
        return self.box.numel * _ITEM_BYTES[self.dtype]


def write_header(boxes: Sequence[tuple[Box, str]]) -> bytes:
    """The header before the bytes of ``boxes``, each with its number format, in this order and without gaps."""
    header: dict[str, Any] = {"__metadata__": {"shapes": json.dumps({box.key: box.shape for box, _ in boxes})}}
    end = 0
    for box, dtype in boxes:
        start, end = end, end + box.numel * _ITEM_BYTES[dtype]
        name = f"{box.key}@{','.join(map(str, box.offset))}"
        header[name] = {"dtype": dtype, "shape": box.sizes, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    assert len(text) < _MOST_BYTES and len(boxes) <= _MOST_BOXES, "the header exceeds the limits of its reader"
    # So that the data begins at a multiple of 8, the largest element size.
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(path: Path) -> list[Entry]:
    """The boxes of the file ``path``. Raises ``DamagedCheckpoint`` if ``write_tensors`` could not have written it."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(read_bytes(file, _LENGTH_BYTES, path), "little")
        if length > min(size - _LENGTH_BYTES, _MOST_BYTES):
            raise DamagedCheckpoint(f"{path}: a header of {length} bytes in a file of {size}")
        header = parse_object(read_bytes(file, length, path), path)
    first, end = _LENGTH_BYTES + length, 0
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or metadata.keys() != {"shapes"} or not isinstance(metadata["shapes"], str):
        raise DamagedCheckpoint(f"{path}: the header has no shapes of the whole tensors")
    shapes = parse_object(metadata["shapes"], path)
    if len(header) > _MOST_BOXES:
        raise DamagedCheckpoint(f"{path}: {len(header)} boxes, more than any layout writes")
    entries = []
    for name, value in header.items():
        entry = _entry(path, name, value, shapes, first)
        # One after the other, as they were written: none shares bytes with another, and none are without a tensor.
        if entry.first_byte != first + end:
            raise DamagedCheckpoint(f"{path}: {shown(name)} begins at byte {entry.first_byte - first}, not at {end}")
        end += entry.num_bytes
        entries.append(entry)
    if first + end != size:
        raise DamagedCheckpoint(f"{path}: expected {first + end} bytes, found {size}")
    if unused := shapes.keys() - {entry.box.key for entry in entries}:
        raise DamagedCheckpoint(f"{path}: a shape of {shown(min(unused))}, which the file does not contain")
    return entries


def _entry(path: Path, name: str, value: Any, shapes: Mapping[str, Any], first: int) -> Entry:
    """The box ``name`` of a file whose data begins at byte ``first``."""
    # From the right, as only the offset is known to have no @.
    match = _BOX_NAME.fullmatch(name)
    if match is None or not match["key"].isprintable():
        raise DamagedCheckpoint(f"{path}: {shown(name)} is not a box name such as model.output.weight@128,0")
    offset = tuple(map(int, match["offset"].split(","))) if match["offset"] else ()
    of_format = checked(schema.Place, value, path, name)
    whole = checked(schema.Whole, {"shape": shapes.get(match["key"])}, path, name)
    box = Box(key=match["key"], shape=tuple(whole.shape), offset=offset, sizes=tuple(of_format.shape))
    start, end = of_format.data_offsets
    entry = Entry(box=box, dtype=of_format.dtype, first_byte=first + start)
    if end - start != entry.num_bytes:
        raise DamagedCheckpoint(
            f"{path}: {shown(name)} has {entry.num_bytes} bytes, and its offsets give {end - start}"
        )
    if not len(offset) == len(box.sizes) == len(box.shape) or any(
        at + count > length for at, count, length in zip(offset, box.sizes, box.shape, strict=True)
    ):
        raise DamagedCheckpoint(f"{path}: {shown(name)}: {box.sizes} does not fit into {box.shape}")
    if entry.first_byte % _ITEM_BYTES[entry.dtype]:
        raise DamagedCheckpoint(f"{path}: {shown(name)} begins at byte {entry.first_byte}")
    return entry
