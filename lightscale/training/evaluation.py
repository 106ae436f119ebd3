"""Interface between the training loop and evaluation, which measures the model between two steps.

``lightscale.evaluation.during_training`` does; it stands above training, and is handed in by who starts the ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.parallel.engine import Engine
from lightscale.runs.journal import Journal
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.health.heartbeat import Heartbeat


@dataclass(frozen=True, kw_only=True)
class InTraining:
    """A run in training, as its evaluation sees it."""

    config: RunConfig
    directory: RunDirectory
    engine: Engine
    store: TokenStore
    journal: Journal
    heartbeat: Heartbeat
    should_stop: Callable[[], bool]
    """Whether the run is to end; collective."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The results between two steps; the same on all ranks."""

    scores: Mapping[str, Mapping[str, float | None]]
    """Score by score of each task that is done, by its name."""
    seconds: float
    is_complete: bool
    """False: the run is to end, and goes on with the rest when it is resumed."""


class Evaluation(Protocol):
    """Measures a run in training. Every method is collective; errors of a task are reported, not raised."""

    def evaluate(self, step: int) -> Evaluated:
        """Evaluate the model after ``step``; the state of the run stays unchanged."""


BeginEvaluation = Callable[[InTraining], Evaluation]
"""Before the first step."""
