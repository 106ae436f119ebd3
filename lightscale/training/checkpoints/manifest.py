"""The manifest of a checkpoint: it makes a directory a checkpoint, and proves that its files are unchanged.

A directory without a manifest, or whose files differ from it in size or content, is not a checkpoint. The manifest
has its own hash, so that damage to it is noticed too.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from lightscale.errors import UserError
from lightscale.training.checkpoints.reading import DamagedCheckpoint, open_file, parse_object, read_small, shown
from lightscale.training.checkpoints.schema import Recorded, checked

NAME = "MANIFEST.json"
FORMAT = 2
"""1 was Megatron's distributed checkpoints."""
_BLOCK_BYTES = 1 << 22
# The facts, and what a file's record and its host take.
_MOST_BYTES, _MOST_BYTES_PER_FILE, _MOST_FILES = 1 << 16, 1 << 10, 1 << 18


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and xxh3-128 of one file."""

    num_bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """``files`` by name, and ``facts`` about the run: step, tokens, layout, versions, digests."""

    files: Mapping[str, FileRecord]
    facts: Mapping[str, Any]
    # The same content in another order means the same.
    xxh3_128: str = field(compare=False)
    """Of the file, which has the hashes of all others."""


def hash_file(path: Path) -> FileRecord:
    """Read ``path`` once."""
    with open_file(path) as file:
        return hash_opened(file)


def hash_opened(file: BufferedReader) -> FileRecord:
    """Read an open file to its end."""
    digest, size = xxhash.xxh3_128(), 0
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
        size += len(block)
    return FileRecord(num_bytes=size, xxh3_128=digest.hexdigest())


def write_synced(path: Path, content: bytes) -> FileRecord:
    """Write a small new file; it is on disk when this returns."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        # Also for its error: writes that a file system delays may meet a full disk only here.
        os.fsync(file.fileno())
    return FileRecord(num_bytes=len(content), xxh3_128=xxhash.xxh3_128(content).hexdigest())


def write_manifest(directory: Path, files: Mapping[str, FileRecord], facts: Mapping[str, Any]) -> None:
    """Write and sync ``MANIFEST.json``; the directory's other files are already on disk."""
    body = {
        "format": FORMAT,
        **facts,
        "files": {name: {"bytes": f.num_bytes, "xxh3_128": f.xxh3_128} for name, f in sorted(files.items())},
    }
    body["manifest_xxh3_128"] = _own_hash(body)
    write_synced(directory / NAME, (json.dumps(body, indent=1) + "\n").encode())


def read_manifest(directory: Path) -> Manifest:
    """The manifest of ``directory``.

    Raises:
        DamagedCheckpoint: it is missing, unreadable or altered.
        UserError: it is whole, and written by a version of lightscale whose checkpoints this one cannot read.
    """
    path = directory / NAME
    try:
        with os.scandir(directory) as entries:
            # Of the files that are there: what a manifest may ask for grows with what there is to read.
            num_files = sum(1 for _ in islice(entries, _MOST_FILES))
    except OSError as error:
        raise DamagedCheckpoint(f"{directory}: {error.strerror}") from None
    if not os.path.lexists(path):
        raise DamagedCheckpoint(f"{path} is missing: the checkpoint is unfinished")
    content = read_small(path, most_bytes=_MOST_BYTES + num_files * _MOST_BYTES_PER_FILE)
    body = parse_object(content, path)
    recorded = body.pop("manifest_xxh3_128", None)
    # Before the format is looked at: a flipped bit there would pass for another version, which is an error instead of
    # damage.
    if (found := _own_hash(body)) != recorded:
        raise DamagedCheckpoint(f"{path}: expected hash {shown(str(recorded))}, found {found}")
    number = body.get("format")
    if isinstance(number, bool) or not isinstance(number, int):
        raise DamagedCheckpoint(f"{path}: expected a number as format, found {shown(json.dumps(number))}")
    if number != FORMAT:
        # Not damage: resuming from an older checkpoint would throw away what a newer lightscale has trained.
        raise UserError(f"{path} has format {number}, and this version of lightscale reads {FORMAT}")
    files = checked(Recorded, body, path).files
    return Manifest(
        files={name: FileRecord(num_bytes=file.bytes, xxh3_128=file.xxh3_128) for name, file in files.items()},
        facts={key: value for key, value in body.items() if key not in ("files", "format")},
        xxh3_128=xxhash.xxh3_128(content).hexdigest(),
    )


def verify_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read the named files and compare them with ``manifest``. Raises DamagedCheckpoint at the first difference."""
    for name in names:
        path, expected = directory / name, manifest.files[name]
        if not os.path.lexists(path):
            raise DamagedCheckpoint(f"{path}: expected {expected.num_bytes} bytes, found No such file or directory")
        with open_file(path) as file:
            # First, as it costs no reading, and tells a truncated file from one with changed bytes.
            if (size := os.fstat(file.fileno()).st_size) != expected.num_bytes:
                raise DamagedCheckpoint(f"{path}: expected {expected.num_bytes} bytes, found {size}")
            try:
                found = hash_opened(file).xxh3_128
            except OSError as error:
                raise DamagedCheckpoint(f"{path}: {error.strerror}") from None
        if found != expected.xxh3_128:
            raise DamagedCheckpoint(f"{path}: expected xxh3-128 {expected.xxh3_128}, found {found}")


def _own_hash(body: Mapping[str, Any]) -> str:
    # Of the values in one fixed order, not of the text: the hash is in the text itself.
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()
