"""Reads TOML files of users in full, or refuses them in one line.

Python's parser takes hours for some small texts and raises RecursionError for others. The limits here are far beyond
the needs of a configuration.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from lightscale.errors import UserError, shortened
from lightscale.files import read_regular

MOST_BYTES = 2**20
"""Largest file, and largest sum of a file and those that it extends."""
MOST_LEVELS = 32
_MOST_KEY_CHARACTERS = 1000
# Dotted keys take the parser the square of their parts. It begins only at the beginning of a part, and takes a part
# whole (`++`), so that the search itself takes one way through the text.
_PART = r"""(?:(?<![\w-])[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_LONG_KEY = re.compile(rf"(?:{_PART}\.[ \t]*+){{{2 * MOST_LEVELS}}}")


class TomlError(ValueError):
    """A text that is not TOML, or exceeds the limits."""


def parse_toml(text: str) -> dict[str, Any]:
    """Parse `text` into a table. Raises TomlError with the reason."""
    if _LONG_KEY.search(text):
        raise TomlError(f"a dotted key has more than {2 * MOST_LEVELS} parts")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TomlError(shortened(str(error))) from None
    except RecursionError:
        raise TomlError(f"tables or lists are nested deeper than {MOST_LEVELS} levels") from None
    except ValueError:
        # Python's limit on the digits of a number: no field takes more than twenty.
        raise TomlError("a number has thousands of digits") from None
    _check_levels(table)
    return table


def read_toml(path: Path, *, what: str) -> dict[str, Any]:
    """Read the table in the file `path`; `what` names its kind in messages, as in "a corpus file".

    Raises UserError for a path that is no regular file (a pipe too: a configuration is read several times), and for a
    file that is unreadable or not TOML. The caller words FileNotFoundError and other OSErrors.
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
    raise TomlError(f"tables or lists are nested deeper than {MOST_LEVELS} levels")
