"""Whether lm-eval is installed, and which tasks it has: read from its files, as importing it takes seconds."""

import difflib
import functools
import importlib.util
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from lightscale.errors import UserError

INSTALL = "pip install 'lightscale[eval]'"
# What a definition calls itself, or what it is a part of: a name behind the key, or a list of them below it.
_KEY = re.compile(rb"""^["']?(task|group|tag)["']?:[ \t]*(.*)((?:\n[ \t]*-[ \t].*)*)""", re.MULTILINE)


def tasks_folder() -> Path | None:
    """The folder in which lm-eval defines its tasks; None where lm-eval is not installed."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).with_name("tasks")


def require_lm_eval() -> Path:
    """The folder of its tasks. Raises UserError, with the command that installs it, if it is missing."""
    folder = tasks_folder()
    if folder is None:
        raise UserError(f"lm-eval defines this task and is not installed; {INSTALL}")
    return folder


def installed_version() -> str:
    """Of lm-eval, "" where it is not installed."""
    try:
        return metadata.version("lm_eval")
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def task_names(folder: Path) -> frozenset[str]:
    """The names of all tasks, groups and tags that the files in ``folder`` define."""
    found: set[str] = set()
    # What definitions include has any name.
    for path in (path for path in folder.rglob("*") if path.suffix in ("", ".yaml") and path.is_file()):
        for key, name, listed in _KEY.findall(path.read_bytes()):
            found.add(_plain(name))
            # A file may have several tags; the members of a group have files of their own.
            if key == b"tag":
                found.update(_plain(line.partition(b"-")[2]) for line in listed.splitlines())
    return frozenset(found - {"", "null"})


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean …?" with the known name that is most like ``name``, or ""."""
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _plain(text: bytes) -> str:
    return text.decode(errors="replace").strip().strip("\"'")
