"""Tasks for ``tests/data_pipeline/test_executors.py``, in a module that workers can import."""

import os
import signal
import time
from pathlib import Path

from lightscale.data_pipeline.executors import Advance
from lightscale.errors import UserError


def make_context(path: Path) -> Path:
    return path


def write(folder: Path, item: int, advance: Advance) -> None:
    advance(10)
    with (folder / f"{item}.pid").open("a") as file:
        file.write(f"{os.getpid()}\n")


def write_slowly(folder: Path, item: int, advance: Advance) -> None:
    write(folder, item, advance)
    time.sleep(0.05)


def die_once(folder: Path, item: int, advance: Advance) -> None:
    """Of a worker that is killed at its first attempt."""
    if item % 10 == 3 and not (folder / f"{item}.died").exists():
        (folder / f"{item}.died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    write(folder, item, advance)


def die_always(folder: Path, item: int, advance: Advance) -> None:
    with (folder / "deaths").open("a") as file:
        file.write("died\n")
    os._exit(1)


def fail(folder: Path, item: int, advance: Advance) -> None:
    if item == 3:
        raise LookupError("nothing there") from KeyError("inner")
    write_slowly(folder, item, advance)


def refuse(folder: Path, item: int, advance: Advance) -> None:
    if item == 3:
        raise UserError(f"item {item}: refused")
    write_slowly(folder, item, advance)
