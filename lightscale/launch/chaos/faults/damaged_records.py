"""Damage to lines of a run's records between two attempts, as by a disk, an editor or another program."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lightscale.launch.chaos.faults.drawing import shuffled_cycle
from lightscale.launch.chaos.harness.trial import Bound, Runner
from lightscale.launch.chaos.harness.verify import Lines
from lightscale.records import parse_line
from lightscale.runs.run_directory import DAMAGE_EVENT

RECORDS = ("metrics.jsonl", "events.jsonl", "jobs.jsonl", "status.json")
WAYS = ("zeros", "cut line", "blank line", "a list", "foreign bytes")
# Where there is nothing yet to damage. No job: it cannot be read after any of the damages.
_STAND_IN = b'{"job": 12, "scheduler": "local", "time": "2026-01-01T00:00:00.000+00:00"}'


@dataclass(frozen=True, kw_only=True)
class DamagedRecord:
    """Kills everything and damages a record of the run before the next start, which must report it."""

    record: str
    """One of `RECORDS`."""
    way: str
    """One of `WAYS`."""
    seed: int
    bound: ClassVar[Bound] = Bound(saves=2, seconds=120)

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"damaged {self.record}"

    def inject(self, run: Runner) -> None:
        """Damage it; no repair is needed."""
        run.bring_down(lambda: True)
        path = run.training.run.path / self.record
        with ExitStack() as stack:
            # What it destroys was right, and will be compared.
            if self.record in run.training.histories:
                stack.enter_context(run.training.histories[self.record].damaged())
            data = path.read_bytes() if path.exists() else b""
            path.write_bytes(damaged(data, self.record, self.way, random.Random(self.seed)))
        run.training.steps.go_to_end()
        run.settle()
        run.happened(self, lambda since: _missed(since, self.record))


def damaged(data: bytes, name: str, way: str, generator: random.Random) -> bytes:
    """`data` of the record `name` with one of `WAYS` of damage: one more unreadable line."""
    if not name.endswith(".jsonl"):
        return _damaged_line(data.strip() or _STAND_IN, way, generator) + b"\n"
    # The last line may be cut already, which is no damage.
    *lines, tail = data.split(b"\n")
    whole = [number for number, line in enumerate(lines) if _is_whole(line, name)]
    if way in ("blank line", "a list") or not whole:
        lines.insert(generator.randint(0, len(lines)), _damaged_line(_STAND_IN, way, generator))
    else:
        number = generator.choice(whole)
        lines[number] = _damaged_line(lines[number], way, generator)
    return b"\n".join([*lines, tail])


def _damaged_line(line: bytes, way: str, generator: random.Random) -> bytes:
    if way == "zeros":
        return bytes(len(line))
    if way == "cut line":
        return line[: generator.randrange(1, len(line))]
    if way == "blank line":
        return b""
    if way == "a list":
        return b"[1]"
    assert way == "foreign bytes", way
    start = generator.randrange(len(line))
    foreign = bytes(generator.choice(b"\x80\xfe\xff\x00{") for _ in range(8))
    # 0xff is in no text.
    return line[:start] + b"\xff" + foreign + line[start + 9 :]


def _is_whole(line: bytes, name: str) -> bool:
    try:
        parse_line(line, name)
    except ValueError:
        return False
    return True


def _missed(since: Lines, record: str) -> str | None:
    for event in since:
        if event["event"] == DAMAGE_EVENT and record in {**event["damage"], **event.get("set_aside", {})}:
            return None
    return f"no event reports the damage to {Path(record).name}"


def draw_damaged_records(generator: random.Random, number: int, processes: int) -> Iterator[DamagedRecord]:
    """Draw every way with every record in turn."""
    cases = [(record, way) for record in RECORDS for way in WAYS]
    for case in shuffled_cycle(generator, range(len(cases)), number):
        record, way = cases[case]
        yield DamagedRecord(record=record, way=way, seed=generator.randrange(1 << 30))
