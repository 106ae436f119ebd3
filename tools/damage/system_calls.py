"""The writes of a command to one folder, as strace sees them: what changed data, what changed names, what was synced.

``record`` runs a command and returns the folder before it and its ``Operation``s in their order. Their sum must be the
folder as the command leaves it; a difference is a call that this module does not follow, and an error.
"""

import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_CALLS = (
    "openat open creat close dup dup2 dup3 fcntl lseek read readv pread64 write writev pwrite64 pwritev truncate "
    "ftruncate fallocate copy_file_range sendfile rename renameat renameat2 unlink unlinkat rmdir mkdir mkdirat link "
    "linkat symlink symlinkat fsync fdatasync sync syncfs sync_file_range mmap chdir fchdir clone clone3 fork vfork"
)
# Numbers in place of what is read: only where it was read matters.
_RAW = "read,readv,pread64"
_LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?(?:0x)?[0-9a-f]+)")
_UNFINISHED = re.compile(r"(\d+) +(\w+)\((.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>(.*)$")


class NotFollowed(Exception):
    """A call, or what it did, that the recording does not know."""


@dataclass(frozen=True, kw_only=True)
class Write:
    """``data`` at ``offset`` of a file."""

    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Resize:
    """A file's size set."""

    inode: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Names:
    """Entries of directories that change together: (directory, name) to an inode, None for a removed one."""

    changes: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True, kw_only=True)
class Sync:
    """All that was written to a file, or all entries of a directory, are on the disk when this returns."""

    inode: int


Operation = Write | Resize | Names | Sync


Files = dict[str, bytes | str | None]


@dataclass
class Tree:
    """Files and directories by inode; ``root`` is the folder."""

    root: int = 0
    data: dict[int, bytes] = field(default_factory=dict)
    entries: dict[int, dict[str, int]] = field(default_factory=dict)
    links: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> "Tree":
        """As ``folder`` is. Hard links and special files are NotFollowed."""
        tree = cls()
        tree.root = tree._add(folder)
        return tree

    def _add(self, path: Path) -> int:
        mode, inode = path.lstat().st_mode, self.new_inode()
        if stat.S_ISDIR(mode):
            self.entries[inode] = {}
            for child in sorted(path.iterdir()):
                self.entries[inode][child.name] = self._add(child)
        elif stat.S_ISLNK(mode):
            self.links[inode] = str(path.readlink())
        elif stat.S_ISREG(mode):
            self.data[inode] = path.read_bytes()
        else:
            raise NotFollowed(f"{path} is no file, directory or symbolic link")
        return inode

    def new_inode(self) -> int:
        """One that is not used."""
        return len(self.data) + len(self.entries) + len(self.links)

    def copy(self) -> "Tree":
        """Whose changes leave this one as it is."""
        names = {inode: dict(entries) for inode, entries in self.entries.items()}
        return Tree(self.root, dict(self.data), names, dict(self.links))

    def apply(self, operation: Operation) -> None:
        """Change the tree."""
        match operation:
            case Write(inode=inode, offset=offset, data=data):
                before = self.data[inode].ljust(offset, b"\0")
                self.data[inode] = before[:offset] + data + before[offset + len(data) :]
            case Resize(inode=inode, size=size):
                self.data[inode] = self.data[inode][:size].ljust(size, b"\0")
            case Names(changes=changes):
                for directory, name, named in changes:
                    if named is None:
                        self.entries[directory].pop(name, None)
                    else:
                        self.entries[directory][name] = named

    def inodes(self) -> dict[str, int]:
        """By path; the folder itself is the empty one. What no name leads to is not there."""
        found = {"": self.root}

        def visit(inode: int, path: str) -> None:
            for name, child in sorted(self.entries.get(inode, {}).items()):
                found[f"{path}{name}"] = child
                visit(child, f"{path}{name}/")

        visit(self.root, "")
        return found

    def files(self) -> Files:
        """Path to a file's bytes, a link's target, or None of a directory."""
        return {path: self.data.get(inode, self.links.get(inode)) for path, inode in self.inodes().items() if path}


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A folder before a command, and what the command did.

    ``before`` has the inodes of later files too, empty and without a name.
    """

    before: Tree
    operations: tuple[Operation, ...]
    paths: dict[int, str]
    """The last path of each inode in the folder."""


@dataclass
class _OpenFile:
    inode: int
    offset: int = 0
    appends: bool = False


def record(command: Sequence[str], folder: Path, *, cwd: Path, ignored: Sequence[str] = ()) -> Recording:
    """Run ``command`` in ``cwd``. ``ignored``: paths in ``folder`` whose changes nobody reads back.

    Raises:
        NotFollowed: A call whose effect is not modelled changed the folder.
        CalledProcessError: The command failed.
    """
    before = Tree.of(folder)
    with tempfile.TemporaryDirectory(prefix="lightscale-calls-") as name:
        log = Path(name) / "log"
        strace = ["strace", "-f", "-qq", "-y", "-xx", "-s", "1000000000", "-o", str(log)]
        calls = ["-e", f"trace={_CALLS.replace(' ', ',')}", "-e", f"raw={_RAW}", "-e", "signal=none"]
        done = subprocess.run([*strace, *calls, *command], cwd=cwd, capture_output=True, text=True, check=False)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, list(command), done.stdout, done.stderr)
        follower = _Follower(before.copy(), folder, cwd)
        for line in _whole_lines(log):
            follower.follow(*line)
    then, now = follower.tree.files(), Tree.of(folder).files()
    differing = sorted(
        path
        for path in then.keys() | now.keys()
        if then.get(path, 0) != now.get(path, 0) and not any(re.fullmatch(one, path) for one in ignored)
    )
    if differing:
        raise NotFollowed(f"the calls do not add up to the folder: {', '.join(differing[:5])}")
    for inode in follower.tree.data:
        before.data.setdefault(inode, b"")
    for inode in follower.tree.entries:
        before.entries.setdefault(inode, {})
    before.links.update(follower.tree.links)
    return Recording(before=before, operations=tuple(follower.operations), paths=follower.paths)


def _whole_lines(log: Path) -> Iterator[tuple[int, str, str, int, dict[int, tuple[int, str]]]]:
    """(process, call, arguments, result, processes by their makers), in the order in which calls returned."""
    begun: dict[tuple[int, str], str] = {}
    made: dict[int, tuple[int, str]] = {}
    lines: list[tuple[int, str, str, int]] = []
    with log.open() as file:
        for line in file:
            if unfinished := _UNFINISHED.match(line.rstrip("\n")):
                begun[int(unfinished[1]), unfinished[2]] = unfinished[3]
                continue
            if resumed := _RESUMED.match(line):
                start = begun.pop((int(resumed[1]), resumed[2]), "")
                line = f"{resumed[1]} {resumed[2]}({start}{resumed[3]}"
            if whole := _LINE.match(line):
                process, call, arguments, result = int(whole[1]), whole[2], whole[3], int(whole[4], 0)
                lines.append((process, call, arguments, result))
                if call in ("clone", "clone3", "fork", "vfork") and result > 0:
                    made[result] = (process, arguments)
    for one in lines:
        yield *one, made


class _Follower:
    """Files that processes have open, and the tree that their calls make."""

    def __init__(self, tree: Tree, folder: Path, cwd: Path) -> None:
        self.tree, self.operations = tree, list[Operation]()
        self._folder, self._cwd = str(folder.resolve()), str(cwd.resolve())
        self.paths = {inode: path for path, inode in tree.inodes().items()}
        self._next = tree.new_inode()
        # By process; threads share one.
        self._tables: dict[int, dict[int, _OpenFile]] = {}

    def follow(self, process: int, call: str, text: str, result: int, made: dict[int, tuple[int, str]]) -> None:
        """Take one call in."""
        if result < 0:
            return
        table = self._table(process, made)
        arguments = _split(text)
        handler = getattr(self, f"_{call}", None)
        if handler is not None:
            handler(table, arguments, result)

    def _table(self, process: int, made: dict[int, tuple[int, str]]) -> dict[int, _OpenFile]:
        if process not in self._tables:
            maker, how = made.get(process, (None, ""))
            table = {} if maker is None else self._table(maker, made)
            self._tables[process] = table if "CLONE_FILES" in how else dict(table)
        return self._tables[process]

    def _do(self, operation: Operation) -> None:
        self.operations.append(operation)
        self.tree.apply(operation)

    # ----- names -------------------------------------------------------------------------------------------------

    def _whole(self, *parts: str) -> str:
        """A path from the root, without ``..``, as nothing changes to a directory through a symbolic link."""
        return os.path.normpath(Path(self._cwd, *parts))

    def _parent(self, at: str, name: str) -> tuple[int, str] | None:
        """The directory's inode and the last part of a path; None: it is not in the folder."""
        path = self._whole(at, name)
        if path != self._folder and not path.startswith(self._folder + "/"):
            return None
        parts = path[len(self._folder) + 1 :].split("/")
        inode = self.tree.root
        for part in parts[:-1]:
            inode = self.tree.entries[inode][part]
        return inode, parts[-1]

    def _find(self, at: str, name: str) -> int | None:
        place = self._parent(at, name)
        if place is None:
            return None
        directory, last = place
        return self.tree.entries[directory].get(last) if last else self.tree.root

    def _make(self, at: str, name: str, kind: str, target: str = "") -> int | None:
        place = self._parent(at, name)
        if place is None:
            return None
        inode, self._next = self._next, self._next + 1
        if kind == "file":
            self.tree.data[inode] = b""
        elif kind == "directory":
            self.tree.entries[inode] = {}
        else:
            self.tree.links[inode] = target
        self._do(Names(changes=((*place, inode),)))
        self.paths[inode] = os.path.relpath(self._whole(at, name), self._folder)
        return inode

    def _remove(self, at: str, name: str) -> None:
        if (place := self._parent(at, name)) is not None:
            self._do(Names(changes=((*place, None),)))

    def _move(self, source: tuple[str, str], target: tuple[str, str], flags: str = "") -> None:
        old, new = self._parent(*source), self._parent(*target)
        if old is None and new is None:
            return
        if old is None or new is None:
            raise NotFollowed(f"{source[1]} is renamed to {target[1]}: only one of them is in the folder")
        moved = self.tree.entries[old[0]][old[1]]
        replaced = self.tree.entries[new[0]].get(new[1]) if "EXCHANGE" in flags else None
        self._do(Names(changes=((*new, moved), (*old, replaced))))
        self.paths[moved] = os.path.relpath(self._whole(*target), self._folder)

    def _rename(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        self._move((self._cwd, _text(a[0])), (self._cwd, _text(a[1])))

    def _renameat(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        self._move((_at(a[0]), _text(a[1])), (_at(a[2]), _text(a[3])), a[4] if len(a) > 4 else "")

    _renameat2 = _renameat

    def _unlink(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        self._remove(self._cwd, _text(a[0]))

    _rmdir = _unlink

    def _unlinkat(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        self._remove(_at(a[0]), _text(a[1]))

    def _mkdir(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        self._make(self._cwd, _text(a[0]), "directory")

    def _mkdirat(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        self._make(_at(a[0]), _text(a[1]), "directory")

    def _symlink(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        self._make(self._cwd, _text(a[1]), "link", _text(a[0]))

    def _symlinkat(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        self._make(_at(a[1]), _text(a[2]), "link", _text(a[0]))

    def _linkat(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        inode, place = self._find(_at(a[0]), _text(a[1])), self._parent(_at(a[2]), _text(a[3]))
        if place is not None and inode is not None:
            self._do(Names(changes=((*place, inode),)))
        elif place is not None:
            raise NotFollowed(f"{_text(a[1])} is linked into the folder")

    def _link(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        self._linkat(table, ["", a[0], "", a[1]], result)

    def _chdir(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        if self._whole(_text(a[0])) != self._cwd:
            raise NotFollowed(f"a process changes to {_text(a[0])}: its relative paths are not known")

    def _fchdir(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        if _at(a[0]) != self._cwd:
            raise NotFollowed(f"a process changes to {_at(a[0])}: its relative paths are not known")

    # ----- open files --------------------------------------------------------------------------------------------

    def _openat(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        at, name, flags = _at(a[0]), _text(a[1]), a[2]
        inode = self._find(at, name)
        if inode is not None and inode in self.tree.links:
            raise NotFollowed(f"{name} is opened through a symbolic link")
        if inode is None and "O_CREAT" in flags:
            inode = self._make(at, name, "file")
        elif inode is not None and "O_TRUNC" in flags and self.tree.data[inode]:
            self._do(Resize(inode=inode, size=0))
        if inode is None:
            table.pop(result, None)
        else:
            table[result] = _OpenFile(inode, appends="O_APPEND" in flags)

    def _open(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        self._openat(table, ["", *a], result)

    def _creat(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        self._openat(table, ["", a[0], "O_CREAT|O_TRUNC"], result)

    def _close(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        table.pop(_fd(a[0]), None)

    def _dup(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        table.pop(result, None)
        if (file := table.get(_fd(a[0]))) is not None:
            table[result] = file

    _dup2 = _dup3 = _dup

    def _fcntl(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        if a[1].startswith("F_DUPFD"):
            self._dup(table, a, result)

    def _lseek(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        if (file := table.get(_fd(a[0]))) is not None:
            file.offset = result

    def _read(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        if (file := table.get(_fd(a[0]))) is not None:
            file.offset += result

    _readv = _read

    def _written(self, file: _OpenFile, data: bytes, offset: int | None = None) -> None:
        if offset is None:
            start = len(self.tree.data[file.inode]) if file.appends else file.offset
            file.offset = start + len(data)
        else:
            start = offset
        if data:
            self._do(Write(inode=file.inode, offset=start, data=data))

    def _write(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        if (file := table.get(_fd(a[0]))) is not None:
            self._written(file, _data(a[1])[:result])

    _writev = _write

    def _pwrite64(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        if (file := table.get(_fd(a[0]))) is not None:
            self._written(file, _data(a[1])[:result], int(a[3]))

    _pwritev = _pwrite64

    def _ftruncate(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        if (file := table.get(_fd(a[0]))) is not None:
            self._do(Resize(inode=file.inode, size=int(a[1])))

    def _truncate(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        if (inode := self._find(self._cwd, _text(a[0]))) is not None:
            self._do(Resize(inode=inode, size=int(a[1])))

    def _copy_file_range(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        """Also of sendfile, whose files stand the other way round."""
        source, target = table.get(_fd(a[0])), table.get(_fd(a[2]))
        if target is None:
            return
        given = re.match(r"\[(\d+)\]", a[1])
        if a[3] != "NULL" or (given is None and source is None):
            raise NotFollowed(f"the kernel copies {_at(a[0])}, from an unknown place")
        # Files of other folders do not change meanwhile.
        whole = Path(_at(a[0])).read_bytes() if source is None else self.tree.data[source.inode]
        if given is not None:
            start = int(given[1])
        else:
            assert source is not None
            start = source.offset
            source.offset += result
        self._written(target, whole[start : start + result])

    def _sendfile(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        self._copy_file_range(table, [a[1], a[2], a[0], "NULL"], result)

    def _fallocate(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        if (file := table.get(_fd(a[0]))) is not None and a[1] != "FALLOC_FL_KEEP_SIZE":
            end = int(a[2]) + int(a[3])
            if a[1] != "0" or end < len(self.tree.data[file.inode]):
                raise NotFollowed(f"fallocate with {a[1]}")
            self._do(Resize(inode=file.inode, size=end))

    def _mmap(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        if "MAP_SHARED" in a[3] and "PROT_WRITE" in a[2] and table.get(_fd(a[4])) is not None:
            raise NotFollowed("a file of the folder is written through memory")

    # ----- the disk ----------------------------------------------------------------------------------------------

    def _fsync(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        if (file := table.get(_fd(a[0]))) is not None:
            self._do(Sync(inode=file.inode))

    _fdatasync = _fsync

    def _sync(self, table: dict[int, _OpenFile], a: list[str], result: int) -> None:
        raise NotFollowed("all file systems are synced")

    _syncfs = _sync_file_range = _sync


def _split(text: str) -> list[str]:
    """Arguments; commas within brackets divide none. Strings are bytes in hexadecimal, and have none of either."""
    found, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        if letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == "," and depth == 0:
            found.append(text[begin:at].strip())
            begin = at + 1
    return [*found, text[begin:].strip()]


def _data(text: str) -> bytes:
    """The strings of an argument, one after another: of write one, of writev all."""
    return b"".join(bytes.fromhex(one.replace("\\x", "")) for one in re.findall(r'"([^"]*)"', text))


def _text(text: str) -> str:
    return os.fsdecode(_data(text))


def _at(text: str) -> str:
    """The directory that a descriptor stands for, as strace writes behind it; empty: the working directory."""
    inside = re.search(r"<([^>]*)>", text)
    return "" if inside is None else os.fsdecode(bytes.fromhex(inside[1].replace("\\x", "")))


def _fd(text: str) -> int:
    number = re.match(r"-?(?:0x)?[0-9a-f]+", text)
    return -1 if number is None else int(number[0], 0)
