"""The judgement of a filter about a document, and the interface of filters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from lightscale.config.section import Section


@dataclass(frozen=True, slots=True)
class Judgement:
    """A document as a filter leaves it, or the rule that drops it."""

    text: str
    """The text that goes on, changed where the filter changes texts."""
    rule: str | None = None
    """That drops the document; none: it is kept."""
    score: float | None = None
    """The value that the rule measured, if it is a number."""
    changes: Mapping[str, int] = field(default_factory=dict)
    """Number of changes of each kind in the text of a kept document."""


class Step(Protocol):
    """A filter. Can be pickled; its result depends only on the text and its options."""

    def judge(self, text: str) -> Judgement:
        """``text``: normalised."""
        ...


class FileSection(Section):
    """The options of a filter that reads files: their content is part of the corpus, like its texts."""

    def files(self) -> list[str]:
        """Their paths."""
        raise NotImplementedError

    def with_base(self, base: Path) -> Self:
        """The same with relative paths below ``base``."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """As a corpus file would have them."""
        return self.model_dump(mode="json", exclude_unset=True)
