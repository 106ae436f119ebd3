"""XXH128SUMS of an export: the xxh3-128 of each file, in the format of the command ``xxh128sum``.

safetensors files have no checksum: a flipped bit is another weight. With this file, ``lightscale import``, ``load`` and
``verify`` detect it, and so does ``xxh128sum --check XXH128SUMS`` on a machine without lightscale. The hash is that of
checkpoints: it detects accidents, not a forger who can write the file, and costs little beside reading, where sha256
slows an export by a third (`benchmarks/README.md`).
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from lightscale.data_pipeline.executors import Progress, ProgressMeter
from lightscale.data_pipeline.whole_files import sync_tree
from lightscale.errors import UserError
from lightscale.files import open_regular, read_regular
from lightscale.training.checkpoints.manifest import hash_opened

NAME = "XXH128SUMS"
_EDITED = frozenset({"README.md", NAME})
"""Files without a hash: people edit the model card."""
_MOST_BYTES = 1 << 24
_LINE = re.compile(r"([0-9a-f]{32})  (.+)")


def write_checksums(directory: Path) -> str:
    """Write the hashes of all files below ``directory``, except the model card; the name of the file."""
    paths = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    with ThreadPoolExecutor(1) as threads:
        # The disk takes the files meanwhile; hashes come from memory.
        synced = threads.submit(sync_tree, directory)
        lines = [f"{_hash(directory / path)}  {path}\n" for path in paths if path not in _EDITED]
        synced.result()
    (directory / NAME).write_text("".join(lines), encoding="utf-8")
    return NAME


def require_unchanged(directory: Path) -> None:
    """Raise ``UserError`` with every file that is missing or differs from its hash; none without XXH128SUMS."""
    if (directory / NAME).exists() and (faults := checksum_faults(directory, lambda step, done, total: None)):
        raise UserError(
            "\n".join(faults) + f"\ncopy the files again, or remove {directory / NAME} if the changes are meant"
        )


def checksum_faults(directory: Path, progress: Progress) -> list[str]:
    """Read all listed files; a line for each that is missing or differs. ``UserError``: XXH128SUMS cannot be read."""
    expected = dict(_listed(directory / NAME))
    sizes = {path: _size(directory / path) for path in expected}
    meter = ProgressMeter("verifying", sum(sizes.values()), progress)
    faults = []
    for path, recorded in expected.items():
        try:
            found = _hash(directory / path)
        except FileNotFoundError:
            faults.append(f"{directory / path}: missing; {NAME} lists it")
        except OSError as error:
            faults.append(f"{directory / path}: {error.strerror}")
        else:
            if found != recorded:
                faults.append(f"{directory / path}: expected xxh3-128 {recorded}, found {found}")
        meter.advance(sizes[path])
    return faults


def _listed(path: Path) -> Iterator[tuple[str, str]]:
    text = read_regular(path, what="a list of hashes", most_bytes=_MOST_BYTES, follow_links=True)
    for number, line in enumerate(text.decode(errors="replace").splitlines(), start=1):
        match = _LINE.fullmatch(line)
        # In the directory itself, whatever somebody wrote there.
        name = PurePosixPath("/" if match is None else match[2])
        if match is None or name.is_absolute() or ".." in name.parts or "\0" in match[2]:
            raise UserError(f"{path}, line {number}: expected an xxh3-128, two spaces and a file of this directory")
        yield match[2], match[1]


def _size(path: Path) -> int:
    # Hashing it says what is wrong.
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _hash(path: Path) -> str:
    # Links are followed: model hubs keep files as links into their cache.
    with open_regular(path, what="a file of an export", follow_links=True) as file:
        return hash_opened(file).xxh3_128
