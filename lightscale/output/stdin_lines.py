"""The lines that people type, or that a pipe sends."""

import contextlib
import importlib
import sys
from collections.abc import Iterator

from lightscale.errors import UserError


def stdin_lines(*, is_terminal: bool) -> Iterator[str]:
    """Lines of stdin without their ends, in a terminal behind a prompt. Raises ``UserError`` where it is no UTF-8."""
    return _typed() if is_terminal else _piped()


def _typed() -> Iterator[str]:
    """Until Ctrl-D; Ctrl-C begins the line anew."""
    with contextlib.suppress(ImportError):
        # Imported, it lets lines be edited and brings earlier ones back.
        importlib.import_module("readline")
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(flush=True)
            return
        except KeyboardInterrupt:
            print(flush=True)


def _piped() -> Iterator[str]:
    try:
        for line in sys.stdin:
            yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"stdin: not valid UTF-8 ({error.reason})") from error
