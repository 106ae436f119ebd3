"""A command whose writes are recorded, how its folder is opened, and how what is found is judged."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ABSENT, REFUSED, EARLIER, WHOLE = "absent", "refused", "earlier", "whole"


class Wrong(Exception):
    """A folder that opens as something that was never written, or without something that was reported."""


@dataclass(kw_only=True)
class Case:
    """A command, and how what it writes is opened."""

    name: str
    command: tuple[str, ...]
    folder: Path
    """All that it writes."""
    look: Callable[[], Any]
    """Open the folder. Raises UserError where it is refused, FileNotFoundError where it is not there."""
    judge: Callable[["Context", Any], str]
    """An outcome from what ``look`` found, or Wrong."""
    final: Callable[[], Any]
    """What the command must end with, given again in any state."""
    read: str
    """Pattern of the paths in the folder that ``look`` reads; states that differ in others alone are opened once."""
    ignored: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    label: str = ""
    """What stands for the command in the result, if not its first two words."""
    program: tuple[str, ...] = (sys.executable, "-m", "lightscale")


@dataclass(frozen=True, kw_only=True)
class Context:
    """What an outcome is judged by."""

    before: Any
    """What ``look`` found before the command; an exception where it was refused."""
    after: Any
    reported: bytes
    """All that was written before the failure to the records whose lines report something."""


def the_same(context: Context, found: Any) -> str:
    """For files that appear whole: as before the command, or as after it."""
    if found == context.after:
        return WHOLE
    if found == context.before:
        return EARLIER
    raise Wrong("it opens, with other contents than were written")
