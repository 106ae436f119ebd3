"""Errors that are a person's to mend: the command line prints them without a traceback."""


class UserError(ValueError):
    """Wrong input. The message names the file or key, the value found, and what would be right.

    Commands that end with it exit with ``EXIT_CODE`` (``EX_CONFIG``: a person must look; trying again is useless);
    subclasses may have their own. They can be made from the message alone, and so reach the other ranks by pickle.
    """

    EXIT_CODE = 78
