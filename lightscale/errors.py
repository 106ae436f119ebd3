"""Errors that the user can correct: the command line prints them without a traceback."""


class UserError(ValueError):
    """Wrong input. The message names the file or key, the value found, and what would be right.

    Commands that end with it exit with ``EXIT_CODE`` (``EX_CONFIG``: needs attention, trying again is useless);
    subclasses may have another. Each can be made from its message alone, so that pickle brings it to other ranks.
    """

    EXIT_CODE = 78
