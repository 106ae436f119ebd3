"""What is left of checkpoints when the power fails: only what was synced by then, at whatever moment."""

import os
import re
import runpy
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from lightscale.errors import UserError
from lightscale.training.checkpoints import saving
from lightscale.training.checkpoints.directories import Retention, list_steps
from lightscale.training.checkpoints.manifest import NAME, verify_files
from lightscale.training.checkpoints.reader import manifest_of
from lightscale.training.checkpoints.saving import Saver

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tiny_engine.py")))

RunRanks = Callable[..., list[Any]]
SAVES = 4


class Disk:
    """What of ``checkpoints`` would be there after a power failure, in the worst of cases.

    A file has the content of its last sync, a directory the entries of its last sync that have not been removed since.
    A rename in ``checkpoints`` itself has reached the disk at once, or only with the sync of the directory: both may
    be, and both are tried, after every call that changes something.
    """

    def __init__(self, checkpoints: Path, after: Path) -> None:
        self.checkpoints, self.after = checkpoints, after
        self.files: dict[int, bytes] = {}
        self.entries: dict[int, dict[str, int]] = {}
        self.failures: list[str] = []
        self.unlink = os.unlink
        self.verified = 0
        """Checkpoints that were found whole after failures."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Every change of names and every sync counts, and the power may fail after each."""
        fsync, rename, unlink = os.fsync, os.rename, self.unlink

        def watched_fsync(descriptor: int) -> None:
            fsync(descriptor)
            self.remember(descriptor)
            self.fail()

        def watched_rename(*args: Any, **options: Any) -> None:
            rename(*args, **options)
            self.fail()

        def watched_unlink(*args: Any, **options: Any) -> None:
            unlink(*args, **options)
            self.fail()

        with ExitStack() as stack:
            for name, watched in (("fsync", watched_fsync), ("rename", watched_rename), ("unlink", watched_unlink)):
                stack.enter_context(mock.patch.object(os, name, watched))
            yield

    def remember(self, descriptor: int) -> None:
        info, path = os.fstat(descriptor), Path(f"/proc/self/fd/{descriptor}").resolve()
        if stat.S_ISDIR(info.st_mode):
            self.entries[info.st_ino] = inodes(path)
        else:
            self.files[info.st_ino] = path.read_bytes()

    def fail(self) -> None:
        now = inodes(self.checkpoints)
        synced = self.entries.get(self.checkpoints.stat().st_ino, {}) if now else {}
        for names in (now, synced):
            for name, inode in names.items():
                if re.fullmatch(r"step-\d{8}", name):
                    self.check(name, inode, {inode: self.checkpoints / there for there, inode in now.items()})

    def check(self, name: str, inode: int, places: dict[int, Path]) -> None:
        """That the checkpoint, rebuilt of what was synced, is whole."""
        there = set(inodes(places[inode]).values()) if inode in places else set()
        rebuilt = self.after / name
        rebuilt.mkdir(parents=True)
        for file, of_file in self.entries.get(inode, {}).items():
            if of_file in there:
                (rebuilt / file).write_bytes(self.files.get(of_file, b""))
        try:
            manifest = manifest_of(rebuilt, int(name.removeprefix("step-")))
            verify_files(rebuilt, manifest, manifest.files)
            self.verified += 1
        except UserError as error:
            self.failures.append(str(error))
        for file in rebuilt.iterdir():
            self.unlink(file)
        rebuilt.rmdir()


def inodes(directory: Path) -> dict[str, int]:
    return {entry.name: entry.inode() for entry in os.scandir(directory)} if directory.is_dir() else {}


def save_and_fail(rank: int, world_size: int, init_method: str, folder: str) -> dict[str, tuple[list[str], int, bool]]:
    """Failures, whole checkpoints, and whether the last state of the disk has the name of ``checkpoints``, by case."""
    found = {}
    nothing = lambda path: None  # noqa: E731
    with tiny.engine_on(
        (1, 1, 1, 1), rank, init_method, num_layers=1, hidden_size=16, num_heads=2, intermediate_size=16
    ) as engine:
        for case, unsynced in (("as it is", None), ("names not synced", nothing)):
            run = Path(folder) / case
            run.mkdir()
            disk = Disk(run / "checkpoints", run / "after")
            with disk.watched(), mock.patch.object(saving, "sync", unsynced or saving.sync):
                saver = Saver(disk.checkpoints, engine.mesh)
                for step in range(1, SAVES + 1):
                    tiny.train(engine, step, step + 1)
                    saver.save(engine, step=step, common={}, facts={}, retention=Retention(keep=2))
            assert list_steps(disk.checkpoints) == [SAVES - 1, SAVES]
            durable = disk.entries.get(run.stat().st_ino, {}).get("checkpoints") == disk.checkpoints.stat().st_ino
            found[case] = (disk.failures, disk.verified, durable)
            shutil.rmtree(run)
    return found


def test_whatever_has_a_name_is_whole_after_a_power_failure(run_ranks: RunRanks, tmp_path: Path) -> None:
    (found,) = run_ranks(save_and_fail, 1, str(tmp_path))
    failures, verified, durable = found["as it is"]
    assert failures == []
    assert verified > 10 * SAVES
    assert durable, "the directory of the checkpoints has its name for good"
    # The test sees what it is for.
    failures, _, durable = found["names not synced"]
    assert any(NAME in failure for failure in failures)
    assert not durable
