"""What ranks say of themselves, and how long they may be silent."""

import os
import time
from pathlib import Path

import pytest

from lightscale.training.health import heartbeat as module
from lightscale.training.health.heartbeat import (
    HEARTBEATS_VARIABLE,
    Heartbeat,
    create_heartbeats,
    read_heartbeats,
    shared_heartbeats,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in a list of one."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_heartbeats(tmp_path / "beats", 3)
    return tmp_path / "beats"


def heartbeat_of(path: Path, rank: int, hang_timeout_s: float = 2.0) -> Heartbeat:
    return Heartbeat(hang_timeout_s, {HEARTBEATS_VARIABLE: str(path), "RANK": str(rank)})


def test_nobody_has_to_watch() -> None:
    """Without the variable nothing is written, and where the rank is stays known to itself."""
    heartbeat = Heartbeat(1.0, {})
    heartbeat.beat("reading data", step=1)
    assert heartbeat.where == "step 1, reading data"


def test_what_ranks_said_last(path: Path, clock: list[float]) -> None:
    assert read_heartbeats(path) == {}
    first, last = heartbeat_of(path, 0), heartbeat_of(path, 2)
    first.beat("starting", step=0)
    for step in range(1, 4):
        clock[0] += 1
        last.beat("forward and backward", step=step)
    beats = read_heartbeats(path)
    assert sorted(beats) == [0, 2]
    assert (beats[0].time_s, beats[0].doing, beats[0].step) == (1000.0, "starting", 0)
    assert (beats[2].time_s, beats[2].where) == (1003.0, "step 3, forward and backward")
    assert beats[2].process_id == os.getpid()


def test_heartbeats_are_not_on_the_disk_of_the_run(tmp_path: Path) -> None:
    """A mapped file on a disk that becomes read-only kills whoever writes to it."""
    logs = tmp_path / "heartbeats"
    with shared_heartbeats(logs, 2) as path:
        assert path.stat().st_dev != tmp_path.stat().st_dev
        heartbeat_of(path, 1).beat("optimizer", step=7)
        assert read_heartbeats(logs) == read_heartbeats(path)
        assert read_heartbeats(path)[1].where == "step 7, optimizer"
    assert not logs.is_symlink()
    assert read_heartbeats(logs)[1].where == "step 7, optimizer"
    with shared_heartbeats(tmp_path / "again", 2):
        tmp_path.rename(tmp_path.with_name("gone"))


def test_of_two_places_one_is_always_whole(path: Path, clock: list[float]) -> None:
    heartbeat = heartbeat_of(path, 1)
    for step in (1, 2):
        clock[0] += 1
        heartbeat.beat("optimizer", step=step)
    data = path.read_bytes()
    start, end = (data.index(b"optimizer"), data.rindex(b"optimizer"))
    for offset, step in ((end, 1), (start, 2)):
        path.write_bytes(data[:offset] + b"o" + data[offset + 1 :])
        assert read_heartbeats(path)[1].step == 2
        path.write_bytes(data[:offset] + b"x" + data[offset + 1 :])
        assert read_heartbeats(path)[1].step == step, "half of it is of another time"


def test_slow_steps_may_take_longer_than_the_timeout(path: Path, clock: list[float]) -> None:
    heartbeat = heartbeat_of(path, 0)

    def allowed_s() -> float:
        return read_heartbeats(path)[0].allowed_s

    def take_step(step: int, duration_s: float) -> None:
        for doing in ("reading data", "forward and backward", "optimizer", "agreeing"):
            heartbeat.beat(doing, step=step)
            clock[0] += duration_s / 4

    heartbeat.beat("starting", step=0)
    assert allowed_s() == 120.0
    take_step(1, 60.0)
    assert allowed_s() == 120.0, "the first step compiles its kernels"
    take_step(2, 0.1)
    take_step(3, 0.1)
    assert allowed_s() == 2.0, "the timeout itself; the first step does not count"
    take_step(4, 4.0)
    take_step(5, 0.1)
    assert allowed_s() == pytest.approx(20.0)
    for step in range(6, 110):
        take_step(step, 0.2)
    assert allowed_s() == 2.0, "it is forgotten"
    # As the training loop does, before the first beat of that step.
    heartbeat.expect_other_steps()
    take_step(111, 3.0)
    assert allowed_s() == 120.0
    take_step(112, 0.1)
    take_step(113, 0.1)
    assert allowed_s() == 2.0


def test_saves_and_validations_have_times_of_their_own(path: Path, clock: list[float]) -> None:
    heartbeat = heartbeat_of(path, 0)
    allowed: list[float] = []
    for step in range(1, 4):
        for doing, duration_s in (("optimizer", 0.1), ("saving", 30.0 if step == 1 else 1.0), ("validation", 1.0)):
            heartbeat.beat(doing, step=step)
            allowed.append(read_heartbeats(path)[0].allowed_s)
            clock[0] += duration_s
    assert allowed == pytest.approx([120.0, 20.0, 20.0, 120.0, 150.0, 20.0, 2.0, 150.0, 20.0])


def test_the_file_is_small(path: Path) -> None:
    assert path.stat().st_size == 3 * 2 * 64
    assert module._SLOT_BYTES == 64
