"""The records of a run under faults, compared with those of the undisturbed run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What must be the same bit by bit; JSON gives back the numbers that were written.
COMPARED = ("tokens", "loss", "grad_norm", "lr", "validation")
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
    """What is wrong with a run, as lines of text, and what it lost."""

    compared: int
    """Steps of all attempts that were compared with the undisturbed run."""
    mismatches: tuple[str, ...]
    wrong_resumes: tuple[str, ...]
    """Attempts that did not resume from the newest whole checkpoint, or began anew."""
    undetected: tuple[str, ...]
    """Damage that was not refused with its file's name."""
    lost_steps: int
    """Steps taken more than once."""
    max_lost_steps: int
    """Most that were lost at once."""


def judge(
    reference: Lines, lines: Lines, events: Lines, damaged: Sequence[DamagedStep] = (), *, finished: bool = True
) -> Verdict:
    """Compare `lines`, of metrics.jsonl, with those of the `reference`, and follow `events`, of events.jsonl.

    `finished`: every step of the reference must be there.
    """
    losses = lost_steps(lines)
    return Verdict(
        compared=sum("loss" in line for line in lines),
        mismatches=tuple(_mismatches(reference, lines, finished=finished)),
        wrong_resumes=(*_wrong_resumes(events, damaged), *_new_beginnings(lines, events)),
        undetected=tuple(_undetected(events, damaged)),
        lost_steps=sum(losses),
        max_lost_steps=max(losses, default=0),
    )


def lost_steps(lines: Lines) -> list[int]:
    """For each attempt but the first, how many steps it did again."""
    reached, lost, attempt = 0, [], None
    for line in lines:
        if attempt is not None and line["attempt"] != attempt:
            # An attempt that begins with step s takes the steps s to `reached` again.
            lost.append(max(0, reached - line["step"] + 1))
        attempt, reached = line["attempt"], max(reached, line["step"])
    return lost


def _mismatches(reference: Lines, lines: Lines, *, finished: bool) -> Iterator[str]:
    expected: dict[tuple[int, str], Any] = {
        (line["step"], key): line[key] for line in reference for key in COMPARED if key in line
    }
    seen = set()
    for line in lines:
        for key in COMPARED:
            where = f"step {line['step']}, attempt {line['attempt']}"
            step_key = line["step"], key
            if key not in line:
                continue
            seen.add(step_key)
            if step_key not in expected:
                yield f"{where}: {key} is not in the undisturbed run"
            elif line[key] != expected[step_key]:
                yield f"{where}: {key} {line[key]}, undisturbed {expected[step_key]}"
    if finished:
        yield from (f"step {step}: no {key} was recorded" for step, key in sorted(set(expected) - seen))


def _wrong_resumes(events: Lines, damaged: Sequence[DamagedStep]) -> Iterator[str]:
    """A resume from an older checkpoint than the newest one recorded that was neither removed nor damaged."""
    whole: set[int] = set()
    for number, event in enumerate(events):
        # Before the event itself: the file was damaged when so many lines had been written.
        whole -= {one.step for one in damaged if one.after_events == number}
        if event["event"] == "checkpoint":
            whole.add(event["step"])
            whole.difference_update(event.get("removed", ()))
        elif event["event"] == "resume" and whole and event["step"] < max(whole):
            yield f"attempt {event['attempt']} resumed from step {event['step']}, though there was {max(whole)}"


def _new_beginnings(lines: Lines, events: Lines) -> Iterator[str]:
    """An attempt that began at step 1 although an earlier one had saved."""
    saved = {event["attempt"] for event in events if event["event"] == "checkpoint"}
    for line in lines:
        if line["step"] == 1 and "loss" in line and any(attempt < line["attempt"] for attempt in saved):
            yield f"attempt {line['attempt']} began again at step 1, though there were checkpoints"


def _undetected(events: Lines, damaged: Sequence[DamagedStep]) -> Iterator[str]:
    for one in damaged:
        resume = next((event for event in events[one.after_events :] if event["event"] == "resume"), None)
        where = f"{one.directory}/{one.file}"
        if resume is None:
            yield f"{where}: no attempt resumed after the damage"
        elif resume["step"] == one.step:
            yield f"{where}: attempt {resume['attempt']} resumed from it"
        # To refuse is not enough: the message must tell the user which file to look at.
        elif not any(where in reason for reason in resume.get("refused", ())):
            yield f"{where}: attempt {resume['attempt']} did not name it"


def shown(texts: Iterable[str]) -> list[str]:
    """The first of them, and how many more there are."""
    every = list(texts)
    more = [f"… and {len(every) - _SHOWN} more"] if len(every) > _SHOWN else []
    return every[:_SHOWN] + more
