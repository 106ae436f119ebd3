"""Goodput of made-up runs, whose figures are worked out by hand: a step takes 2 s."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from lightscale.errors import UserError
from lightscale.runs.goodput import Goodput, duration, measure_goodput, run_goodput
from lightscale.runs.run_directory import RunDirectory

FIRST = datetime.datetime(2026, 11, 22, 8, tzinfo=datetime.UTC)
Record = dict[str, Any]


def at(time_s: float) -> str:
    return (FIRST + datetime.timedelta(seconds=time_s)).isoformat(timespec="milliseconds")


def event(time_s: float, attempt: int, kind: str, **fields: Any) -> Record:
    return {"time": at(time_s), "attempt": attempt, "event": kind, **fields}


def steps(time_s: float, attempt: int, numbers: range, **fields: Any) -> list[Record]:
    """Lines of steps of 2 s, one after the other; the first one begins at `time_s`."""
    return [
        {"step": number, "attempt": attempt, "time": at(time_s + 2 * index), "step_s": 2.0, **fields}
        for index, number in enumerate(numbers, start=1)
    ]


def measure(events: list[Record], lines: list[Record]) -> Goodput:
    found = measure_goodput(events, lines)
    assert found is not None
    parts = found.effective_s + found.lost_s + found.skipped_s + found.checkpoint_stall_s + found.restart_s
    parts += found.evaluation_s
    assert parts + found.other_s + found.waiting_s == pytest.approx(found.wall_s)
    return found


# Attempt 1 makes steps 1 to 5 until second 12, and saves after step 3; attempt 2 makes steps 4 and 5 in 2 x 2 s.
BEFORE = [event(0, 1, "start"), event(8.5, 1, "checkpoint", step=3, stall_s=0.5)]
LINES = [*steps(2, 1, range(1, 4)), *steps(8.5, 1, range(4, 6))]


def after(began: float) -> tuple[list[Record], list[Record]]:
    """The second attempt, started at `began`: 5 s later its first step begins."""
    events = [event(began, 2, "start"), event(began + 1, 2, "resume", step=3), event(began + 9, 2, "finished")]
    return events, steps(began + 5, 2, range(4, 6))


def test_a_run_in_one_go() -> None:
    found = measure([*BEFORE, event(13, 1, "finished")], LINES)
    assert (found.wall_s, found.waiting_s, found.restarts, found.mean_restart_s) == (13, 0, 0, None)
    assert (found.steps, found.lost_steps, found.effective_s, found.lost_s) == (5, 0, 10, 0)
    assert (found.saves, found.checkpoint_stall_s) == (1, 0.5)
    assert found.checkpoint_stall_share == pytest.approx(0.5 / 13)
    assert found.effective_time_ratio == pytest.approx(10 / 13)
    assert found.other_s == pytest.approx(2.5)


def test_ranks_that_the_launcher_starts_again() -> None:
    """From the last sign of work at 12.5 s, through detection and start, to the first step at 30 s."""
    events, lines = after(25)
    found = measure([*BEFORE, event(20, 1, "failed"), event(21, 1, "restart"), *events], [*LINES, *lines])
    assert (found.wall_s, found.waiting_s, found.restarts) == (34, 0, 1)
    assert found.restart_times_s == (30 - 12.5,)
    assert (found.steps, found.lost_steps, found.effective_s, found.lost_s) == (5, 2, 10, 4)
    assert found.effective_time_ratio == pytest.approx(10 / 34)


def test_time_in_a_queue_is_no_restart() -> None:
    """The launcher gave up at 20 s; the job came back at 1025 s. Detection and start are the restart."""
    events, lines = after(1025)
    found = measure([*BEFORE, event(20, 1, "failed"), *events], [*LINES, *lines])
    assert (found.wall_s, found.waiting_s, found.running_s) == (1034, 1005, 29)
    assert found.restart_times_s == (7.5 + 5,)
    assert found.effective_time_ratio == pytest.approx(10 / 29)


def test_a_job_that_is_killed_leaves_no_event() -> None:
    events, lines = after(1025)
    found = measure([*BEFORE, *events], [*LINES, *lines])
    assert (found.waiting_s, found.restart_times_s) == (1025 - 12.5, (5,))
    assert (found.lost_steps, found.restarts) == (2, 1)


def test_evaluation_is_no_part_of_a_restart() -> None:
    """1.5 s before the stop; when the run is resumed, the 2 s that were left of it before its first step at 30 s."""
    events, lines = after(25)
    before = event(14, 1, "evaluation", step=5, seconds=1.5)
    events.insert(2, event(29, 2, "evaluation", step=3, seconds=2.0))
    found = measure([*BEFORE, before, event(20, 1, "failed"), event(21, 1, "restart"), *events], [*LINES, *lines])
    assert found.evaluation_s == 3.5
    assert found.restart_times_s == (30 - 14 - 2,)


def test_a_stop_with_a_save_loses_nothing() -> None:
    events = [*BEFORE, event(14.5, 1, "checkpoint", step=5, stall_s=2), event(14.5, 1, "resumable")]
    events += [event(100, 2, "start"), event(101, 2, "resume", step=5), event(107, 2, "finished")]
    found = measure(events, [*LINES, *steps(103, 2, range(6, 8))])
    assert (found.waiting_s, found.restart_times_s) == (85.5, (3,))
    assert (found.steps, found.lost_steps, found.checkpoint_stall_s, found.saves) == (7, 0, 2.5, 2)


def test_a_restart_goes_on_until_a_first_step() -> None:
    """The second and third attempt fail before they made one; the third is of another job, 100 s later."""
    events = [*BEFORE, event(20, 1, "failed"), event(20, 1, "restart")]
    events += [event(22, 2, "start"), event(23, 2, "failed")]
    events += [event(123, 3, "start"), event(125, 3, "failed"), event(125, 3, "restart")]
    events += [event(126, 4, "start"), event(127, 4, "resume", step=3), event(136, 4, "finished")]
    found = measure(events, [*LINES, *steps(130, 4, range(4, 6))])
    assert (found.restarts, found.waiting_s) == (3, 100)
    assert found.restart_times_s == (130 - 12.5 - 100,)


def test_steps_lost_and_not_made_again_yet() -> None:
    events = [*BEFORE, event(20, 1, "failed"), event(25, 2, "start"), event(26, 2, "resume", step=1)]
    found = measure(events, LINES)
    assert (found.steps, found.lost_steps, found.restart_times_s) == (1, 4, ())
    found = measure(events, [*LINES, *steps(30, 2, range(2, 3))])
    assert (found.steps, found.lost_steps) == (2, 4)


def test_without_a_good_checkpoint_all_is_lost() -> None:
    found = measure([*BEFORE, event(25, 2, "start")], [*LINES, *steps(30, 2, range(1, 3))])
    assert (found.steps, found.lost_steps) == (2, 5)


@pytest.mark.parametrize("resumed", [3, 4, 5, 6])
def test_a_line_stands_for_the_steps_before_it(resumed: int) -> None:
    """Lines of every third step; the checkpoint lies on one of them or between two."""
    lines = [step for step in steps(0, 1, range(1, 10)) if step["step"] % 3 == 0]
    events = [event(0, 1, "start"), event(20, 2, "start"), event(21, 2, "resume", step=resumed)]
    found = measure(events, lines)
    assert (found.steps, found.lost_steps, found.lost_s) == (resumed, 9 - resumed, 2 * (9 - resumed))
    (line,) = steps(30, 2, range(9, 10))
    found = measure(events, [*lines, line])
    assert (found.steps, found.effective_s) == (9, 18)
    assert found.restart_times_s == (32 - 2 * (9 - resumed) - 18 - 2,)


def test_a_step_made_again_without_a_word_replaces_what_was_since() -> None:
    found = measure([event(0, 1, "start")], [*steps(0, 1, range(1, 7)), *steps(20, 1, range(3, 6))])
    assert (found.steps, found.lost_steps, found.effective_s, found.lost_s) == (5, 4, 10, 8)


def test_a_rollback_is_no_restart() -> None:
    """Steps 5 and 6 are skipped, so that at 13 s it goes back to step 3, from which its first step begins at 17 s."""
    events = [event(0, 1, "start"), event(10, 1, "step_skipped", step=5), event(12, 1, "step_skipped", step=6)]
    events += [event(13, 2, "rollback", step=3), event(15, 2, "resume", step=3)]
    lines = [*steps(0, 1, range(1, 7)), *steps(17, 2, range(4, 8))]
    found = measure(events, lines)
    assert (found.rollbacks, found.restarts, found.restart_times_s, found.waiting_s) == (1, 0, (), 0)
    assert (found.steps, found.lost_steps, found.skipped_steps) == (7, 3, 0)
    assert (found.wall_s, found.effective_s, found.lost_s, found.other_s) == (25, 14, 6, 5)
    assert "0 restarts, 1 rollback; " in found.sentence()
    # A failure after it is a restart from there.
    events += [event(30, 2, "failed"), event(30, 2, "restart"), event(31, 3, "start"), event(32, 3, "resume", step=3)]
    found = measure(events, [*lines, *steps(40, 3, range(4, 5))])
    assert (found.rollbacks, found.restarts, found.restart_times_s, found.waiting_s) == (1, 1, (15,), 0)
    assert (found.steps, found.lost_steps) == (4, 7)


def test_a_rollback_to_the_beginning() -> None:
    found = measure([event(0, 1, "start"), event(13, 2, "rollback", step=0)], steps(0, 1, range(1, 7)))
    assert (found.steps, found.lost_steps, found.wall_s) == (0, 6, 13)


def test_skipped_steps_do_not_count() -> None:
    events = [*BEFORE, event(10, 1, "step_skipped", step=4)]
    found = measure(events, LINES)
    assert (found.steps, found.skipped_steps, found.effective_s, found.skipped_s) == (4, 1, 8, 2)
    later, lines = after(25)
    found = measure([*events, event(20, 1, "failed"), *later], [*LINES, *lines])
    assert (found.steps, found.skipped_steps, found.lost_steps) == (5, 0, 2), "the lost attempt skipped it"


def test_stalls_are_found_in_lines_and_in_events() -> None:
    events = [event(0, 1, "start"), event(6, 1, "checkpoint", step=2, stall_s=0.5), event(7, 1, "checkpoint_failed")]
    events += [event(8, 1, "checkpoint_skipped"), event(30, 2, "start"), event(30, 2, "resume", step=2)]
    events.append(event(36, 2, "checkpoint", step=4, stall_s=0.75))
    first, second = steps(0, 1, range(1, 3))
    # A save that was never finished stalled too, and is in the lines only; unlogged steps are in events only.
    lines = [{**first, "checkpoint_stall_s": 0.25}, {**second, "checkpoint_stall_s": 0.5}]
    found = measure(events, [*lines, *steps(31, 2, range(3, 5))])
    assert found.checkpoint_stall_s == 1.5
    assert (found.saves, found.failed_saves, found.skipped_saves) == (2, 1, 1)


def test_lines_of_older_runs_have_no_time() -> None:
    """The first attempt is taken to have ended with its steps, at the earliest; its restart cannot be known."""
    old = [{key: value for key, value in line.items() if key != "time"} for line in LINES]
    events, lines = after(1025)
    found = measure([event(0, 1, "start"), *events], [*old, *lines])
    assert (found.waiting_s, found.restart_times_s) == (1015, (1030 - 10 - 1015,))
    older = [{key: value for key, value in line.items() if key != "time"} for line in lines]
    found = measure([*BEFORE, *events], [*old, *older])
    assert (found.restarts, found.mean_restart_s, found.lost_steps) == (1, None, 2)
    assert found.wall_s == 1034


def test_other_lines_and_events_do_no_harm() -> None:
    lines = [*LINES, {"step": 5, "attempt": 1, "validation": {}}, {"step": 5, "attempt": 1, "goodput": {}}]
    between = [event(990, 2, "configuration_changed"), event(1000, 1, "lock_taken_over")]
    events = [*BEFORE, *between, *after(1025)[0]]
    assert measure(events, lines) == measure([*BEFORE, *after(1025)[0]], LINES)


def test_before_the_first_start_and_right_after_it() -> None:
    assert measure_goodput([], []) is None
    found = measure([event(0, 1, "start")], [])
    assert (found.effective_time_ratio, found.checkpoint_stall_share) == (None, None)
    assert found.sentence() == "goodput: no step has run yet"


def test_people_and_programs_get_the_figures() -> None:
    events, lines = after(25)
    found = measure([*BEFORE, event(20, 1, "failed"), event(21, 1, "restart"), *events], [*LINES, *lines])
    assert found.sentence() == (
        "goodput 29.4%: 5 steps kept, 2 lost, 0 skipped; 1 restart (18 s on average); checkpoints stall 1.47%"
    )
    assert found.scalars() == {
        "effective_time_ratio": pytest.approx(10 / 34),
        "lost_steps": 2,
        "restarts": 1,
        "restart_s": 17.5,
        "checkpoint_stall_share": pytest.approx(0.5 / 34),
    }
    record = json.loads(json.dumps(found.record()))
    assert record["restart_times_s"] == [17.5]
    assert record["effective_time_ratio"] == pytest.approx(10 / 34)


def test_it_is_read_from_a_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run_goodput(run) is None
    run.events.write_text("".join(json.dumps(one) + "\n" for one in BEFORE) + "\0\0\n[1]\n")
    run.metrics.write_text("".join(json.dumps(one) + "\n" for one in LINES) + '\n{"step": 6, "atte')
    assert run_goodput(run) == measure(BEFORE, LINES)


@pytest.mark.parametrize(
    ("events", "lines", "words"),
    [
        ([{"attempt": 1}], [], "an event has no name"),
        ([{"event": "start", "attempt": None}], [], "attempt = None is not a whole number"),
        ([{"event": "start", "attempt": 1, "time": "noon"}], [], "time = 'noon'"),
        ([event(0, 1, "start")], [{"attempt": 1, "step_s": 1.0}], "step = None"),
    ],
)
def test_records_of_no_run_are_named(events: list[Record], lines: list[Record], words: str) -> None:
    with pytest.raises(UserError, match=words):
        measure_goodput(events, lines)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.004, "0.004 s"),
        (0.25, "0.25 s"),
        (42.4, "42 s"),
        (59.7, "1 min"),
        (86399.9, "1 d"),
        (95.2, "1 min 35 s"),
        (7300, "2 h 1 min"),
        (2e5, "2 d 7 h"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
