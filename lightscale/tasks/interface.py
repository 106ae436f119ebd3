"""Interface of training tasks: inputs and labels made from text, and abilities of the models."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from lightscale.config.mixers import Direction
from lightscale.config.model import ModelConfig
from lightscale.config.schema import RunConfig, TaskConfig
from lightscale.config.tasks import task_class
from lightscale.data_pipeline.loading.images import Images
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
    keeps_documents_whole: ClassVar[bool] = False
    """Whether sequences hold whole documents: those of training, which ``data.packing`` sets, and of validation."""
    compares_answers: ClassVar[bool] = False
    """Whether its loss is one of pairs of documents, and no sum over tokens."""
    predicts_labels: ClassVar[bool] = False
    """Whether labels of documents are predicted, by ``model.head``; otherwise tokens."""
    reads_images: ClassVar[bool] = False
    """Whether its inputs are patches of images, not ids."""
    predicts_noise: ClassVar[bool] = False
    """Whether noise in its inputs is predicted, by ``model.diffusion``; its models draw images."""
    top: ClassVar[tuple[int, ...]] = ()
    """Numbers k for which validation counts how often the label is among the k most probable ones; 1: accuracy."""

    @abstractmethod
    def check_store(self, model: ModelConfig, store: TokenStore, sources: Collection[str]) -> None:
        """Raise ``UserError`` if the task cannot use ``sources`` of the store, or the model with its tokenizer."""

    @abstractmethod
    def targets(self, store: TokenStore, *, validation: bool) -> Targets | Images | None:
        """Factory of inputs and labels for the rows of ``store``; None: the label of a token is the next token."""

    def class_names(self, store: TokenStore) -> list[str]:
        """Names of the predicted classes in the store, by number; none: unnamed."""
        return []


def task_of(config: RunConfig) -> TrainingTask:
    """Training task of a run."""
    kind = task_class(config.task.name)
    # Rows of images depend on the model, which has the size of patches.
    found = kind(config.task, config.model) if kind.reads_images else kind(config.task)
    assert isinstance(found, TrainingTask), f"task {config.task.name}: {found} is no TrainingTask"
    return found
