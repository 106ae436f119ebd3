"""SHA256SUMS of an export: the hash of each file, in the format of the command ``sha256sum``.

safetensors files have no checksum: a flipped bit is another weight. With this file, ``lightscale import``, ``load`` and
``verify`` detect it, and so does ``sha256sum --check SHA256SUMS`` on a machine without lightscale.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from lightscale.errors import UserError
from lightscale.files import open_regular, read_regular

NAME = "SHA256SUMS"
_EDITED = frozenset({"README.md", NAME})
"""Files without a hash: people edit the model card."""
_MOST_BYTES = 1 << 24
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_STEP = "verifying"

Progress = Callable[[str, int, int], None]
"""Name of the step, bytes done, bytes in all."""


def write_checksums(directory: Path) -> str:
    """Write the hashes of all files below ``directory``, except the model card; the name of the file."""
    paths = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    lines = [f"{_sha256(directory / path)}  {path}\n" for path in paths if path not in _EDITED]
    (directory / NAME).write_text("".join(lines), encoding="utf-8")
    return NAME


def require_unchanged(directory: Path, progress: Progress | None = None) -> None:
    """Raise ``UserError`` with every file that is missing or differs from its hash; none without SHA256SUMS."""
    if not (directory / NAME).exists():
        return
    if faults := checksum_faults(directory, progress):
        raise UserError(
            "\n".join(faults) + f"\ncopy the files again, or remove {directory / NAME} if the changes are meant"
        )


def checksum_faults(directory: Path, progress: Progress | None = None) -> list[str]:
    """Read all listed files; a line for each that is missing or differs. ``UserError``: SHA256SUMS cannot be read."""
    expected = dict(_listed(directory / NAME))
    sizes = {path: _size(directory / path) for path in expected}
    faults, done = [], 0
    for path, sha256 in expected.items():
        if progress is not None:
            progress(_STEP, done, sum(sizes.values()))
        done += sizes[path]
        try:
            found = _sha256(directory / path)
        except FileNotFoundError:
            faults.append(f"{directory / path}: missing; {NAME} lists it")
            continue
        except OSError as error:
            faults.append(f"{directory / path}: {error.strerror}")
            continue
        if found != sha256:
            faults.append(f"{directory / path}: sha256 {found}, not {sha256} as in {NAME}")
    return faults


def _listed(path: Path) -> Iterator[tuple[str, str]]:
    text = read_regular(path, what="a list of hashes", most_bytes=_MOST_BYTES, follow_links=True)
    for number, line in enumerate(text.decode(errors="replace").splitlines(), start=1):
        match = _LINE.fullmatch(line)
        # In the directory itself, whatever somebody wrote there.
        if match is None or PurePosixPath(match[2]).is_absolute() or ".." in PurePosixPath(match[2]).parts:
            raise UserError(f"{path}, line {number}: expected a sha256 hash, two spaces and a file of this directory")
        yield match[2], match[1]


def _sha256(path: Path) -> str:
    # Links are followed: model hubs keep files as links into their cache.
    with open_regular(path, what="a file of an export", follow_links=True) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
