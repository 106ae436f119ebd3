"""Interface of evaluation tasks: requests to a model, and scores of its answers. Imports no torch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from lightscale.config.section import Section
from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.evaluation.inference.requests import Answer, Encoder, Request


@dataclass(frozen=True, kw_only=True)
class Score:
    """One number about a model."""

    value: float | None
    """None for a mean over nothing."""
    standard_error: float | None = None
    """Standard error of the value over documents or questions; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Result of a task."""

    scores: Mapping[str, Score]
    """Tables show them in this order."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Other content of the result: plain JSON values."""


class TaskSettings(Section):
    """The keys of a task file besides ``kind``; a kind adds its own."""

    name: str
    """Name of the task, its result file and its table rows."""
    limit: int | None = None
    """Maximum number of documents or questions, from the first; none: all."""


class Task(ABC):
    """One task of one evaluation.

    ``check`` is called first, before anything is started. Then rank 0 calls ``requests`` once, all ranks answer, and
    rank 0 calls ``score`` of the same object. None of them may import torch at the top of its module.

    Args:
        settings: of type ``Settings``.
        folder: base folder of relative paths in the settings.
    """

    Settings: ClassVar[type[TaskSettings]] = TaskSettings
    version: ClassVar[int] = 1
    """Raised when the same answers would give other scores, or the same settings other requests."""

    def __init__(self, settings: Any, folder: Path) -> None:
        self.settings, self.folder = settings, folder

    @property
    def name(self) -> str:
        """Name of the task."""
        return str(self.settings.name)

    @abstractmethod
    def check(self, tokenizer: Tokenizer) -> None:
        """Raise ``UserError`` with the file, within a second, if data is missing or does not fit ``tokenizer``."""

    @abstractmethod
    def requests(self, encoder: Encoder) -> Sequence[Request]:
        """All requests, the same at every call. Raise ``UserError`` for empty or damaged data."""

    @abstractmethod
    def score(self, answers: Sequence[Answer]) -> Scores:
        """Scores of the ``answers``, which are in the order of the requests."""

    def data_hashes(self) -> dict[str, str]:
        """Hashes of the data of the requests, by name; available after ``requests``."""
        return {}

    def plot(self, scores: Scores, path: Path) -> bool:
        """Write a picture of ``scores`` to the PNG file ``path``; False if the task has no picture."""
        return False

    def definitions(self) -> dict[str, str]:
        """Meaning of each score, as text for readers."""
        return {}
