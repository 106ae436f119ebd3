"""Judged runs as JSON, so that a campaign that was ended goes on from its last whole run."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from lightscale.launch.chaos.harness.trial import Bound, Injected, Runner, Trial
from lightscale.launch.chaos.harness.verify import Verdict
from lightscale.runs.run_directory import write_atomically


@dataclass(frozen=True, kw_only=True)
class PastFault:
    """A fault of a run that was judged before."""

    kind: str
    text: str
    bound: Bound

    def __str__(self) -> str:
        return self.text

    def inject(self, run: Runner) -> None:
        """It has happened."""
        raise AssertionError(self.text)


@dataclass(kw_only=True)
class Judged:
    """A run under faults, and the verdict over it."""

    name: str
    """Of its directory, without the number."""
    taken: int
    """Faults of its queue that it used up."""
    trial: Trial
    verdict: Verdict
    over_bound: list[str]

    def to_record(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        trial = {one.name: getattr(self.trial, one.name) for one in fields(Trial)}
        trial["injected"] = [_injected_record(one) for one in self.trial.injected]
        # Only the verdict needed it.
        del trial["damaged"]
        record = {"name": self.name, "taken": self.taken, "trial": trial, "over_bound": self.over_bound}
        return {**record, "verdict": asdict(self.verdict)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """The inverse of `to_record`; faults have become `PastFault`."""
        trial = Trial(**{**record["trial"], "injected": [_injected(one) for one in record["trial"]["injected"]]})
        found: dict[str, Any] = record["verdict"]
        values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in found.items()}
        return cls(**{**record, "trial": trial, "verdict": Verdict(**values)})


def _injected_record(one: Injected) -> dict[str, Any]:
    record = {field.name: getattr(one, field.name) for field in fields(Injected)}
    record["fault"] = {"kind": one.fault.kind, "text": str(one.fault), "bound": asdict(one.fault.bound)}
    # A function: what it found is in `missed`.
    record["sign"] = one.sign is not None
    return record


def _injected(record: dict[str, Any]) -> Injected:
    fault = PastFault(**{**record["fault"], "bound": Bound(**record["fault"]["bound"])})
    missed = record["missed"]
    sign = (lambda since: missed) if record["sign"] else None
    return Injected(**{**record, "fault": fault, "sign": sign, "during": tuple(record["during"])})


class CampaignProgress:
    """The judged runs of a campaign in `path`, for the same `question` only."""

    def __init__(self, path: Path, question: dict[str, Any]) -> None:
        self._path, self._question = path, json.loads(json.dumps(question))
        self.judged: list[Judged] = []
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return
        if record["question"] == self._question:
            self.judged = [Judged.from_record(one) for one in record["judged"]]

    def add(self, one: Judged) -> None:
        """Keep `one`."""
        self.judged.append(one)
        record = {"question": self._question, "judged": [judged.to_record() for judged in self.judged]}
        write_atomically(self._path, json.dumps(record) + "\n")

    def taken(self, name: str) -> int:
        """Number of faults that the runs `name` have used up."""
        return sum(one.taken for one in self.judged if one.name == name)

    def finish(self) -> None:
        """All is done: the next campaign begins anew."""
        self._path.unlink(missing_ok=True)
