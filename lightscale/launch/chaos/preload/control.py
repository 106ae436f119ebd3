"""The numbers by which surroundings go wrong, in a file that launcher and ranks map through `disturb.c`."""

import contextlib
import mmap
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

# In the order of `disturb.c`.
FIELDS = ("clock_offset_s", "send_pause_s", "send_stall", "read_stall", "write_pause_s", "read_only", "lying")
NUM_RANKS = 64
OTHERS = NUM_RANKS
"""The row of processes that are no ranks."""
_BYTES = (NUM_RANKS + 1) * len(FIELDS) * 8
_SOURCE = Path(__file__).with_name("disturb.c")


class Control:
    """The library and its numbers, for runs whose store is at `store`. Files are in `directory`."""

    def __init__(self, directory: Path, store: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.library = (directory / "disturb.so").absolute()
        self.path = (directory / "control").absolute()
        self.journal = self.path.with_name(f"{self.path.name}.journal")
        """What was written since the disk lies; see `power.py`."""
        self._store = store.absolute()
        command = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(self.library), str(_SOURCE), "-ldl"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        self.path.write_bytes(bytes(_BYTES))

    def environment(self, run: Path) -> dict[str, str]:
        """Variables of a command that trains in `run`."""
        return {
            "LD_PRELOAD": str(self.library),
            "LIGHTSCALE_CHAOS_CONTROL": str(self.path),
            "LIGHTSCALE_CHAOS_RUN": str(run.absolute()),
            "LIGHTSCALE_CHAOS_STORE": str(self._store),
        }

    def set(self, field: str, value: float, rows: Iterable[int] | None = None) -> None:
        """Set `field`, one of `FIELDS`, for ranks or `OTHERS`; None: for all processes."""
        with self._mapped() as mapped:
            for row in range(NUM_RANKS + 1) if rows is None else rows:
                # Aligned and of 8 bytes: no process reads half of it.
                struct.pack_into("<d", mapped, (row * len(FIELDS) + FIELDS.index(field)) * 8, value)

    def clear(self) -> None:
        """Nothing goes wrong any more."""
        with self._mapped() as mapped:
            mapped[:] = bytes(_BYTES)
        self.forget()

    def forget(self) -> None:
        """Drop the journal, and what it kept."""
        self.journal.unlink(missing_ok=True)
        for kept in self.path.parent.glob(f"{self.path.name}.kept-*"):
            kept.unlink()

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[mmap.mmap]:
        with self.path.open("r+b") as file, mmap.mmap(file.fileno(), _BYTES) as mapped:
            yield mapped


def problem() -> str | None:
    """Why the library cannot be built here; None: it can."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    return None if shutil.which("gcc") else "needs gcc"


def without(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for programs in which nothing goes wrong."""
    return {name: value for name, value in environment.items() if name != "LD_PRELOAD"}
