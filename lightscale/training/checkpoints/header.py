"""The header of a file of tensors, in the safetensors format; without torch.

It is JSON: of each box its number format, its sizes and its bytes, and beside these fields of the format the shapes of
the whole tensors, in ``__metadata__``. A box is named KEY@OFFSET, as in ``model.output.weight@128,0``.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightscale.parallel.shards import Box
from lightscale.training.checkpoints.manifest import DamagedCheckpoint

# The format begins with the length of the header as a little-endian number of 8 bytes.
_LENGTH_BYTES = 8
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
    """What stands before the bytes of ``boxes``, each with its number format, in this order and without gaps."""
    header: dict[str, Any] = {"__metadata__": {"shapes": json.dumps({box.key: box.shape for box, _ in boxes})}}
    end = 0
    for box, dtype in boxes:
        start, end = end, end + box.numel * _ITEM_BYTES[dtype]
        name = f"{box.key}@{','.join(map(str, box.offset))}"
        header[name] = {"dtype": dtype, "shape": box.sizes, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    # So that the data begins at a multiple of 8, the largest element size.
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(path: Path) -> list[Entry]:
    """The boxes of the file ``path``; ``DamagedCheckpoint`` where it is not what ``write_tensors`` writes."""
    try:
        return _read(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read as a file of tensors: {error!r}") from None


def _read(path: Path) -> list[Entry]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > size - _LENGTH_BYTES:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(file.read(length))
    shapes = json.loads(header.pop("__metadata__")["shapes"])
    entries = []
    for name, value in header.items():
        # From the right, as only the offset is known to have no @.
        key, _, text = name.rpartition("@")
        offset = tuple(map(int, text.split(","))) if text else ()
        box = Box(key=key, shape=tuple(shapes[key]), offset=offset, sizes=tuple(value["shape"]))
        start, end = value["data_offsets"]
        entry = Entry(box=box, dtype=value["dtype"], first_byte=_LENGTH_BYTES + length + start)
        # The hash says that the file is as it was written, not that it makes sense: a wrong offset would give a tensor
        # bytes of another one.
        if end - start != entry.num_bytes or not 0 <= start <= end <= size - _LENGTH_BYTES - length:
            raise ValueError(f"{name}: bytes {start} to {end} of {size}")
        if len(offset) != len(box.sizes) or any(
            at < 0 or at + count > whole for at, count, whole in zip(offset, box.sizes, box.shape, strict=True)
        ):
            raise ValueError(f"{name}: {box.sizes} does not fit into {box.shape}")
        if math.prod(box.sizes) and entry.first_byte % _ITEM_BYTES[entry.dtype]:
            raise ValueError(f"{name}: begins at byte {entry.first_byte}")
        entries.append(entry)
    return entries
