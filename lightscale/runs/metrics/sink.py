"""The interface of a sink of metrics, and its inputs."""

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
    """Facts about the run for a sink that opens."""

    directory: Path
    """The run's directory."""
    config: RunConfig
    command: str = ""
    """The user's command; empty if unknown."""
    first_step: int | None = 1
    """The first step, from 1, of this attempt; records of earlier attempts for it and later steps are void. None: the
    sink reopens within the attempt after a failure, and its records are valid."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement for all sinks."""

    step: int
    """Optimizer steps done."""
    attempt: int
    time: str
    """UTC, ISO 8601."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """For metrics.jsonl: numbers, text, and tables of them. Empty: no line in the record."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """For curves: finite numbers by "group/name"."""
    scalars_step: int | None = None
    """Step of the scalars; None: ``step``. A save is measured when it is durable, some steps later."""


class Sink(ABC):
    """Destination of a run's metrics. Exists on rank 0 only; one thread at a time calls it.

    A sink called by `background.py` may raise any error and take any time: training continues. The sink is then
    reopened and receives the same measurement again.
    """

    failures = 0
    """Number of failures."""

    @abstractmethod
    def __init__(self, run: RunFacts) -> None:
        """Open it."""

    @abstractmethod
    def write(self, measurement: Measurement) -> None:
        """Write one measurement. Steps come in order, except after `go_back`."""

    @abstractmethod
    def go_back(self, step: int) -> None:
        """Return to `step`: the records of later steps are void."""

    @abstractmethod
    def close(self) -> None:
        """Write everything pending and close."""
