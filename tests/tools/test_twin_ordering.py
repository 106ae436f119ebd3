"""The happens-before check of the CUDA twin, on records written here: each rule, and what it must not excuse."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

A, B = 0x0, 0x14
X, Y = (0x1000, 64), (0x2000, 64)
EVENT = 0x77
Row = tuple[Any, ...]


@pytest.fixture
def races(tools_path: Path) -> Any:
    """`races` of rows written as (kind, stream, name, a, b, d)."""
    from cuda_twin.recorded.kinds import Kind
    from cuda_twin.recorded.ordering import races as found

    kinds = {"read": Kind.READ, "write": Kind.WRITE, "fresh": Kind.FRESH, "shared": Kind.SHARED}
    kinds |= {"record": Kind.EVENT, "wait": Kind.WAIT, "host": Kind.HOST_WAIT, "free": Kind.ALLOCATE}

    def of(*given: Row, without: Sequence[int] = ()) -> list[str]:
        names = {0: ""}
        made = np.zeros(len(given), [("kind", "u4"), ("stream", "u8"), *((key, "u8") for key in ("name", *"abcd"))])
        places: list[str] = []
        for number, (kind, stream, what, *numbers) in enumerate(given):
            row = made[number]
            row["kind"], row["stream"] = kinds[kind], stream
            row["a"], row["b"], row["d"] = (*numbers, 0, 0, 0)[:3]
            if kind in ("host", "free"):
                row["name"] = number + 1
                names[number + 1] = what
            row["c"] = len(places)
            places.append(what)
        return [str(race) for race in found(made, names, places, without=without)]

    return of


@pytest.fixture
def host(tools_path: Path) -> int:
    from cuda_twin.recorded.ordering import HOST

    return HOST


WRITTEN = ("write", A, "a kernel", *X)
READ = ("read", B, "a collective", *X)
RECORD, WAIT = ("record", A, "", EVENT), ("wait", B, "", EVENT)


def test_what_no_event_orders_is_a_race(races: Any) -> None:
    named = ["nothing orders a kernel on stream 0x0 before a collective on stream 0x14"]
    assert races(WRITTEN, RECORD, WAIT, READ) == []
    assert races(WRITTEN, READ) == named
    assert races(WRITTEN, RECORD, WAIT, READ, without=[2]) == named
    # Recorded too early, waited for too early, and an event of something else.
    assert races(RECORD, WRITTEN, WAIT, READ) == named
    assert races(WRITTEN, WAIT, RECORD, READ) == named
    assert races(WRITTEN, ("record", B, "", EVENT), WAIT, READ) == named


def test_reads_do_not_hinder_each_other_and_a_write_comes_behind_all_of_them(races: Any) -> None:
    reads = [("read", stream, f"reader {stream}", *X) for stream in (A, B, 0x18)]
    write = ("write", 0x20, "a kernel", *X)
    assert races(*reads) == []
    assert len(races(*reads, write)) == 3
    ordered = [("record", stream, "", stream + 1) for stream in (A, B, 0x18)]
    waits = [("wait", 0x20, "", stream + 1) for stream in (A, B, 0x18)]
    assert races(*reads, *ordered, *waits, write) == []
    assert len(races(*reads, *ordered, *waits[:2], write)) == 1


def test_orders_are_passed_on_from_stream_to_stream(races: Any) -> None:
    through = ("record", B, "", 0x78), ("wait", 0x18, "", 0x78)
    last = ("write", 0x18, "a copy", *X)
    assert races(WRITTEN, RECORD, WAIT, *through, last) == []
    assert len(races(WRITTEN, RECORD, *through, WAIT, last)) == 1


@pytest.mark.parametrize(
    ("wait", "orders"),
    [
        (("host", B, "cudaStreamSynchronize"), False),
        (("host", A, "cudaStreamSynchronize"), True),
        (("host", 0, "cudaEventSynchronize", EVENT), True),
        (("host", 0, "cudaEventSynchronize", 0x99), False),
        (("host", 0, "cudaDeviceSynchronize"), True),
        (("free", 0, "cudaFree"), True),
        (("free", 0, "cudaHostAlloc"), False),
    ],
)
def test_what_is_launched_comes_behind_what_the_host_has_waited_for(races: Any, wait: Row, orders: bool) -> None:
    assert bool(races(WRITTEN, RECORD, wait, READ)) != orders


def test_only_bytes_that_are_shared_count(races: Any) -> None:
    part = ("read", B, "a collective", X[0] + 63, 1)
    assert len(races(WRITTEN, part)) == 1
    assert races(WRITTEN, ("read", B, "a collective", X[0] + 64, 1)) == []
    assert races(WRITTEN, ("read", B, "a collective", X[0] - 8, 8)) == []
    # Of a range that was written in parts, each with its own history.
    halves = ("write", A, "early", X[0], 32), RECORD, ("write", A, "late", X[0] + 32, 32)
    assert races(*halves, WAIT, READ) == ["nothing orders late on stream 0x0 before a collective on stream 0x14"]


def test_memory_is_handed_out_again_in_the_order_of_its_stream(races: Any) -> None:
    """Used on another stream and let go: only ``record_stream`` keeps the allocator from it."""
    used = ("fresh", A, "first", *X, 0), RECORD, WAIT, READ
    again = ("fresh", A, "second", *X, 5)
    assert races(*used, again) == ["nothing orders a collective on stream 0x14 before second on stream 0x0"]
    assert races(*used, ("shared", B, "", *X), again) == []
    # It excuses the allocator alone, and holds until then.
    assert len(races(*used, ("shared", B, "", *X), ("write", A, "a kernel", *X))) == 1
    assert len(races(*used, ("shared", B, "", *X), again, RECORD, WAIT, READ, ("fresh", A, "third", *X, 9))) == 1


def test_fresh_memory_was_there_before_the_operation_that_was_given_it(races: Any) -> None:
    """It is noted behind what the operation did with it."""
    before = ("write", B, "a collective", *X), ("shared", B, "", *X)
    assert races(*before, ("write", A, "copy", *X), ("fresh", A, "to", *X, 2)) == []
    assert len(races(*before, ("write", A, "copy", *X), ("fresh", A, "to", *X, 3))) == 1


def test_pinned_memory_is_not_written_before_the_copy_from_it_is_awaited(races: Any, host: int) -> None:
    copied = ("write", host, "a batch", *X), ("read", A, "copy", *X)
    again = ("write", host, "the next batch", *X)
    assert races(*copied, again) == ["nothing orders copy on stream 0x0 before the next batch on the host"]
    assert races(*copied, ("host", A, "cudaStreamSynchronize"), again) == []
    # PyTorch's own allocator of pinned memory waits for copies before it hands their memory out again.
    assert races(*copied, ("fresh", host, "pin_memory", *X, 2)) == []
    read = ("read", host, "a checkpoint", *X)
    assert len(races(("write", A, "copy", *X), read)) == 1
    assert races(("write", A, "copy", *X), ("host", 0, "cudaDeviceSynchronize"), read) == []
    assert races(read, ("write", A, "copy", *X)) == []


def random_rows(seed: int) -> list[Row]:
    generator = np.random.default_rng(seed)
    rows: list[Row] = []
    for number in range(8):
        stream = int(generator.choice((A, B, 0x18)))
        kind = str(generator.choice(("read", "write", "record", "wait")))
        if kind in ("read", "write"):
            numbers = (0x1000 + 16 * int(generator.integers(0, 4)), 16 * int(generator.integers(1, 3)))
        else:
            numbers = (int(generator.integers(1, 4)), 0)
        rows.append((kind, stream, f"{kind} {number}", *numbers))
    return rows


def is_ordered(rows: list[Row]) -> bool:
    """By reachability in the graph of what comes before what, pair by pair."""
    before = np.zeros((len(rows), len(rows)), bool)
    last: dict[int, int] = {}
    recorded: dict[int, int] = {}
    for number, (kind, stream, _, at, _) in enumerate(rows):
        for earlier in (last.get(stream), recorded.get(at) if kind == "wait" else None):
            if earlier is not None:
                before[:, number] |= before[:, earlier]
                before[earlier, number] = True
        last[stream] = number
        if kind == "record":
            recorded[at] = number
    accesses = [(number, row) for number, row in enumerate(rows) if row[0] in ("read", "write")]
    return not any(
        "write" in (one[0], other[0])
        and max(one[3], other[3]) < min(one[3] + one[4], other[3] + other[4])
        and one[1] != other[1]
        and not before[first, second]
        for first, one in accesses
        for second, other in accesses
        if first < second
    )


def test_there_is_a_race_where_the_graph_of_all_orders_has_one(races: Any) -> None:
    """Random records, and an oracle that goes through all pairs."""
    expected = [is_ordered(random_rows(seed)) for seed in range(400)]
    assert 40 < sum(expected) < 360
    assert [races(*random_rows(seed)) == [] for seed in range(400)] == expected
