"""The curve of a run: loss by step, tokens, FLOPs and seconds, over all its attempts; and its smoothed loss.

A step counts once: a later attempt or a rollback that starts before it voids its earlier records. A step skipped by the
guard has no loss here, and its tokens do not count.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.config.schedules.step_tokens import StepTokens
from lightscale.errors import UserError
from lightscale.runs.run_directory import GAVE_UP_EVENT, RunDirectory, read_lines
from lightscale.study.counts import CellCounts

MOST_POINTS = 1000
_LEAST_STEPS = 3
"""Fewest steps for a line; the window grows to the nearest ones."""

_Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunCurve:
    """Arrays (k,) of a run, by ascending step; at most `MOST_POINTS` points, evenly spaced in log D."""

    step: NDArray[np.int64]
    tokens: NDArray[np.float64]
    flops: NDArray[np.float64]
    """Training FLOPs so far, including logits."""
    paper_flops: NDArray[np.float64]
    """FLOPs by the paper's formulas; NaN for architectures without one."""
    seconds: NDArray[np.float64]
    """Time in kept steps."""
    loss: NDArray[np.float64]
    """Loss of the step, nats per token."""
    smoothed: NDArray[np.float64]
    """Loss smoothed by `smooth` over the steps around it."""

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, kw_only=True)
class _Steps:
    step: NDArray[np.int64]
    tokens: NDArray[np.float64]
    seconds: NDArray[np.float64]
    loss: NDArray[np.float64]


def run_curve(run: RunDirectory, counts: CellCounts, step_tokens: StepTokens, *, smoothing: float) -> RunCurve | None:
    """The curve of `run` so far; None before its first step."""
    steps = _steps(read_lines(run.events), read_lines(run.metrics), step_tokens)
    if not len(steps.step):
        return None
    wanted = np.geomspace(steps.tokens[0], steps.tokens[-1], num=MOST_POINTS)
    chosen = np.unique(np.searchsorted(steps.tokens, wanted * (1 - 1e-12)))
    tokens = steps.tokens[chosen]
    paper = counts.paper_flops_per_token
    return RunCurve(
        step=steps.step[chosen],
        tokens=tokens,
        flops=tokens * counts.flops_per_token,
        paper_flops=tokens * (math.nan if paper is None else paper),
        seconds=steps.seconds[chosen],
        loss=steps.loss[chosen],
        smoothed=smooth(steps.tokens, steps.loss, chosen, factor=smoothing),
    )


def training_loss(run: RunDirectory, step_tokens: StepTokens, *, step: int, smoothing: float) -> float:
    """The loss of `run` at `step`, smoothed over the steps before; infinite where that of `step` is not finite."""
    events = read_lines(run.events)
    lines = [line for line in read_lines(run.metrics) if line["step"] <= step]
    last = (kept_lines(events, lines) or [{"step": 0}])[-1]
    if last["step"] != step:
        raise UserError(f"{run.metrics}: step {step} is not readable; restore the file")
    steps = _steps(events, lines, step_tokens)
    if not len(steps.step) or (last.get("loss") is None and "skipped" not in last):
        return math.inf
    return float(smooth(steps.tokens, steps.loss, np.array([len(steps.step) - 1]), factor=smoothing)[0])


def validation_loss(run: RunDirectory, name: str, *, step: int) -> float:
    """The newest loss of `run` at `step` on the validation set `name`; infinite where it is not finite."""
    lines = (line.get("validation", {}) for line in read_lines(run.metrics) if line["step"] == step)
    found = [sets[name] for sets in lines if name in sets]
    if not found:
        raise UserError(f"{run.metrics}: step {step} has no loss of the validation set {name}; restore the file")
    loss = found[-1].get("loss")
    return math.inf if loss is None else float(loss)


def gave_up(run: RunDirectory) -> str | None:
    """Why the guard of `run` gave up in its last attempt, which has ended; None: it did not."""
    status, last = run.read_status(), run.attempt
    if status is None or status.status != "stopped":
        return None
    events = (event for event in read_lines(run.events) if event["attempt"] == last)
    return next((str(event["reason"]) for event in events if event["event"] == GAVE_UP_EVENT), None)


def kept_lines(events: Iterable[_Record], lines: Iterable[_Record]) -> list[_Record]:
    """Metrics lines of the kept steps, one per step, in order."""
    begins = _beginnings(events)
    kept: dict[int, _Record] = {}
    attempt = 0
    for line in lines:
        if line["attempt"] != attempt:
            attempt = line["attempt"]
            begin = begins.get(attempt, line["step"] - 1)
            kept = {step: one for step, one in kept.items() if step <= begin}
        if "step_s" in line or line.get("loss") is not None:
            kept[line["step"]] = {**kept.get(line["step"], {}), **line}
    return [kept[step] for step in sorted(kept)]


def smooth(
    tokens: NDArray[np.float64], loss: NDArray[np.float64], at: NDArray[np.int64], *, factor: float
) -> NDArray[np.float64]:
    """The smoothed loss at the indices `at`, from a least-squares line through log `loss` over log `tokens`.

    The line is fitted to the steps between D / factor and D · factor. A power law is such a line, so that smoothing
    bends it neither in the middle nor at the end of a run. With fewer than three steps, the nearest three are used.
    """
    x, y = np.log(tokens), np.log(loss)
    width = math.log(factor)
    found = np.empty(len(at))
    for number, index in enumerate(at):
        low = int(np.searchsorted(x, x[index] - width))
        high = int(np.searchsorted(x, x[index] + width, side="right"))
        while high - low < min(_LEAST_STEPS, len(x)):
            low, high = max(0, low - 1), min(len(x), high + 1)
        around, values = x[low:high] - x[index], y[low:high]
        centre, mean = around.mean(), values.mean()
        spread = ((around - centre) ** 2).sum()
        slope = ((around - centre) * values).sum() / spread if spread > 0 else 0.0
        found[number] = mean - slope * centre
    return np.exp(found)


def _steps(events: Sequence[_Record], lines: Iterable[_Record], step_tokens: StepTokens) -> _Steps:
    skipped = {(event["attempt"], event["step"]) for event in events if event["event"] == "step_skipped"}
    # The tokens of a branch are those of its model, its seconds are its own.
    begun = next((event["step"] for event in events if event["event"] == "branch"), 0)
    step, tokens, seconds, loss = [], [], [], []
    last, trained, consumed, passed_s = 0, 0, 0, 0.0
    for line in kept_lines(events, lines):
        covered = range(last + 1, line["step"] + 1)
        left_out = [one for one in covered if (line["attempt"], one) in skipped] if skipped else []
        passed_s += (line["step"] - max(last, begun)) * (line.get("step_s") or 0.0)
        # As recorded: the batch may have been changed on the way.
        reached = line.get("tokens", step_tokens.after(line["step"] - last, consumed))
        trained, consumed = trained + reached - consumed, reached
        trained -= sum(step_tokens.after(one) - step_tokens.after(one - 1) for one in left_out)
        last = line["step"]
        value = line.get("loss")
        if value is not None and value > 0 and (line["attempt"], last) not in skipped:
            step.append(last)
            tokens.append(float(trained))
            seconds.append(passed_s)
            loss.append(float(value))
    return _Steps(
        step=np.array(step, dtype=np.int64),
        tokens=np.array(tokens, dtype=np.float64),
        seconds=np.array(seconds, dtype=np.float64),
        loss=np.array(loss, dtype=np.float64),
    )


def _beginnings(events: Iterable[_Record]) -> dict[int, int]:
    """The last step before each attempt's own, where its events say it."""
    return {event["attempt"]: event["step"] for event in events if event["event"] in ("resume", "rollback")}
