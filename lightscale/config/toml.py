"""TOML files that people write: read whole, or refused in one line whatever they hold.

Python's parser takes hours for some small texts and ends with a RecursionError for others; the limits here are far
beyond what a configuration needs.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from lightscale.errors import UserError, shortened
from lightscale.files import read_regular

MOST_BYTES = 2**20
"""Of a file, and of a file together with those that it extends."""
MOST_LEVELS = 32
_MOST_KEY_CHARACTERS = 1000
# Dotted keys take the parser the square of their parts. It begins only at the beginning of a part, and takes a part
# whole (`++`), so that the search itself takes one way through the text.
_PART = r"""(?:(?<![\w-])[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_LONG_KEY = re.compile(rf"(?:{_PART}\.[ \t]*+){{{2 * MOST_LEVELS}}}")


class TomlError(ValueError):
    """A text that is not TOML, or beyond the limits."""


def parse_toml(text: str) -> dict[str, Any]:
    """The table that `text` writes. TomlError with the reason where it is none."""
    if _LONG_KEY.search(text):
        raise TomlError(f"a dotted key has more than {2 * MOST_LEVELS} parts")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TomlError(shortened(str(error))) from None
    except RecursionError:
        raise TomlError(f"tables or lists in one another, deeper than {MOST_LEVELS} levels") from None
    except ValueError:
        # Python's limit on the digits of a number: no field takes more than twenty.
        raise TomlError("a number of thousands of digits") from None
    _check_levels(table)
    return table


def read_toml(path: Path, *, what: str) -> dict[str, Any]:
    """The table in the file `path`; `what` it should be, for messages, as in "a corpus file".

    Raises UserError for what is no regular file (a pipe too: a configuration is read several times), cannot be read,
    or is not TOML; FileNotFoundError and other OSErrors are the caller's to word.
    """
    content = read_regular(path, what=what, most_bytes=MOST_BYTES, follow_links=True)
    try:
        return parse_toml(content.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text, which TOML must be (byte {error.start})") from None
    except TomlError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def _check_levels(table: dict[str, Any]) -> None:
    # Without recursion, which is what it keeps from others.
    level: list[Any] = [table]
    for _ in range(MOST_LEVELS):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                if key := next((key for key in value if len(key) > _MOST_KEY_CHARACTERS), None):
                    raise TomlError(f"the key {shortened(key, 50)} has more than {_MOST_KEY_CHARACTERS} characters")
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        level = [value for value in inner if isinstance(value, (dict, list))]
        if not level:
            return
    raise TomlError(f"tables or lists in one another, deeper than {MOST_LEVELS} levels")
