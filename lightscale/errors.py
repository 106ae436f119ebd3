"""Errors that are a person's to mend: the command line prints them without a traceback."""


class UserError(ValueError):
    """Wrong input. The message names the file or key, the value found, and what would be right.

    Commands that end with it exit with ``EXIT_CODE`` (``EX_CONFIG``: a person must look; trying again is useless);
    subclasses may have their own.
    """

    EXIT_CODE = 78
