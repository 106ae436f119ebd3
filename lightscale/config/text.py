"""Checks of text values and paths: characters that no file holds, paths that no system opens; words of commands."""

import os
from collections.abc import Iterable

MOST_BYTES = 65_536
"""Longest text in a configuration."""
_MOST_PATH_BYTES, _MOST_NAME_BYTES = 4096, 255


def text_fault(text: str) -> str | None:
    """The fault of `text` as a value, as the end of a message; None: it is valid."""
    if "\0" in text:
        return "must not contain a NUL character"
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        return f"must be UTF-8 text; character {error.start + 1} is not"
    return f"must be at most {MOST_BYTES:_} bytes of text" if size > MOST_BYTES else None


def path_fault(path: str) -> str | None:
    """The fault of `path` itself, without a look at the disk, as the end of a message; None: it is valid."""
    if not path:
        return "must be a path, not empty"
    if "\0" in path:
        return "must be a path without NUL characters"
    # Names on disk need not be UTF-8.
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "must be a path in UTF-8"
    longest = max(map(len, encoded.split(b"/")))
    if len(encoded) >= _MOST_PATH_BYTES or longest > _MOST_NAME_BYTES:
        return f"must be a path below {_MOST_PATH_BYTES} bytes, with names of at most {_MOST_NAME_BYTES} bytes"
    return None


def allow_changes(keys: Iterable[str]) -> str:
    """The options of ``lightscale train`` that accept changes of ``keys``."""
    return " ".join(f"--allow-change {key}" for key in keys)
