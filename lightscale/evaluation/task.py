"""What every task is: requests to a model, and scores of its answers. Without torch."""

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
    """None where it has none, as a mean over nothing."""
    standard_error: float | None = None
    """Of the value, over the documents or questions as a sample; None where it is not known."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a task found."""

    scores: Mapping[str, Score]
    """The first is the one that tables show first."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else is kept in the result: plain values, as JSON has them."""


class TaskSettings(Section):
    """The keys of a task file besides ``kind``; a kind adds its own."""

    name: str
    """Of the task, its result file and its rows in tables."""
    limit: int | None = None
    """Only so many of the first documents or questions; none: all."""


class Task(ABC):
    """One task of one evaluation.

    ``check`` is called first, before anything is started. Then rank 0 calls ``requests`` once, all ranks answer, and
    rank 0 calls ``score`` of the same object. None of them may import torch at the top of its module.

    Args:
        settings: of type ``Settings``.
        folder: that relative paths of the settings begin at.
    """

    Settings: ClassVar[type[TaskSettings]] = TaskSettings
    version: ClassVar[int] = 1
    """Raised when the same answers would give other scores, or the same settings other requests."""

    def __init__(self, settings: Any, folder: Path) -> None:
        self.settings, self.folder = settings, folder

    @property
    def name(self) -> str:
        """Of the task."""
        return str(self.settings.name)

    @abstractmethod
    def check(self, tokenizer: Tokenizer) -> None:
        """Refuse, in a second, data that is not there or does not fit ``tokenizer``. UserError names the file."""

    @abstractmethod
    def requests(self, encoder: Encoder) -> Sequence[Request]:
        """All that is asked, always the same. UserError for empty or damaged data."""

    @abstractmethod
    def score(self, answers: Sequence[Answer]) -> Scores:
        """What the ``answers`` to the requests, in their order, are worth."""

    def data_hashes(self) -> dict[str, str]:
        """Name to hash of what the requests were made of; known after ``requests``."""
        return {}

    def plot(self, scores: Scores, path: Path) -> bool:
        """Write a picture of ``scores`` to the PNG file ``path``; False where there is none to show."""
        return False

    def definitions(self) -> dict[str, str]:
        """What each score means, for people."""
        return {}
