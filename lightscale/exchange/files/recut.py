"""Tensors whose rows follow each other, cut at other rows than the files have them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lightscale.parallel.shards import Box, Shape
from lightscale.training.checkpoints.directories import WEIGHTS_PREFIX
from lightscale.training.checkpoints.header import Entry


def recut(headers: Mapping[str, Sequence[Entry]], whole: str, parts: Mapping[str, Shape]) -> dict[str, list[Entry]]:
    """The tensors in each file, with ``parts`` as boxes of what the files have in their place.

    transformers, for one, cuts a convolution of queries, keys and values into equal thirds, whatever their widths are.
    Nothing changes where the files have no such rows, or rows of another number, width or number format.

    Args:
        headers: the tensors by file.
        whole: name of the tensor that holds the rows of all parts.
        parts: shapes of the parts, in the order of their rows in ``whole``. Files have these names, or ``whole``.
    """
    same = {file: list(entries) for file, entries in headers.items()}
    stored = {entry.box.key.removeprefix(WEIGHTS_PREFIX): (file, entry) for file in same for entry in same[file]}
    sources = [stored[name] for name in (whole, *parts) if name in stored]
    rows = sum(entry.box.shape[0] for _, entry in sources if entry.box.shape)
    kinds = {(entry.dtype, entry.box.shape[1:]) for _, entry in sources}
    if rows != sum(shape[0] for shape in parts.values()) or len(kinds) != 1:
        return same
    for file, entry in sources:
        same[file].remove(entry)
    at = 0
    for file, entry in sources:
        same[file] += _cut_again(entry, at, parts)
        at += entry.box.shape[0]
    return same


def _cut_again(entry: Entry, at: int, parts: Mapping[str, Shape]) -> Iterator[Entry]:
    """The rows of ``entry``, the first of which is ``at`` in the whole, as boxes of the parts that they belong to."""
    count, *inner = entry.box.shape
    row_bytes = entry.num_bytes // max(1, count)
    start = 0
    for name, (part_rows, *_) in parts.items():
        first, last = max(at, start), min(at + count, start + part_rows)
        if first < last:
            box = Box(
                key=f"{WEIGHTS_PREFIX}{name}",
                shape=(part_rows, *inner),
                offset=(first - start, *(0 for _ in inner)),
                sizes=(last - first, *inner),
            )
            yield replace(entry, box=box, first_byte=entry.first_byte + (first - at) * row_bytes)
        start += part_rows
