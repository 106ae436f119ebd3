"""Read: documents from files, directories and the Python standard library, always in the same order."""

import json
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightscale.errors import UserError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
JSONL_SUFFIX = ".jsonl"
DEFAULT_SUFFIXES = (*TEXT_SUFFIXES, JSONL_SUFFIX)
STDLIB = "stdlib"
# The standard library's tests hold deliberately broken files and long tables; site-packages is not the
# library.
_STDLIB_SKIPPED_DIRS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})

_BYTE_ORDER_MARK = "\ufeff"  # some programs begin a UTF-8 file with it; JSON forbids it

UNREADABLE = "unreadable file"
DIRECTORY_LOOP = "directory loop"
INVALID_UTF8 = "invalid UTF-8 replaced"
LONE_SURROGATE = "lone surrogate replaced"
NOT_JSON = "line is not a JSON object"
NO_TEXT = "line without a text field"
EMPTY = "empty document left out"
READ_TWICE = "file given twice, read once"
_HARMLESS = frozenset({EMPTY, READ_TWICE})


class Problems:
    """What went wrong while reading, counted by reason, with the first places of each.

    With ``strict`` the first problem that loses or changes text raises ``UserError`` instead.
    """

    def __init__(self, *, strict: bool = False, max_examples: int = 20) -> None:
        self.strict = strict
        self.max_examples = max_examples
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def add(self, reason: str, place: str) -> None:
        """Count ``reason`` at ``place``, a file's id with line and detail where there are any."""
        if self.strict and reason not in _HARMLESS:
            raise UserError(f"{reason}: {place} (--strict stops here; without it this is counted)")
        self.counts[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < self.max_examples:
            examples.append(place)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file of the corpus."""

    path: Path
    id: str
    """Stable name: the path from the given directory (its name included), or the given file's name."""
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text with its stable name."""

    id: str
    """The file's id; for one of many in a file, ``id:line``, the first line being 1."""
    text: str
    read_bytes: int
    """What it took of its file, in bytes; for progress."""


def list_files(
    roots: Sequence[Path], problems: Problems, *, suffixes: Sequence[str] = DEFAULT_SUFFIXES
) -> list[SourceFile]:
    """The files under ``roots`` in order: the roots as given, each directory's entries by name.

    A root that is a file is taken whatever its suffix. In directories only files with one of ``suffixes``
    count, and hidden entries (``.git``) and ``__pycache__`` are passed over; links are followed, a loop is
    counted once. Raises ``UserError`` for a root that does not exist.
    """
    files: list[SourceFile] = []
    for root in roots:
        try:
            status = root.lstat()
        except OSError as error:
            raise UserError(f"{root}: {error.strerror}") from error
        if stat.S_ISDIR(status.st_mode) or root.is_dir():
            top = root.resolve()
            name = _printable(top.name)
            files.extend(_walk(top, name, (), tuple(suffixes), frozenset({"__pycache__"}), problems))
        else:
            files.extend(_one_file(root, _printable(root.name), problems))
    return _without_repeats(files, problems)


def list_stdlib(problems: Problems) -> list[SourceFile]:
    """The sources of this Python's standard library without its tests; ids are relative to the library."""
    root = Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise UserError(f"{root}: no sources of the standard library there; give a corpus by its path")
    return _without_repeats(_walk(root.resolve(), "", (), (".py",), _STDLIB_SKIPPED_DIRS, problems), problems)


def read_documents(files: Iterable[SourceFile], problems: Problems, *, text_field: str = "text") -> Iterator[Document]:
    """The documents of ``files`` in order: a text file is one, a ``.jsonl`` file has one per line in
    ``text_field``.

    Texts are valid Unicode: bytes that are not UTF-8 and lone surrogates become U+FFFD. Every such
    replacement, every file that cannot be read and every line that has no text is counted in ``problems``.
    Empty documents are left out.
    """
    for file in files:
        try:
            if file.path.suffix == JSONL_SUFFIX:
                yield from _read_jsonl(file, problems, text_field)
            else:
                yield from _read_text(file, problems)
        except OSError as error:
            problems.add(UNREADABLE, f"{file.id}: {error.strerror}")


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
    yield SourceFile(path=path, id=file_id, size_bytes=status.st_size)


def _without_repeats(files: Iterable[SourceFile], problems: Problems) -> list[SourceFile]:
    """The first of every file that roots (``corpus corpus/a.txt``) or links name more than once."""
    seen: set[str] = set()
    kept = []
    for file in files:
        real_path = os.path.realpath(file.path)  # Path.resolve() is several times slower
        if real_path in seen:
            problems.add(READ_TWICE, file.id)
        else:
            seen.add(real_path)
            kept.append(file)
    return kept


def _read_text(file: SourceFile, problems: Problems) -> Iterator[Document]:
    raw = file.path.read_bytes()
    text = _decode(raw, file.id, problems)
    if text:
        yield Document(id=file.id, text=text, read_bytes=len(raw))
    else:
        problems.add(EMPTY, file.id)


def _read_jsonl(file: SourceFile, problems: Problems, text_field: str) -> Iterator[Document]:
    with file.path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            place = f"{file.id}:{number}"
            line = _decode(raw, place, problems).removeprefix(_BYTE_ORDER_MARK)
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                problems.add(NOT_JSON, f"{place}: {error}")
                continue
            if not isinstance(record, dict):
                problems.add(NOT_JSON, f"{place}: a {type(record).__name__}")
                continue
            text = record.get(text_field)
            if not isinstance(text, str):
                problems.add(NO_TEXT, f"{place}: no string {text_field!r} (found {_describe_fields(record)})")
                continue
            text = _replace_surrogates(text, place, problems)
            if text:
                yield Document(id=place, text=text, read_bytes=len(raw))
            else:
                problems.add(EMPTY, place)


def _describe_fields(record: dict[str, object]) -> str:
    names = [f"{name}: {type(value).__name__}" for name, value in list(record.items())[:5]]
    return ", ".join(names) if names else "no fields"


def _decode(raw: bytes, place: str, problems: Problems) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        problems.add(INVALID_UTF8, f"{place}: byte 0x{raw[error.start]:02x} at offset {error.start}")
        return raw.decode("utf-8", errors="replace")


def _replace_surrogates(text: str, place: str, problems: Problems) -> str:
    """JSON's ``\\ud800`` escapes can spell half a character, which no encoding can hold."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        problems.add(LONE_SURROGATE, place)
        return text.encode("utf-16-le", errors="surrogatepass").decode("utf-16-le", errors="replace")


def _printable(name: str) -> str:
    """A file name as valid Unicode: bytes of a name that are not UTF-8 become backslash escapes."""
    return os.fsencode(name).decode("utf-8", errors="backslashreplace")
