"""The steps that faults cost, beside the bounds that their kinds state."""

from collections.abc import Iterator

from lightscale.launch.chaos.harness.trial import Trial
from lightscale.launch.chaos.harness.verify import Lines, begun_again, losses


def over_bound(trial: Trial, lines: Lines, events: Lines, every: int) -> list[str]:
    """Each loss of steps that is larger than what all faults that can have caused it may cost together."""
    return list(_over_bound(trial, lines, events, every))


def _over_bound(trial: Trial, lines: Lines, events: Lines, every: int) -> Iterator[str]:
    before = 0
    for number, lost in losses(lines, begun_again(events)):
        causes = [one for one in trial.injected if one.first_line <= number and one.last_line >= before]
        allowed = every * sum(one.fault.bound.saves for one in causes)
        if lost > allowed:
            names = ", ".join(one.fault.kind for one in causes) or "no fault"
            where = f"attempt {lines[number]['attempt']} began at step {lines[number]['step']}"
            yield f"{where}: {lost} steps lost, at most {allowed} allowed by {names}"
        before = number
