"""The library through which surroundings go wrong, in a process of its own, and what a power cut takes."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightscale.launch.chaos.preload import power
from lightscale.launch.chaos.preload.control import FIELDS, NUM_RANKS, OTHERS, Control

PRELUDE = """
import errno, json, os, socket, sys, time
from pathlib import Path
run, store, other = (Path(word) for word in sys.argv[1:])

def refused(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno]

def timed(action):
    began = time.monotonic()
    action()
    return time.monotonic() - began

def write(path, text, sync=False):
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        if sync:
            os.fsync(file.fileno())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("library")


@pytest.fixture
def control(library: Path, tmp_path: Path, needs: Callable[..., None]) -> Control:
    needs("gcc")
    for name in ("run", "store", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "store" / "shard").write_bytes(b"tokens")
    return Control(tmp_path / "preload", tmp_path / "store")


@pytest.fixture
def inside(control: Control, tmp_path: Path) -> Callable[..., dict[str, object]]:
    def inside(code: str, rank: int | None = 0) -> dict[str, object]:
        """The value of `found` after `code`, in a process with the library."""
        environment = {"PATH": "/usr/bin:/bin", **control.environment(tmp_path / "run")}
        if rank is not None:
            environment["RANK"] = str(rank)
        words = [sys.executable, "-c", f"{PRELUDE}{code}\nprint(json.dumps(found))"]
        words += [str(tmp_path / name) for name in ("run", "store", "other")]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100, check=True)
        found: dict[str, object] = json.loads(done.stdout)
        return found

    return inside


def test_nothing_goes_wrong_by_itself(inside: Callable[..., dict[str, object]], tmp_path: Path) -> None:
    found = inside(
        "write(run / 'a', 'text', sync=True)\n(run / 'a').rename(run / 'b')\n(run / 'd').mkdir()\n"
        "found = {'text': (run / 'b').read_text(), 'store': (store / 'shard').read_text(), 'now': time.time()}"
    )
    assert (found["text"], found["store"]) == ("text", "tokens")
    assert not (tmp_path / "preload" / "control.journal").exists()


CLOCK = "found = {'now': time.time(), 'monotonic': time.monotonic()}"


def test_the_clock_of_one_rank_jumps(control: Control, inside: Callable[..., dict[str, object]]) -> None:
    control.set("clock_offset_s", -86_400.0, [1])
    here, there, launcher = inside(CLOCK, 0), inside(CLOCK, 1), inside(CLOCK, None)
    assert abs(float(str(there["now"])) - float(str(here["now"])) + 86_400) < 1000
    assert abs(float(str(launcher["now"])) - float(str(here["now"]))) < 1000
    assert abs(float(str(there["monotonic"])) - float(str(here["monotonic"]))) < 1000
    control.set("clock_offset_s", 86_400.0, [OTHERS])
    assert abs(float(str(inside(CLOCK, None)["now"])) - float(str(here["now"])) - 86_400) < 1000


READ_ONLY = f"""
import struct
kept = open(run / 'kept', 'w')
with open(os.environ['LIGHTSCALE_CHAOS_CONTROL'], 'r+b') as control:
    control.seek({8 * FIELDS.index("read_only")})
    control.write(struct.pack('d', 1.0))
def more():
    kept.write('more')
    kept.flush()
found = {{'open': refused(lambda: write(run / 'a', '')), 'mkdir': refused(lambda: (run / 'd').mkdir()),
         'rename': refused(lambda: os.replace(run / 'old', run / 'new')), 'unlink': refused((run / 'old').unlink),
         'write': refused(more), 'fsync': refused(lambda: os.fsync(kept.fileno())),
         'elsewhere': refused(lambda: write(other / 'a', '')), 'read': (run / 'old').read_text()}}
os._exit(print(json.dumps(found), flush=True) or 0)
"""


def test_a_read_only_file_system(control: Control, inside: Callable[..., dict[str, object]], tmp_path: Path) -> None:
    (tmp_path / "run" / "old").write_text("old", encoding="utf-8")
    found = inside(READ_ONLY)
    refused = dict.fromkeys(("open", "mkdir", "rename", "unlink", "write", "fsync"), "EROFS")
    assert found == {**refused, "elsewhere": None, "read": "old"}
    control.clear()
    assert inside("write(run / 'a', 'text')\nfound = {'text': (run / 'a').read_text()}") == {"text": "text"}


def test_a_slow_disk_and_a_slow_network(control: Control, inside: Callable[..., dict[str, object]]) -> None:
    code = """
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
reader, writer = os.pipe()
found = {'disk': timed(lambda: write(run / 'a', 'text', sync=True)), 'elsewhere': timed(lambda: write(other / 'a', '')),
         'network': timed(lambda: client.sendall(b'x')), 'pipe': timed(lambda: os.write(writer, b'x'))}
"""
    control.set("write_pause_s", 0.4)
    control.set("send_pause_s", 0.6)
    found = {name: float(str(value)) for name, value in inside(code).items()}
    # A write and an fsync.
    assert found["disk"] >= 0.8 and found["network"] >= 0.6
    assert found["elsewhere"] < 0.4 and found["pipe"] < 0.4


def test_what_is_stuck_goes_on(control: Control, inside: Callable[..., dict[str, object]], tmp_path: Path) -> None:
    code = """
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
file = os.open(store / 'shard', os.O_RDONLY)
(run / 'reads').touch()
found = {'read': timed(lambda: os.pread(file, 6, 0))}
(run / 'sends').touch()
found |= {'send': timed(lambda: client.sendall(b'x')), 'bytes': os.pread(file, 6, 0).decode()}
"""
    control.set("read_stall", 1.0)
    control.set("send_stall", 1.0, [0])

    def release() -> None:
        """Each half a second after the process has come there."""
        deadline = time.monotonic() + 100
        for name, end in (("reads", lambda: control.set("read_stall", 0.0)), ("sends", control.clear)):
            while not (tmp_path / "run" / name).exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.5)
            end()

    with ThreadPoolExecutor(1) as pool:
        released = pool.submit(release)
        found = inside(code)
        released.result()
    assert found["bytes"] == "tokens"
    assert float(str(found["read"])) + float(str(found["send"])) > 0.5
    # Other ranks were never held.
    control.set("send_stall", 1.0, [1])
    assert float(str(inside(code)["send"])) < 1.0


LIES = """
write(run / 'synced', 'synced', sync=True)
write(run / 'never', 'never')
with open(run / 'records', 'a') as file:
    file.write('first\\n'); file.flush(); os.fsync(file.fileno())
    file.write('second\\n'); file.flush()
write(run / 'draft', 'new', sync=True)
os.replace(run / 'draft', run / 'target')
(run / 'removed').unlink()
(run / 'whole').mkdir()
write(run / 'whole' / 'file', 'text', sync=True)
folder = os.open(run / 'whole', os.O_RDONLY); os.fsync(folder)
found = {}
"""


class Worst(random.Random):
    """Loses all that may be lost."""

    def random(self) -> float:
        return 0.0

    def choice(self, values):  # type: ignore[no-untyped-def]
        return values[0]

    def randint(self, a: int, b: int) -> int:
        return a


class Best(Worst):
    """Loses nothing."""

    def random(self) -> float:
        return 1.0

    def randint(self, a: int, b: int) -> int:
        return b


@pytest.fixture
def lied_to(control: Control, inside: Callable[..., dict[str, object]], tmp_path: Path) -> Path:
    for name in ("target", "removed"):
        (tmp_path / "run" / name).write_text(f"old {name}", encoding="utf-8")
    control.set("lying", 1.0)
    inside(LIES)
    return tmp_path / "run"


def texts(run: Path) -> dict[str, str]:
    return {str(path.relative_to(run)): path.read_text() for path in sorted(run.rglob("*")) if path.is_file()}


def test_a_power_cut_takes_what_was_not_synced(control: Control, lied_to: Path) -> None:
    loss = power.cut(control.journal, lied_to, Worst())
    # Names of files in `run` were never synced; what is in `whole` was, with its name.
    assert texts(lied_to) == {"removed": "old removed", "target": "old target", "whole/file": "text"}
    assert {"never", "records"} <= {*loss.files}
    control.forget()
    assert not list(control.path.parent.glob("*.kept-*"))


def test_a_power_cut_may_take_nothing(control: Control, lied_to: Path) -> None:
    before = texts(lied_to)
    assert power.cut(control.journal, lied_to, Best()) == power.Loss()
    assert texts(lied_to) == before
    assert before["records"] == "first\nsecond\n" and before["target"] == "new" and "removed" not in before


def test_what_was_synced_is_never_lost(control: Control, lied_to: Path) -> None:
    folder = control.journal.read_text(encoding="utf-8") + f"S {lied_to.stat().st_ino}\n"
    control.journal.write_text(folder, encoding="utf-8")
    for seed in range(20):
        power.cut(control.journal, lied_to, random.Random(seed))
        found = texts(lied_to)
        assert (found["synced"], found["target"], found["whole/file"]) == ("synced", "new", "text")
        assert found["records"].startswith("first\n") and "removed" not in found


def test_rows_of_the_file(control: Control) -> None:
    control.set("lying", 2.0, [3])
    numbers = memoryview(control.path.read_bytes()).cast("d")
    assert len(numbers) == (NUM_RANKS + 1) * len(FIELDS)
    assert [index for index, number in enumerate(numbers) if number] == [3 * len(FIELDS) + FIELDS.index("lying")]
