"""Errors that the user can correct: the command line prints them without a traceback. And words of messages."""

import unicodedata

# Control characters, and format characters such as overrides of the direction of writing.
_OBEYED = frozenset({"Cc", "Cf"})


class UserError(ValueError):
    """Wrong input. The message names the file or key, its value, and the remedy.

    Commands that raise it exit with ``EXIT_CODE`` (``EX_CONFIG``: needs attention, a retry fails again). Subclasses may
    have another code. Every subclass is constructed from its message alone, so that pickle sends it to other ranks.
    """

    EXIT_CODE = 78


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun: "1 rank", "2 ranks", "1,024 processes"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def shortened(text: str, most: int = 200) -> str:
    """`text` for a message: in full up to `most` characters, else its two ends and the number of characters."""
    if len(text) <= most:
        return text
    kept = most // 2
    return f"{text[:kept]}…{text[-kept // 2 :]} ({len(text):,} characters)"


def printable(text: str) -> str:
    """`text` for a terminal: escape sequences, other control characters and changes of direction are spelled out.

    Names of files and contents of data may be anybody's; a terminal would obey them.
    """
    return "".join(
        one if one in "\n\t" or unicodedata.category(one) not in _OBEYED else ascii(one)[1:-1] for one in text
    )
