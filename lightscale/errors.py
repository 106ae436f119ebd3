"""Errors that the user can correct: the command line prints them without a traceback."""


class UserError(ValueError):
    """Wrong input. The message names the file or key, the value found, and what would be right.

    Commands that end with it exit with ``EXIT_CODE`` (``EX_CONFIG``: needs attention, trying again is useless);
    subclasses may have another. Each can be made from its message alone, so that pickle brings it to other ranks.
    """

    EXIT_CODE = 78


def shortened(text: str, most: int = 200) -> str:
    """`text` as messages quote it: whole, or of more than `most` characters its ends and how many there are."""
    if len(text) <= most:
        return text
    kept = most // 2
    return f"{text[:kept]}…{text[-kept // 2 :]} ({len(text):,} characters)"
