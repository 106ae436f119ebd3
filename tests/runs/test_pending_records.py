"""Records, and writes of a launcher, while the disk does not take them."""

import errno
import os
from typing import Any

import pytest

from lightscale.runs import full_disk
from lightscale.runs.full_disk import MayNotWrite, PendingRecords, when_possible

PASSING = [OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EPERM)]


@pytest.mark.parametrize("error", [*PASSING, MayNotWrite("events.jsonl: user 7 may not write to it")])
def test_records_wait_in_order_and_are_written_once(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    written: list[int] = []
    faults = [None, error, error, error, None]

    def write(record: dict[str, Any]) -> None:
        if (fault := faults.pop(0) if faults else None) is not None:
            raise fault
        written.append(record["number"])

    pending = PendingRecords(write)
    for number in range(3):
        pending.add({"number": number})
    assert written == [0]
    assert capsys.readouterr().err == f"{error}; training continues, records are kept in memory\n"
    pending.add({"number": 3})
    assert written == [0]
    pending.add({"number": 4})
    assert written == [0, 1, 2, 3, 4]


def test_a_broken_disk_is_not_waited_for() -> None:
    def write(record: Any = None) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        PendingRecords(write).add({})
    with pytest.raises(OSError, match="Input/output"):
        when_possible(write)


def test_a_launcher_waits_for_its_disk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(full_disk, "_PAUSE_S", 0.01)
    faults = [*PASSING]

    def write() -> str:
        if faults:
            raise faults.pop()
        return "written"

    assert when_possible(write) == "written"
    assert capsys.readouterr().err.count("waiting until the disk accepts writes") == 1
    for give_up, patience_s in ((lambda: True, 900.0), (lambda: False, 0.05)):
        monkeypatch.setattr(full_disk, "_PATIENCE_S", patience_s)
        faults = [PASSING[0]] * 1000
        with pytest.raises(OSError, match="No space"):
            when_possible(write, give_up=give_up)
