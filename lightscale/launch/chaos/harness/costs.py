"""The steps that faults cost, beside the bounds that their kinds state."""

from collections.abc import Iterator

from lightscale.launch.chaos.harness.trial import Trial
from lightscale.launch.chaos.harness.verify import Lines, begun_again, losses


def over_bound(trial: Trial, lines: Lines, events: Lines, every: int) -> list[str]:
    """Each loss of steps that is larger than what all faults that can have caused it may cost together.

    They are numbers of saves. A save that was skipped, for the one before it was still being written, adds its steps.
    """
    return list(_over_bound(trial, lines, events, every))


def _over_bound(trial: Trial, lines: Lines, events: Lines, every: int) -> Iterator[str]:
    before = 0
    for number, lost in losses(lines, begun_again(events)):
        causes = [one for one in trial.injected if one.first_line <= number and one.last_line >= before]
        first, now = lines[before], lines[number]
        skipped = sum(
            event["event"] == "checkpoint_skipped"
            and first["attempt"] <= event["attempt"] < now["attempt"]
            and event["step"] >= now["step"]
            for event in events
        )
        allowed = every * (sum(one.fault.bound.saves for one in causes) + skipped)
        if lost > allowed:
            names = ", ".join(one.fault.kind for one in causes) or "no fault"
            where = f"attempt {now['attempt']} began at step {now['step']}"
            yield f"{where}: {lost} steps lost, at most {allowed} allowed by {names}"
        before = number
