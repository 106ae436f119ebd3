"""Comparison of the records of a run under faults with those of the undisturbed run."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

# What must be the same bit by bit; JSON gives back the numbers that were written.
COMPARED = ("tokens", "loss", "grad_norm", "lr", "validation")
GIVEN_UP = "checkpoints_given_up"
"""Event of an attempt that was asked to start again at step 1."""
SKIPPED = "data_skipped"
"""Event of a jump over data."""
_SHOWN = 20

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class DamagedStep:
    """The newest checkpoint was damaged between two attempts."""

    step: int
    directory: str
    """Its name."""
    file: str
    """Name of the damaged file."""
    after_events: int
    """Number of lines of events.jsonl at that time."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Faults of a run, as lines of text, and its losses."""

    compared: int
    """Number of compared steps, over all attempts."""
    mismatches: tuple[str, ...]
    mismatched_lines: tuple[int, ...]
    """Line of metrics of each mismatch; the last ones are missing steps."""
    wrong_resumes: tuple[str, ...]
    """Attempts that did not resume from the newest intact checkpoint, or started again."""
    lost_steps: int
    """Steps taken more than once."""
    max_lost_steps: int
    """Most steps lost at once."""


def judge(
    reference: Lines,
    lines: Lines,
    events: Lines,
    damaged: Sequence[DamagedStep] = (),
    *,
    finished: bool = True,
    skip: Collection[int] = (),
) -> Verdict:
    """Compare `lines` of metrics.jsonl with those of the `reference`, and follow `events` of events.jsonl.

    `finished`: every step of the reference must be present. `skip`: numbers of lines to leave out.
    """
    lost = lost_steps(lines, begun_again=begun_again(events))
    mismatches = list(_mismatches(reference, lines, finished=finished, skip=skip))
    return Verdict(
        compared=sum("loss" in line for number, line in enumerate(lines) if number not in skip),
        mismatches=tuple(text for _, text in mismatches),
        mismatched_lines=tuple(number for number, _ in mismatches if number is not None),
        wrong_resumes=(*_wrong_resumes(events, damaged), *_new_beginnings(lines, events)),
        lost_steps=sum(lost),
        max_lost_steps=max(lost, default=0),
    )


def lost_steps(lines: Lines, begun_again: Collection[int] = ()) -> list[int]:
    """Number of repeated steps of each attempt except the first; the attempts `begun_again` were asked to repeat."""
    return [lost for _, lost in losses(lines, begun_again)]


def losses(lines: Lines, begun_again: Collection[int] = ()) -> Iterator[tuple[int, int]]:
    """Index of the first line of each attempt except the first, and how many steps it repeats; see `lost_steps`.

    These are steps of the attempt before: what that one took again itself was lost earlier.
    """
    for number, (before, line) in enumerate(pairwise(lines), start=1):
        if line["attempt"] != before["attempt"]:
            yield number, 0 if line["attempt"] in begun_again else max(0, before["step"] - line["step"] + 1)


def undone(lines: Lines, events: Lines) -> set[int]:
    """Indices of lines whose steps a rollback has undone."""
    # A rollback begins an attempt.
    rollbacks = [(event["attempt"], event["step"]) for event in events if event["event"] == "rollback"]
    return {
        number
        for number, line in enumerate(lines)
        if any(line["attempt"] < attempt and line["step"] > step for attempt, step in rollbacks)
    }


def jumps(events: Lines) -> list[tuple[int, int]]:
    """For each jump over data: tokens trained on before it, and tokens jumped over."""
    return [(event["at_tokens"], event["skip_tokens"]) for event in events if event["event"] == SKIPPED]


def _mismatches(
    reference: Lines, lines: Lines, *, finished: bool, skip: Collection[int]
) -> Iterator[tuple[int | None, str]]:
    expected: dict[tuple[int, str], Any] = {
        (line["step"], key): line[key] for line in reference for key in COMPARED if key in line
    }
    seen = set()
    for number, line in enumerate(lines):
        for key in COMPARED if number not in skip else ():
            where = f"step {line['step']}, attempt {line['attempt']}"
            step_key = line["step"], key
            if key not in line:
                continue
            seen.add(step_key)
            if step_key not in expected:
                yield number, f"{where}: {key} is not in the undisturbed run"
            elif line[key] != expected[step_key]:
                yield number, f"{where}: {key} {line[key]}, undisturbed {expected[step_key]}"
    if finished:
        yield from ((None, f"step {step}: no {key} was recorded") for step, key in sorted(set(expected) - seen))


def _wrong_resumes(events: Lines, damaged: Sequence[DamagedStep]) -> Iterator[str]:
    """A resume from an older checkpoint than the newest one recorded that was neither removed nor damaged."""
    whole: set[int] = set()
    for number, event in enumerate(events):
        # Before the event itself: the file was damaged when so many lines had been written.
        whole -= {one.step for one in damaged if one.after_events == number}
        if event["event"] == GIVEN_UP:
            whole.clear()
        elif event["event"] == "rollback":
            # Later ones are put aside.
            whole = {step for step in whole if step <= event["step"]}
        elif event["event"] == "checkpoint":
            whole.add(event["step"])
            whole.difference_update(event.get("removed", ()))
        elif event["event"] == "resume" and whole and event["step"] < max(whole):
            yield f"attempt {event['attempt']} resumed from step {event['step']}, though there was {max(whole)}"


def _new_beginnings(lines: Lines, events: Lines) -> Iterator[str]:
    """An attempt that began at step 1 although an earlier one had saved, and nobody gave that up."""
    again = begun_again(events)
    saved = [event["attempt"] for event in events if event["event"] == "checkpoint"]
    for line in lines:
        attempt = line["attempt"]
        since = max((number for number in again if number <= attempt), default=0)
        if line["step"] == 1 and "loss" in line and any(since <= number < attempt for number in saved):
            yield f"attempt {attempt} began again at step 1, though there were checkpoints"


def begun_again(events: Lines) -> set[int]:
    """The attempts that were allowed to begin at step 1."""
    return {
        event["attempt"]
        for event in events
        if event["event"] == GIVEN_UP or (event["event"] == "rollback" and event["step"] == 0)
    }


def missed_damage(since: Lines, damaged: DamagedStep) -> str | None:
    """The fault in the events since a checkpoint was damaged; None: it was refused with its file's name."""
    resume = next((event for event in since if event["event"] == "resume"), None)
    where = f"{damaged.directory}/{damaged.file}"
    if resume is None:
        return f"{where}: no attempt resumed after the damage"
    if resume["step"] == damaged.step:
        return f"{where}: attempt {resume['attempt']} resumed from it"
    # To refuse is not enough: the message must tell the user which file to look at.
    if not any(where in reason for reason in resume.get("refused", ())):
        return f"{where}: attempt {resume['attempt']} did not name it"
    return None


def shown(texts: Iterable[str]) -> list[str]:
    """The first texts, and the number of the rest."""
    every = list(texts)
    more = [f"… and {len(every) - _SHOWN} more"] if len(every) > _SHOWN else []
    return every[:_SHOWN] + more
