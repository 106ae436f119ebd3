"""What is found in the records of made-up runs."""

from typing import Any

from lightscale.launch.chaos.harness.verify import (
    GIVEN_UP,
    DamagedStep,
    judge,
    jumps,
    lost_steps,
    missed_damage,
    shown,
    undone,
)

Line = dict[str, Any]


def lines(attempt: int, first: int, last: int, **changes: Any) -> list[Line]:
    """Metrics of steps `first` to `last`; every fourth step was validated too, in a line of its own."""
    found: list[Line] = []
    for step in range(first, last + 1):
        line = {"step": step, "attempt": attempt, "tokens": 64 * step}
        found.append({**line, "loss": 1 / step, "grad_norm": 0.1 * step, "lr": 1e-3, "step_s": attempt, **changes})
        if step % 4 == 0:
            found.append({**line, "validation": {"held": {"loss": 2 / step}}})
    return found


def checkpoint(attempt: int, step: int, removed: list[int] | None = None) -> Line:
    return {"event": "checkpoint", "attempt": attempt, "step": step, "removed": removed or []}


def resume(attempt: int, step: int, refused: tuple[str, ...] = ()) -> Line:
    return {"event": "resume", "attempt": attempt, "step": step, "refused": list(refused)}


REFERENCE = lines(1, 1, 12)
GOOD = [*lines(1, 1, 7), *lines(2, 5, 10), *lines(3, 9, 12)]
EVENTS = [checkpoint(1, 4), resume(2, 4), checkpoint(2, 8), resume(3, 8), checkpoint(3, 12, [4])]


def test_a_good_run() -> None:
    verdict = judge(REFERENCE, GOOD, EVENTS)
    assert (verdict.mismatches, verdict.mismatched_lines, verdict.wrong_resumes) == ((), (), ())
    assert verdict.compared == 7 + 6 + 4
    assert (verdict.lost_steps, verdict.max_lost_steps) == (3 + 2, 3)
    assert lost_steps(GOOD) == [3, 2]
    # What was lost before is not lost once more.
    assert lost_steps([*lines(1, 1, 12), *lines(2, 5, 6), *lines(3, 5, 12)]) == [8, 2]


def test_every_attempt_is_compared_bit_by_bit() -> None:
    for number, line in enumerate(GOOD):
        for key in ("loss", "grad_norm", "lr", "tokens"):
            if key in line:
                # By one unit in the last place, where it is a float.
                value = line[key] + 1 if key == "tokens" else line[key] * (1 + 2**-52)
                changed = [*GOOD[:number], {**line, key: value}, *GOOD[number + 1 :]]
                verdict = judge(REFERENCE, changed, EVENTS)
                (found,) = verdict.mismatches
                assert verdict.mismatched_lines == (number,)
                assert found.startswith(f"step {line['step']}, attempt {line['attempt']}: {key} ")
    at = next(number for number, line in enumerate(GOOD) if "validation" in line)
    changed = [*GOOD[:at], {**GOOD[at], "validation": {"held": {"loss": 0.4}}}, *GOOD[at + 1 :]]
    assert "validation" in judge(REFERENCE, changed, EVENTS).mismatches[0]


def test_missing_and_surplus_steps() -> None:
    without = [line for line in GOOD if line["step"] != 6]
    found = judge(REFERENCE, without, EVENTS).mismatches
    assert found == tuple(f"step 6: no {key} was recorded" for key in ("grad_norm", "loss", "lr", "tokens"))
    assert judge(REFERENCE, without, EVENTS, finished=False).mismatches == ()
    found = judge(REFERENCE, [*GOOD, *lines(3, 13, 13)], EVENTS).mismatches
    assert "step 13, attempt 3: loss is not in the undisturbed run" in found


def test_an_older_checkpoint_was_taken() -> None:
    events = [*EVENTS[:3], resume(3, 4), *EVENTS[4:]]
    assert judge(REFERENCE, GOOD, events).wrong_resumes == ("attempt 3 resumed from step 4, though there was 8",)
    # One that was finished, but killed before it could be recorded.
    assert judge(REFERENCE, GOOD, [checkpoint(1, 4), resume(2, 8)]).wrong_resumes == ()


def test_a_lost_run() -> None:
    anew = [*lines(1, 1, 7), *lines(2, 1, 12)]
    verdict = judge(REFERENCE, anew, EVENTS[:1])
    assert verdict.wrong_resumes == ("attempt 2 began again at step 1, though there were checkpoints",)
    assert verdict.mismatches == ()
    # Before the first checkpoint there is nothing to resume from.
    assert judge(REFERENCE, anew, []).wrong_resumes == ()


def test_damage() -> None:
    damaged = DamagedStep(step=8, directory="step-00000008", file="rank-1", after_events=3)
    reason = "runs/x/checkpoints/step-00000008/rank-1: expected 7 bytes, found 6"

    def found(*events: Line) -> tuple[tuple[str, ...], str | None]:
        verdict = judge(REFERENCE, GOOD, [*EVENTS[:3], *events], [damaged])
        return verdict.wrong_resumes, missed_damage(events, damaged)

    assert found(resume(3, 4, (reason,)), checkpoint(3, 8)) == ((), None)
    assert found(resume(3, 8)) == ((), "step-00000008/rank-1: attempt 3 resumed from it")
    assert found(resume(3, 4, ("…/step-00000008/rank-0: …",)))[1] == "step-00000008/rank-1: attempt 3 did not name it"
    assert found()[1] == "step-00000008/rank-1: no attempt resumed after the damage"
    # Once it is saved again, it is the newest.
    again = found(resume(3, 4, (reason,)), checkpoint(3, 8), resume(4, 4))
    assert again == (("attempt 4 resumed from step 4, though there was 8",), None)


def test_a_run_that_was_told_to_begin_again() -> None:
    anew = [*lines(1, 1, 7), *lines(2, 1, 12)]
    events = [checkpoint(1, 4), {"event": GIVEN_UP, "attempt": 2}, checkpoint(2, 8)]
    verdict = judge(REFERENCE, anew, events)
    assert (verdict.mismatches, verdict.wrong_resumes, verdict.lost_steps) == ((), (), 0)
    # Nobody told it to do so once more.
    verdict = judge(REFERENCE, [*anew, *lines(3, 1, 12)], [*events, {"event": "start", "attempt": 3}])
    assert verdict.wrong_resumes == ("attempt 3 began again at step 1, though there were checkpoints",)
    assert verdict.lost_steps == 12


def test_what_a_rollback_has_undone_is_not_compared() -> None:
    # Steps 6 and 7 were done with numbers that the run with the jump never had.
    bad = [{**line, "loss": 0.5} if line["step"] > 5 else line for line in lines(1, 1, 7)]
    back = [*bad, *lines(2, 5, 12)]
    events = [checkpoint(1, 4), checkpoint(1, 7), {"event": "rollback", "attempt": 2, "step": 4}, resume(2, 4)]
    skip = undone(back, events)
    assert [back[number]["step"] for number in sorted(skip)] == [5, 6, 7]
    verdict = judge(REFERENCE, back, events, skip=skip)
    assert (verdict.mismatches, verdict.wrong_resumes, verdict.compared) == ((), (), 4 + 8)
    assert len(judge(REFERENCE, back, events).mismatches) == 2
    assert undone(back, [{"event": "rollback", "attempt": 2, "step": 7}]) == set()


def test_jumps() -> None:
    skipped = {"event": "data_skipped", "attempt": 1, "at_tokens": 256, "skip_tokens": 128}
    # Its rollback records it once more.
    assert jumps([checkpoint(1, 4), skipped, {**skipped, "event": "rollback", "attempt": 2}]) == [(256, 128)]


def test_long_lists_are_cut() -> None:
    assert shown(map(str, range(20))) == [str(number) for number in range(20)]
    assert shown(map(str, range(22)))[-1] == "… and 2 more"
