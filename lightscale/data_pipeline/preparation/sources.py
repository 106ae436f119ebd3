"""Where texts are: the files of a corpus, from paths, patterns and directories, always in the same order."""

import glob
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from lightscale.errors import UserError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PARQUET_SUFFIX = ".parquet"
DEFAULT_SUFFIXES = (*TEXT_SUFFIXES, *JSONL_SUFFIXES, PARQUET_SUFFIX)
STDLIB = "stdlib"
STDLIB_PATH = "python:stdlib"
# The standard library's tests hold deliberately broken files and long tables; site-packages is not part of the library.
_STDLIB_SKIPPED_DIRS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_SKIPPED_DIRS = frozenset({"__pycache__"})
_PATTERN_CHARACTERS = frozenset("*?[")

UNREADABLE = "unreadable file"
TRUNCATED = "file ends too early"
CHANGED = "file changed since the preparation began"
DIRECTORY_LOOP = "directory loop"
NOT_JSON = "line is not a JSON object"
NO_TEXT = "no text in the field"
TOO_LONG = "document too long"
EMPTY = "empty document skipped"
READ_TWICE = "file given twice, read once"
_HARMLESS = frozenset({EMPTY, READ_TWICE})
_MAX_EXAMPLES = 20


class Problems:
    """What went wrong while reading, counted by reason, with the first examples of each.

    With ``strict`` the first problem that loses or changes text raises ``UserError`` instead.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def add(self, reason: str, where: str) -> None:
        """Count ``reason`` at ``where``, a file's id with line and detail where there are any."""
        if self.strict and reason not in _HARMLESS:
            raise UserError(f"{reason}: {where} (--strict stops here; without it, this is counted and skipped)")
        self.counts[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _MAX_EXAMPLES:
            examples.append(where)

    def as_json(self) -> dict[str, Any]:
        """Plain values: by reason, ``count`` and ``examples``."""
        return {
            reason: {"count": count, "examples": self.examples[reason]} for reason, count in sorted(self.counts.items())
        }

    def merge(self, found: dict[str, Any]) -> None:
        """Add what ``as_json`` gave for a later part of the corpus."""
        for reason, problem in found.items():
            self.counts[reason] += problem["count"]
            examples = self.examples.setdefault(reason, [])
            examples.extend(problem["examples"][: _MAX_EXAMPLES - len(examples)])


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file of the corpus."""

    path: Path
    id: str
    """Stable name: the path from the given directory (its name included), or the given file's name."""
    size_bytes: int
    mtime_ns: int


class FileLister:
    """Lists files, each once, whatever paths and links lead to it.

    It remembers eight bytes of every file: about 100 bytes of memory for a file.
    """

    def __init__(self, problems: Problems, *, after: "FileLister | None" = None) -> None:
        """``after``: what it listed is not listed again."""
        self._problems = problems
        self._seen: set[int] = after._seen if after else set()

    def files(self, entries: Sequence[str], *, suffixes: Sequence[str] = DEFAULT_SUFFIXES) -> Iterator[SourceFile]:
        """The files of ``entries`` in order: the entries as given, what a pattern matches and what a directory holds
        by name.

        A path of a file is taken whatever its suffix. In directories only files with one of ``suffixes`` count,
        and hidden entries (``.git``) and ``__pycache__`` are skipped; links are followed, a loop is counted
        once. Raises ``UserError`` for a path that does not exist and a pattern that matches nothing.
        """
        for entry in entries:
            if entry == STDLIB_PATH:
                yield from self._once(_list_stdlib(self._problems))
                continue
            for root in _expand(entry):
                yield from self._once(_list_root(root, tuple(suffixes), self._problems))

    def _once(self, files: Iterator[SourceFile]) -> Iterator[SourceFile]:
        for file in files:
            # By the real path: links may lead to one file twice. Path.resolve() is several times slower.
            digest = xxhash.xxh3_64_intdigest(os.fsencode(os.path.realpath(file.path)))
            if digest in self._seen:
                self._problems.add(READ_TWICE, file.id)
            else:
                self._seen.add(digest)
                yield file


def _expand(entry: str) -> list[Path]:
    """The paths that an entry means: itself, or those that match it as a pattern, by name."""
    path = Path(entry)
    if not _PATTERN_CHARACTERS & set(entry) or path.is_symlink() or path.exists():
        return [path]
    found = sorted(glob.glob(entry, recursive=True))  # noqa: PTH207 - Path.glob cannot start at an absolute pattern
    if not found:
        raise UserError(f"{entry}: no file matches this pattern")
    return [Path(name) for name in found]


def _list_root(root: Path, suffixes: tuple[str, ...], problems: Problems) -> Iterator[SourceFile]:
    try:
        status = root.lstat()
    except OSError as error:
        raise UserError(f"{root}: {error.strerror}") from error
    if stat.S_ISDIR(status.st_mode) or root.is_dir():
        top = root.resolve()
        yield from _walk(top, _printable(top.name), (), suffixes, _SKIPPED_DIRS, problems)
    else:
        yield from _one_file(root, _printable(root.name), problems)


def _list_stdlib(problems: Problems) -> Iterator[SourceFile]:
    """The sources of this Python's standard library without its tests; ids are relative to the library."""
    root = Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise UserError(f"{root}: the standard library's sources are not there; use a path instead of {STDLIB_PATH}")
    yield from _walk(root.resolve(), "", (), (".py",), _STDLIB_SKIPPED_DIRS, problems)


def _walk(
    directory: Path,
    id_prefix: str,
    parents: tuple[tuple[int, int], ...],
    suffixes: tuple[str, ...],
    skipped_dirs: frozenset[str],
    problems: Problems,
) -> Iterator[SourceFile]:
    """Depth first. ``parents``: (device, inode) of the directories above; one that returns is a loop."""
    try:
        status = directory.stat()
        # Sorted, because the order of a directory differs between file systems and documents get ids in this order.
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError as error:
        problems.add(UNREADABLE, f"{id_prefix or directory}: {error.strerror}")
        return
    identity = (status.st_dev, status.st_ino)
    if identity in parents:
        problems.add(DIRECTORY_LOOP, f"{id_prefix}: leads back to a directory above it")
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        name = _printable(entry.name)
        entry_id = f"{id_prefix}/{name}" if id_prefix else name
        if _is_dir(entry):
            if entry.name not in skipped_dirs:
                above = (*parents, identity)
                yield from _walk(Path(entry.path), entry_id, above, suffixes, skipped_dirs, problems)
        elif entry.name.endswith(suffixes):
            yield from _one_file(Path(entry.path), entry_id, problems)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link to itself: the file branch counts it by name


def _one_file(path: Path, file_id: str, problems: Problems) -> Iterator[SourceFile]:
    try:
        status = path.stat()
    except OSError as error:
        problems.add(UNREADABLE, f"{file_id}: {error.strerror}")
        return
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
        problems.add(UNREADABLE, f"{file_id}: not a regular file")
        return
    yield SourceFile(path=path, id=file_id, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


def _printable(name: str) -> str:
    """A file name as valid Unicode: bytes of a name that are not UTF-8 become backslash escapes."""
    return os.fsencode(name).decode("utf-8", errors="backslashreplace")
