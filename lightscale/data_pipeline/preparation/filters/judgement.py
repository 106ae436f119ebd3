"""What a filter says of a document, and what every filter is."""

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
    """What the rule measured, where that is a number."""
    changes: Mapping[str, int] = field(default_factory=dict)
    """What was changed in the text of a document that is kept, and how often."""


class Step(Protocol):
    """A filter. Can be pickled; depends on nothing but the text and what it was made of."""

    def judge(self, text: str) -> Judgement:
        """``text``: normalised."""
        ...


class FileSection(Section):
    """The options of a filter that reads files: what they hold is part of the corpus, as its texts are."""

    def files(self) -> list[str]:
        """Their paths."""
        raise NotImplementedError

    def with_base(self, base: Path) -> Self:
        """The same with relative paths below ``base``."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """As a corpus file would have them."""
        return self.model_dump(mode="json", exclude_unset=True)
