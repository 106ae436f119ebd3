"""STUDY/search.jsonl: the scores of trials at their rungs, and the decisions, line by line.

A kill leaves whole lines alone: one that it cut short does not count. Other damage is an error. What is recorded is
never measured or decided again.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightscale.errors import UserError
from lightscale.records import read_records
from lightscale.runs.run_directory import LineWriter, damage_text, timestamp

_SCORE, _DECISION = "score", "decision"


@dataclass(frozen=True, kw_only=True)
class RungScore:
    """The loss of a cell at a rung or at its end."""

    cell: str
    step: int
    loss: float
    """Nats per token; infinite: the cell diverged, which is worse than any loss."""
    reason: str = ""
    """Why it diverged."""

    def text(self) -> str:
        """For people."""
        return f"loss {self.loss:.4f} at step {self.step}" if math.isfinite(self.loss) else f"diverged: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Which trials of a group go on after a rung."""

    group: str
    step: int
    kept: tuple[str, ...]
    """Names of trials, by their losses."""
    losses: dict[str, float]
    """Of all trials that were compared: the mean over seeds."""

    def text(self) -> str:
        """For people."""
        on = ", ".join(self.kept) or "none: all have diverged"
        return f"{self.group}, step {self.step}: {len(self.kept)} of {len(self.losses)} trials go on: {on}"


class SearchRecords:
    """The records in the file `path`; read when made, and by `reload`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.reload()

    def reload(self) -> None:
        """Read what has been added, also by another process."""
        self.scores: dict[tuple[str, int], RungScore] = {}
        """By cell and step."""
        self.decisions: dict[tuple[str, int], Decision] = {}
        """The newest one by group and step."""
        records = read_records(self._path)
        if records.num_damaged:
            # Without a score or a decision its group would wait for ever, or decide otherwise.
            raise UserError(
                f"{damage_text(records.num_damaged, records.first_damage or '')}; restore the file from a copy, or use "
                "another directory with --dir"
            )
        for number, line in enumerate(records.lines, start=1):
            try:
                self._take(line)
            except (KeyError, TypeError, ValueError, AttributeError):
                raise UserError(f"{self._path}: record {number} is none of a search; restore the file") from None

    def add_score(self, score: RungScore) -> None:
        """Record the first score of a cell at a step."""
        loss = score.loss if math.isfinite(score.loss) else None
        self._write({"kind": _SCORE, "cell": score.cell, "step": score.step, "loss": loss, "reason": score.reason})

    def add_decision(self, decision: Decision) -> None:
        """Record a decision."""
        losses = {name: loss if math.isfinite(loss) else None for name, loss in decision.losses.items()}
        self._write(
            {
                "kind": _DECISION,
                "group": decision.group,
                "step": decision.step,
                "kept": list(decision.kept),
                "losses": losses,
            }
        )

    def _write(self, record: dict[str, Any]) -> None:
        with LineWriter(self._path) as writer:
            writer.write({"time": timestamp(), **record})
            # Before a run is started by it.
            writer.sync()
        self._take(record)

    def _take(self, line: dict[str, Any]) -> None:
        step = int(line["step"])
        if line["kind"] == _SCORE:
            score = RungScore(cell=str(line["cell"]), step=step, loss=_loss(line["loss"]), reason=str(line["reason"]))
            self.scores.setdefault((score.cell, step), score)
        elif line["kind"] == _DECISION:
            losses = {str(name): _loss(loss) for name, loss in line["losses"].items()}
            group, kept = str(line["group"]), tuple(map(str, line["kept"]))
            self.decisions[group, step] = Decision(group=group, step=step, kept=kept, losses=losses)
        else:
            raise ValueError(line["kind"])


def _loss(value: float | None) -> float:
    return math.inf if value is None else float(value)
