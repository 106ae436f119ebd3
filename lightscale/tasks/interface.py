"""What every training task is: which inputs and labels it makes of the text, and what its models can do."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from lightscale.config.mixers import Direction
from lightscale.config.model import ModelConfig
from lightscale.config.schema import RunConfig, TaskConfig
from lightscale.config.tasks import task_class
from lightscale.data_pipeline.loading.targets import Targets
from lightscale.data_pipeline.store.token_store import TokenStore


class TrainingTask(ABC):
    """A task with the values of its [task]; imports no torch."""

    options: ClassVar[type[TaskConfig]]
    """The keys of [task], ``name`` among them."""
    directions: ClassVar[frozenset[Direction]]
    """What its layers may read; all mixers of a model must fit."""
    writes_text: ClassVar[bool] = False
    """Whether a model predicts the next token: such are scored on text and generate it."""
    predicts_labels: ClassVar[bool] = False
    """Whether labels of documents are predicted, by ``model.head``; otherwise tokens."""
    measures_accuracy: ClassVar[bool] = False
    """Whether validation counts how often the most probable label is right."""

    @abstractmethod
    def check_store(self, model: ModelConfig, store: TokenStore, sources: Collection[str]) -> None:
        """UserError for ``sources`` of a store, or a model for its tokenizer, that the task cannot take."""

    @abstractmethod
    def targets(self, store: TokenStore, *, validation: bool) -> Targets | None:
        """What makes inputs and labels of the rows of ``store``; None: every token's label is the next one."""

    def class_names(self, store: TokenStore) -> list[str]:
        """What the store calls the classes of its documents that are predicted, by number; none: nothing."""
        return []


def task_of(config: RunConfig) -> TrainingTask:
    """The task of a run."""
    found = task_class(config.task.name)(config.task)
    assert isinstance(found, TrainingTask), f"task {config.task.name}: {found} is no TrainingTask"
    return found
