"""Where texts are: the files of a corpus, from paths, patterns and directories, always in the same order."""

import glob
import json
import os
import re
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from lightscale.data_pipeline.preparation.readers.inputs import (
    DIRECTORY_LOOP,
    OTHER_KIND,
    READ_TWICE,
    UNREADABLE,
    Problems,
    SourceFile,
)
from lightscale.data_pipeline.preparation.readers.remote import RemotePath, is_remote, list_files
from lightscale.data_pipeline.preparation.readers.table import DEFAULT_SUFFIXES
from lightscale.data_pipeline.preparation.work_directory import is_work_directory
from lightscale.errors import UserError

STDLIB = "stdlib"
STDLIB_PATH = "python:stdlib"
# The standard library's tests hold deliberately broken files and long tables; site-packages is not part of the library.
_STDLIB_SKIPPED_DIRS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_SKIPPED_DIRS = frozenset({"__pycache__"})
# Of Hugging Face: what save_to_disk writes beside the data, and how its hub names splits: by push_to_hub; by people, in
# words that its library knows; and directories of parquet files, as where the hub has converted a data set.
_SPLITS_FILE, _STATE_FILE = "dataset_dict.json", "state.json"
_DATA_SET_FILES = frozenset({_STATE_FILE, "dataset_info.json"})
_SPLIT_NAME = re.compile(r"(\w+)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?\.parquet")
_SPLIT = "training|train|testing|test|validation|valid|val|dev|evaluation|eval"
_NAMED_SPLIT = re.compile(
    rf"(.*[-_.]|)({_SPLIT})(?:[-_.]?\d[-\w.]*)?\.(?:jsonl?|csv|tsv|parquet|arrow)(?:\.gz|\.zst|\.bz2)?", re.IGNORECASE
)
_TABLES = (".parquet", ".arrow")
_PATTERN_CHARACTERS = frozenset("*?[")


class FileLister:
    """Lists files, each once, whatever paths and links lead to it.

    It remembers eight bytes of every file: about 100 bytes of memory for a file.
    """

    def __init__(self, problems: Problems, *, after: "FileLister | None" = None) -> None:
        """``after``: an earlier listing, whose files are skipped."""
        self._problems = problems
        self._seen: set[int] = after._seen if after else set()

    def files(self, entries: Sequence[str], *, suffixes: Sequence[str] = DEFAULT_SUFFIXES) -> Iterator[SourceFile]:
        """The files of ``entries``: entries in their order, files of a pattern or a directory by name.

        A path of a file is taken whatever its suffix. In directories only files with one of ``suffixes``, in capitals
        or not, count; the others are counted as problems, but for hidden entries (``.git``) and ``__pycache__``. Links
        are followed, a loop is counted once. Raises ``UserError`` for a path that does not exist and a pattern that
        matches nothing.
        """
        for entry in entries:
            if entry == STDLIB_PATH:
                yield from self._once(_list_stdlib(self._problems))
                continue
            if is_remote(entry):
                yield from self._once(_list_remote(entry, tuple(suffix.lower() for suffix in suffixes), self._problems))
                continue
            for root in _expand(entry):
                wanted = _Wanted(suffixes=tuple(suffix.lower() for suffix in suffixes))
                yield from self._once(_list_root(root, wanted, self._problems))

    def _once(self, files: Iterator[SourceFile]) -> Iterator[SourceFile]:
        for file in files:
            # By the real path: links may lead to one file twice. Path.resolve() is several times slower.
            real = str(file.path) if isinstance(file.path, RemotePath) else os.path.realpath(file.path)
            digest = xxhash.xxh3_64_intdigest(os.fsencode(real))
            if digest in self._seen:
                self._problems.add(READ_TWICE, file.id)
            else:
                self._seen.add(digest)
                yield file


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """What is taken of a directory."""

    suffixes: tuple[str, ...]
    skipped_dirs: frozenset[str] = _SKIPPED_DIRS
    counts_others: bool = True
    """Whether files of other kinds are counted as problems."""


def _expand(entry: str) -> list[Path]:
    """The paths that an entry means: itself, or those that match it as a pattern, by name."""
    path = Path(entry)
    if not _PATTERN_CHARACTERS & set(entry) or path.is_symlink() or path.exists():
        return [path]
    found = sorted(glob.glob(entry, recursive=True))  # noqa: PTH207 - Path.glob cannot start at an absolute pattern
    if not found:
        raise UserError(f"{entry}: no file matches this pattern")
    return [Path(name) for name in found]


def _list_root(root: Path, wanted: _Wanted, problems: Problems) -> Iterator[SourceFile]:
    try:
        status = root.lstat()
    except OSError as error:
        raise UserError(f"{root}: {error.strerror}") from error
    if stat.S_ISDIR(status.st_mode) or root.is_dir():
        top = root.resolve()
        yield from _walk(top, _printable(top.name), (), wanted, problems)
    else:
        yield from _one_file(root, _printable(root.name), problems)


def _list_remote(entry: str, suffixes: tuple[str, ...], problems: Problems) -> Iterator[SourceFile]:
    """A file by its URL whatever its suffix, what a pattern matches, or the files below a prefix.

    ``UserError`` where these are several splits of a data set.
    """
    found = list(list_files(entry))
    _check_remote_splits(entry, [file_id for file_id, _ in found], suffixes)
    for file_id, path in found:
        if "/" in file_id:
            if any(part.startswith(".") for part in file_id.split("/")[1:]):
                continue
            if not path.name.lower().endswith(suffixes):
                problems.add(OTHER_KIND, file_id)
                continue
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(f"{path}: {error}") from error
        yield SourceFile(
            path=path,
            id=file_id,
            size_bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            gives_parts=status.gives_parts,
        )


def _check_remote_splits(entry: str, ids: Sequence[str], suffixes: tuple[str, ...]) -> None:
    """As `_of_data_set` for each directory of a listing, which has files alone."""
    files: dict[str, list[str]] = {}
    for file_id in ids:
        directory, _, name = file_id.rpartition("/")
        files.setdefault(directory, []).append(name)
    below: dict[str, dict[str, bool]] = {directory: {} for directory in files}
    for directory, names in files.items():
        above, mark, name = directory.rpartition("/")
        if mark:
            below.setdefault(above, {})[name] = any(one.lower().endswith(_TABLES) for one in names)
    for directory, directories in below.items():
        # Without a slash: a single file, or files that a pattern has chosen.
        if directory:
            inner = directory.partition("/")[2]
            url = f"{entry.rstrip('/')}/{inner}".rstrip("/")
            _refuse_splits(url, _splits(files.get(directory, ()), directories, suffixes))


def _refuse_splits(place: str, splits: Mapping[str, str]) -> None:
    """``UserError`` for several splits in ``place``: nobody wants to train on what is there to test by."""
    if len(splits) > 1:
        example = splits.get("train") or splits.get("training") or next(iter(splits.values()))
        raise UserError(
            f"{place}: a data set with the splits {', '.join(splits)}; exclude its files with `suffixes`, or use "
            f"the path of one split, like {glob.escape(place)}/{example}"
        )


def _list_stdlib(problems: Problems) -> Iterator[SourceFile]:
    """The sources of this Python's standard library without its tests; ids are relative to the library."""
    root = Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise UserError(f"{root}: the sources of the standard library are missing; use a path instead of {STDLIB_PATH}")
    wanted = _Wanted(suffixes=(".py",), skipped_dirs=_STDLIB_SKIPPED_DIRS, counts_others=False)
    yield from _walk(root.resolve(), "", (), wanted, problems)


def _walk(
    directory: Path,
    id_prefix: str,
    parents: tuple[tuple[int, int], ...],
    wanted: _Wanted,
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
        problems.add(DIRECTORY_LOOP, f"{id_prefix}: link to a directory above it")
        return
    entries = _of_data_set(directory, entries, wanted)
    for entry in entries:
        if entry.name.startswith("."):
            continue
        name = _printable(entry.name)
        entry_id = f"{id_prefix}/{name}" if id_prefix else name
        if _is_dir(entry):
            if entry.name not in wanted.skipped_dirs and not is_work_directory(Path(entry.path)):
                yield from _walk(Path(entry.path), entry_id, (*parents, identity), wanted, problems)
        elif entry.name.lower().endswith(wanted.suffixes):
            yield from _one_file(Path(entry.path), entry_id, problems)
        elif wanted.counts_others:
            problems.add(OTHER_KIND, entry_id)


def _of_data_set(directory: Path, entries: list[os.DirEntry[str]], wanted: _Wanted) -> list[os.DirEntry[str]]:
    """The entries of a directory; of one that Hugging Face's ``save_to_disk`` wrote, the data's, in its order.

    ``UserError`` where it has several splits.
    """
    names = {entry.name for entry in entries}
    directories = {
        entry.name: re.fullmatch(_SPLIT, entry.name, re.IGNORECASE) is not None and _holds_tables(Path(entry.path))
        for entry in entries
        if _is_dir(entry)
    }
    _refuse_splits(str(directory), _splits(names, directories, wanted.suffixes))
    if not names >= _DATA_SET_FILES:
        return entries
    try:
        state = json.loads((directory / _STATE_FILE).read_bytes())
        listed = [file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory / _STATE_FILE}: not a file of Hugging Face's save_to_disk ({error})") from error
    if missing := [name for name in listed if name not in names]:
        raise UserError(f"{directory}: {missing[0]} is missing; {_STATE_FILE} lists it")
    # Others, cache-….arrow, are what was computed of the data.
    by_name = {entry.name: entry for entry in entries}
    return [by_name[name] for name in listed]


def _splits(names: Iterable[str], directories: Mapping[str, bool], suffixes: tuple[str, ...]) -> dict[str, str]:
    """The splits of a data set in a directory, and what names each of them in it; none where it is no data set.

    ``names``: of its entries; ``directories``: whether each of these has files of tables.
    """
    if _SPLITS_FILE in names:
        return {name: name for name in sorted(directories)}
    files = sorted(name for name in names if not name.startswith(".") and name.lower().endswith(suffixes))
    by_set: dict[str, dict[str, set[str]]] = {}
    for name in files:
        if match := _SPLIT_NAME.fullmatch(name):
            by_set.setdefault("", {}).setdefault(match[1].lower(), set()).add(match[1])
        elif match := _NAMED_SPLIT.fullmatch(name):
            by_set.setdefault(match[1], {}).setdefault(match[2].lower(), set()).add(match[2])
    prefix, found = max(by_set.items(), key=lambda one: len(one[1]), default=("", {}))
    if found:
        # Where another split's name begins with a split's, no letter may follow.
        end = {split: "[!a-z]*" if any(one.startswith(split) for one in {*found} - {split}) else "*" for split in found}
        return {split: glob.escape(prefix) + min(spelt) + end[split] for split, spelt in sorted(found.items())}
    named = [name for name in directories if re.fullmatch(_SPLIT, name, re.IGNORECASE)]
    return {name: name for name in named if directories[name]} if len(named) > 1 else {}


def _holds_tables(directory: Path) -> bool:
    try:
        return any(path.name.lower().endswith(_TABLES) for path in directory.iterdir())
    except OSError:
        return False


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
