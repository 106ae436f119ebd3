"""Folders after power failures, of programs whose faults are known."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

# A file under another name, then a record beside it, each synced; what else is synced differs.
PROGRAM = """
import os, sys
folder, synced = sys.argv[1], sys.argv[2].split(",")

def sync(path, kind):
    if kind in synced:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

os.mkdir(f"{folder}/data")
with open(f"{folder}/data/part.tmp", "w") as file:
    file.write("right")
sync(f"{folder}/data/part.tmp", "content")
os.rename(f"{folder}/data/part.tmp", f"{folder}/data/part")
sync(f"{folder}/data", "names")
sync(folder, "folder")
with open(f"{folder}/record", "w") as file:
    file.write("done")
sync(f"{folder}/record", "content")
sync(folder, "folder")
"""


@pytest.fixture
def damage(tools_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(tools_path / "damage")
    return importlib.import_module("disk_states")


def left(damage: ModuleType, folder: Path, synced: str) -> set[str]:
    """Contents of the part, in the states that have the whole record."""
    system_calls = importlib.import_module("system_calls")
    folder.mkdir()
    command = [sys.executable, "-c", PROGRAM, str(folder), synced]
    recording = system_calls.record(command, folder, cwd=folder.parent)
    found = set()
    for state in damage.states(recording):
        files = state.tree.files()
        if files.get("record") == b"done":
            found.add(str(files.get("data/part")))
    return found


def test_what_a_record_can_be_without(damage: ModuleType, tmp_path: Path, needs: Callable[..., None]) -> None:
    needs("strace", "processes that may be traced")
    right = str(b"right")
    assert left(damage, tmp_path / "all", "content,names,folder") == {right}
    # The rename, the directory, and the content may be lost; the content may be zeros, too.
    assert left(damage, tmp_path / "names", "content,folder") == {right, "None"}
    assert left(damage, tmp_path / "folder", "content,names") == {right, "None"}
    assert left(damage, tmp_path / "content", "names,folder") >= {right, str(b""), str(bytes(5))}


def test_a_write_that_is_not_followed_is_an_error(
    damage: ModuleType, tmp_path: Path, needs: Callable[..., None]
) -> None:
    needs("strace", "processes that may be traced")
    system_calls = importlib.import_module("system_calls")
    (tmp_path / "folder").mkdir()
    mapped = """
import mmap
with open("folder/a", "wb+") as file:
    file.truncate(9)
    mmap.mmap(file.fileno(), 9)[:4] = b"text"
"""
    with pytest.raises(system_calls.NotFollowed, match="written through memory"):
        system_calls.record([sys.executable, "-c", mapped], tmp_path / "folder", cwd=tmp_path)
