"""Interface of training tasks: inputs and labels made from text, and abilities of the models."""

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
    """Tokens that its layers can read; all mixers of a model must fit."""
    writes_text: ClassVar[bool] = False
    """Whether its models predict the next token, so they score and generate text."""
    predicts_labels: ClassVar[bool] = False
    """Whether labels of documents are predicted, by ``model.head``; otherwise tokens."""
    measures_accuracy: ClassVar[bool] = False
    """Whether validation counts how often the most probable label is right."""

    @abstractmethod
    def check_store(self, model: ModelConfig, store: TokenStore, sources: Collection[str]) -> None:
        """Raise ``UserError`` if the task cannot use ``sources`` of the store, or the model with its tokenizer."""

    @abstractmethod
    def targets(self, store: TokenStore, *, validation: bool) -> Targets | None:
        """Factory of inputs and labels for the rows of ``store``; None: the label of a token is the next token."""

    def class_names(self, store: TokenStore) -> list[str]:
        """Names of the predicted classes in the store, by number; none: unnamed."""
        return []


def task_of(config: RunConfig) -> TrainingTask:
    """Training task of a run."""
    found = task_class(config.task.name)(config.task)
    assert isinstance(found, TrainingTask), f"task {config.task.name}: {found} is no TrainingTask"
    return found
