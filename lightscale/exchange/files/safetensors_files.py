"""Files of whole tensors in the safetensors format, written and read without ever holding a tensor whole.

A file is the length of a header, the header as JSON, and the bytes of the tensors. Nothing in it is executed.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.exchange.files.stored_tensors import DTYPES
from lightscale.files import open_regular
from lightscale.parallel.shards import Box, Shape
from lightscale.training.checkpoints.directories import WEIGHTS_PREFIX
from lightscale.training.checkpoints.header import Entry
from lightscale.training.checkpoints.reading import DamagedCheckpoint, parse_object, read_bytes, shown
from lightscale.training.checkpoints.schema import Place, checked

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES, _MOST_INDEX_BYTES = 1 << 26, 1 << 26
_MOST_THREADS = 2
"""That write a file: more would wait for each other."""
_WRITE_BYTES = 1 << 18
"""256 KiB, of one call. From 1 MiB on, Linux 6.18 on ext4 often takes two to five times as long for the same bytes
(measured on a 2-core x86-64 machine, 24 November 2026)."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Written:
    """A tensor to write."""

    name: str
    dtype: torch.dtype
    shape: Shape
    blocks: Iterable[Tensor]
    """Its rows in order, some at a time, of any number format; read once, when it is written."""

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_shards(directory: Path, tensors: Sequence[Written], *, shard_bytes: int, stem: str = "model") -> list[str]:
    """Write ``tensors`` in their order to files of at most ``shard_bytes``, or of one tensor; their names.

    One file is called STEM.safetensors; several are numbered, with an index beside them that names each one's tensors.
    """
    shards = list(_shards(tensors, shard_bytes))
    if len(shards) == 1:
        name = f"{stem}.safetensors"
        write_file(directory / name, shards[0])
        return [name]
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_file(directory / name, shard)
    places = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = {"total_size": sum(tensor.num_bytes for tensor in tensors)}
    index = json.dumps({"metadata": total, "weight_map": dict(sorted(places.items()))}, indent=2)
    index_name = f"{stem}.safetensors.index.json"
    (directory / index_name).write_text(index + "\n", encoding="utf-8")
    return [*names, index_name]


def _shards(tensors: Sequence[Written], shard_bytes: int) -> Iterator[list[Written]]:
    shard: list[Written] = []
    for tensor in tensors:
        if shard and sum(one.num_bytes for one in shard) + tensor.num_bytes > shard_bytes:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def write_file(path: Path, tensors: Sequence[Written]) -> None:
    """Write ``tensors`` to the new file ``path``."""
    # The widest numbers first, as the format's own writer has it: every tensor begins at a multiple of its element.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    first = _LENGTH_BYTES + len(text)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        file.truncate(first + end)
        file.flush()
        # One tensor is read and converted while another is written.
        with ThreadPoolExecutor(min(_MOST_THREADS, torch.get_num_threads())) as threads:
            places = [first + header[tensor.name]["data_offsets"][0] for tensor in ordered]
            written = list(threads.map(partial(_write_tensor, file.fileno()), ordered, places))
    assert sum(written) == end, f"{path}: {sum(written)} bytes"


def _write_tensor(file: int, tensor: Written, first: int) -> int:
    """Write it from byte ``first`` of ``file`` on; the number of bytes."""
    at = first
    for block in tensor.blocks:
        converted = block.to(tensor.dtype)
        if tensor.dtype == torch.float16 and not converted.isfinite().all():
            raise UserError(f"{tensor.name}: a weight is too large for fp16; use bf16 or fp32")
        view = converted.contiguous().reshape(-1).view(torch.uint8).numpy().data
        while view:
            count = os.pwrite(file, view[:_WRITE_BYTES], at)
            at, view = at + count, view[count:]
    return at - first


def open_shard(path: Path) -> BufferedReader:
    """A file of an export, open for reading. Links are followed: model hubs keep files as links into their cache."""
    try:
        return open_regular(path, what="a file of tensors", follow_links=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; the directory is incomplete") from None


def read_shards(directory: Path) -> dict[str, list[Entry]]:
    """The tensors in each file of an export, by the files' names; each is a box of its own.

    UserError where files are missing, damaged, or differ from the index.
    """
    if not (directory / INDEX).exists():
        return {SINGLE: _read_header(directory / SINGLE)}
    index = _read_index(directory / INDEX)
    found = {name: _read_header(directory / name) for name in sorted(set(index.values()))}
    places = {_name(entry): name for name, entries in found.items() for entry in entries}
    if sum(map(len, found.values())) != len(places) or places != index:
        wrong = next(iter(sorted(places.items() ^ index.items())), ("a tensor", ""))[0]
        raise UserError(
            f"{directory / INDEX}: {shown(wrong)} must occur once in the file listed for it; copy the directory again"
        )
    return found


def _name(entry: Entry) -> str:
    return entry.box.key.removeprefix(WEIGHTS_PREFIX)


def _read_index(path: Path) -> dict[str, str]:
    with open_regular(path, what="an index of tensors", most_bytes=_MOST_INDEX_BYTES, follow_links=True) as file:
        content = parse_object(file.read(), path)
    index = content.get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise UserError(f"{path}: no weight_map (the file of each tensor)")
    for name in index.values():
        # In the directory itself, whatever somebody wrote there.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                f"{path}: lists the file {shown(name)}; tensor files must be NAME.safetensors in the same directory"
            )
    return index


def _read_header(path: Path) -> list[Entry]:
    with open_shard(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(read_bytes(file, _LENGTH_BYTES, path), "little")
        if length > min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES):
            raise DamagedCheckpoint(f"{path}: a header of {length} bytes in a file of {size}; copy the file again")
        header = parse_object(read_bytes(file, length, path), path)
    header.pop("__metadata__", None)
    first, end, entries = _LENGTH_BYTES + length, 0, []
    for name, value in header.items():
        # A list is no key of a table.
        if isinstance(value, dict) and (dtype := str(value.get("dtype"))) not in DTYPES:
            raise UserError(f"{path}: {shown(name)} has dtype {shown(dtype)}; use {', '.join(DTYPES)}")
        place = checked(Place, value, path, name)
        shape, (start, stop) = tuple(place.shape), place.data_offsets
        box = Box(key=f"{WEIGHTS_PREFIX}{name}", shape=shape, offset=(0,) * len(shape), sizes=shape)
        entry = Entry(box=box, dtype=place.dtype, first_byte=first + start)
        if stop - start != entry.num_bytes:
            raise DamagedCheckpoint(
                f"{path}: {shown(name)} has {entry.num_bytes} bytes, and its offsets give {stop - start}"
            )
        entries.append(entry)
    # Without gaps and overlaps: every byte is of one tensor.
    for entry in sorted(entries, key=lambda entry: entry.first_byte):
        if entry.first_byte != first + end:
            raise DamagedCheckpoint(
                f"{path}: {shown(_name(entry))} begins at byte {entry.first_byte - first}, not {end}"
            )
        end += entry.num_bytes
    if first + end != size:
        raise DamagedCheckpoint(f"{path}: expected {first + end} bytes, found {size}; copy the file again")
    return entries
