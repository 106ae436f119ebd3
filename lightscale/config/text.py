"""Text that cannot be what it should: a character that no file holds, a path that no system opens."""

import os

MOST_BYTES = 65_536
"""Of a text in a configuration."""
_MOST_PATH_BYTES, _MOST_NAME_BYTES = 4096, 255


def text_fault(text: str) -> str | None:
    """What is wrong with `text` as a value, as the end of a message; None: nothing."""
    if "\0" in text:
        return "must have no NUL character"
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        return f"must be UTF-8 text, which it is not from character {error.start + 1} on"
    return f"must be at most {MOST_BYTES:_} bytes of text" if size > MOST_BYTES else None


def path_fault(path: str) -> str | None:
    """What is wrong with `path` before anybody looks there, as the end of a message; None: nothing."""
    if not path:
        return "must be a path, not empty"
    if "\0" in path:
        return "must be a path, without NUL characters"
    # Names on disk need not be UTF-8.
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "must be a path in UTF-8"
    longest = max(map(len, encoded.split(b"/")))
    if len(encoded) >= _MOST_PATH_BYTES or longest > _MOST_NAME_BYTES:
        return f"must be a path of less than {_MOST_PATH_BYTES} bytes, each name at most {_MOST_NAME_BYTES}"
    return None
