"""Errors that the user can correct: the command line prints them without a traceback. And words of messages."""

import errno
import os
import re
import unicodedata

# Control characters, format characters such as overrides of the direction of writing, and halves of characters, which
# no stream takes.
_OBEYED = frozenset({"Cc", "Cf", "Cs"})
# Words of Persian and of Indian languages, and emoji, contain the two that join letters or not.
_HARMLESS = frozenset("\n\t\u200c\u200d")
_REMEDIES = {
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "free some space of the quota, or write to another disk",
    errno.EROFS: "mount it writable, or write to another disk",
    errno.EFBIG: "raise the limit of the size of files (`ulimit -f`)",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "raise the limit of open files of the machine (fs.file-max)",
    errno.ENOMEM: "free memory, raise its limit (`ulimit -v`), or use smaller batches",
    errno.EAGAIN: "raise the limit of threads (`ulimit -u`), or set OMP_NUM_THREADS=1",
}
# Libraries written in other languages raise errors of their own, with the system's text or an allocator's.
_TEXTS = [
    # Of an exchange between hosts the system's text has another meaning.
    (re.compile(rf"^{os.strerror(errno.EAGAIN)}$|can't start new thread"), errno.EAGAIN),
    (re.compile(r"\bout of memory\b|can't allocate memory", re.IGNORECASE), errno.ENOMEM),
    # The text of ENFILE begins with that of EMFILE.
    (re.compile(os.strerror(errno.ENFILE)), errno.ENFILE),
    *((re.compile(os.strerror(number)), number) for number in _REMEDIES if number != errno.EAGAIN),
]


class UserError(ValueError):
    """Wrong input. The message names the file or key, its value, and the remedy.

    Commands that raise it exit with ``EXIT_CODE`` (``EX_CONFIG``: needs attention, a retry fails again). Subclasses may
    have another code. Every subclass is constructed from its message alone, so that pickle sends it to other ranks.
    """

    EXIT_CODE = 78


def remedy_of_limit(error: BaseException | None) -> str | None:
    """The remedy, if `error` or its cause is a limit of the operating system: disk, files, memory, threads; else None.

    Such an error is no bug, and another start meets the same limit. A ``UserError`` has a remedy of its own.
    """
    while error is not None and not isinstance(error, UserError):
        if (number := _number(error)) in _REMEDIES:
            return _REMEDIES[number]
        error = error.__cause__
    return None


def _number(error: BaseException) -> int | None:
    """The system's number of `error`, if it has one or a text that stands for one."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    text = str(error)
    return next((number for pattern, number in _TEXTS if pattern.search(text)), None)


def summary(error: BaseException) -> str:
    """Summary of `error` in one message: its type and text; of a ``UserError`` the text; with the remedy of a limit."""
    if isinstance(error, UserError):
        return str(error)
    text = ": ".join(part for part in (type(error).__name__, str(error)) if part)
    remedy = remedy_of_limit(error)
    return text if remedy is None else f"{text}; {remedy}"


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
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(
        one if one in _HARMLESS or unicodedata.category(one) not in _OBEYED else ascii(one)[1:-1] for one in text
    )
