"""What a place that metrics go to, a sink, is given, and what it must do."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightscale.config.schema import RunConfig

# What the user entered, for the ranks, whose own command line is another.
COMMAND_VARIABLE = "LIGHTSCALE_COMMAND"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a sink may want to know when it is opened."""

    directory: Path
    """Of the run."""
    config: RunConfig
    command: str = ""
    """What the user entered; empty where it is not known."""
    first_step: int | None = 1
    """The first step, from 1, of this attempt: what earlier attempts wrote of it and of later steps is void. None: the
    sink is opened again within the attempt, after it failed, and what it has is valid."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was measured at one moment."""

    step: int
    """Optimizer steps done."""
    attempt: int
    time: str
    """UTC, ISO 8601."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """For metrics.jsonl: numbers, text, and tables of them. Empty: the record has no line of it."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """For curves: finite numbers by "group/name"."""
    scalars_step: int | None = None
    """The step that the scalars are of; None: ``step``. A save is measured when it is durable, some steps later."""


class Sink(ABC):
    """A place that the metrics of a run go to. On rank 0 only, and called by one thread at a time.

    A sink that `background.py` calls may raise anything and take any time: training goes on. It is then opened again
    and given the same measurement once more.
    """

    failures = 0
    """How often it has failed."""

    @abstractmethod
    def __init__(self, run: RunFacts) -> None:
        """Open it."""

    @abstractmethod
    def write(self, measurement: Measurement) -> None:
        """Steps come in order, but for `go_back`."""

    @abstractmethod
    def go_back(self, step: int) -> None:
        """The run continues behind `step`: what was written of later steps is void."""

    @abstractmethod
    def close(self) -> None:
        """Write what is held back."""
