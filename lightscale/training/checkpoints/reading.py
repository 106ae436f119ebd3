"""Reading the small, possibly damaged files of a checkpoint: JSON of bounded size without repeated keys.

Plain ``json.loads`` takes the last of two equal keys, numbers that are none, and text nested as deep as the stack
allows. Here each of these is damage, as is any content outside of the schema (``schema.py``).
"""

import json
import os
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from lightscale.errors import UserError
from lightscale.files import open_regular

_WHAT = "a file of a checkpoint"
_MOST_DEPTH = 16
"""Of objects and lists in each other; the writer's are 4."""


class DamagedCheckpoint(UserError):
    """A checkpoint that differs from its manifest or is invalid; the message has file, expected and found values."""


def open_file(path: Path) -> BufferedReader:
    """A file of a checkpoint, open for reading: a regular one, and no link, or ``DamagedCheckpoint``; never waits."""
    try:
        return open_regular(path, what=_WHAT)
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error.strerror}") from None
    except UserError as error:
        raise DamagedCheckpoint(str(error)) from None


def read_json(path: Path, *, most_bytes: int) -> dict[str, Any]:
    """The object in the JSON file ``path``; ``DamagedCheckpoint`` where it is larger, or no such object."""
    return parse_object(read_small(path, most_bytes=most_bytes), path)


def read_small(path: Path, *, most_bytes: int) -> bytes:
    """The content of the file ``path``; ``DamagedCheckpoint`` where it is larger."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most_bytes:
            raise DamagedCheckpoint(f"{path}: expected at most {most_bytes} bytes, found {size}")
        return read_bytes(file, size, path)


def read_bytes(file: BufferedReader, count: int, path: Path) -> bytes:
    """The next ``count`` bytes; ``DamagedCheckpoint`` where there are fewer, or the storage fails."""
    try:
        content = file.read(count)
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error.strerror}") from None
    if len(content) != count:
        raise DamagedCheckpoint(f"{path}: expected {count} more bytes, found {len(content)}")
    return content


def parse_object(text: bytes | str, path: Path) -> dict[str, Any]:
    """The JSON object ``text`` of the file ``path``. Raises ``DamagedCheckpoint`` if it is none, or repeats a key."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_number)
        fault = None if _depth(value) <= _MOST_DEPTH else f"is nested more than {_MOST_DEPTH} deep"
    except RecursionError:
        fault = f"is nested more than {_MOST_DEPTH} deep"
    except ValueError as error:
        fault = str(error)
    if fault is not None:
        raise DamagedCheckpoint(f"{path} cannot be read as JSON: {shown(fault)}") from None
    if not isinstance(value, dict):
        raise DamagedCheckpoint(f"{path}: expected a JSON object, found {shown(json.dumps(value))}")
    return value


def shown(text: str) -> str:
    """``text`` for a message, whatever is in it: one line of printable ASCII, shortened."""
    line = ascii(text)[1:-1]
    return line if len(line) <= 300 else f"{line[:300]}…"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {key!r}")
        found[key] = value
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _number(text: str) -> float:
    value = float(text)
    # Larger than the largest: Python reads it as infinity, which JSON does not have.
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text} is too large")
    return value


def _depth(value: Any) -> int:
    """How many objects and lists are in each other."""
    depth, level = 0, [value]
    # By levels and not by recursion: the depth is what is not trusted.
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        if depth > _MOST_DEPTH:
            break
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth
