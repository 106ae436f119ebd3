"""Counts of documents, step by step: number, bytes, and the reason for each dropped document."""

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

MAX_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 400
# A histogram's column i counts the documents of 2^i to 2^(i+1) - 1 tokens; the last one all longer ones too.
NUM_LENGTHS = 28


@dataclass(kw_only=True)
class Dropped:
    """The documents that one rule dropped."""

    documents: int = 0
    bytes: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)
    """``id`` and the beginning of the ``text`` of the first ones; of a duplicate also the kept one, ``like``."""


@dataclass(kw_only=True)
class StepCounts:
    """The documents that a step of the preparation kept and dropped."""

    documents: int = 0
    bytes: int = 0
    """UTF-8 bytes of the texts; of the step ``read`` as they were found."""
    dropped: dict[str, Dropped] = field(default_factory=dict)

    def keep(self, num_bytes: int) -> None:
        """Count a document that a step keeps."""
        self.documents += 1
        self.bytes += num_bytes

    def drop(self, reason: str, num_bytes: int, document_id: str, text: str) -> None:
        """Count a document that it drops."""
        dropped = self.dropped.setdefault(reason, Dropped())
        dropped.documents += 1
        dropped.bytes += num_bytes
        if len(dropped.examples) < MAX_EXAMPLES:
            dropped.examples.append({"id": document_id, "text": excerpt(text)})

    def merge(self, other: "StepCounts") -> None:
        """Add the counts of a later part of the corpus."""
        self.documents += other.documents
        self.bytes += other.bytes
        for reason, dropped in other.dropped.items():
            own = self.dropped.setdefault(reason, Dropped())
            own.documents += dropped.documents
            own.bytes += dropped.bytes
            own.examples.extend(dropped.examples[: MAX_EXAMPLES - len(own.examples)])

    def as_json(self) -> dict[str, Any]:
        """Plain values, reasons by name."""
        dropped = {reason: vars(self.dropped[reason]) for reason in sorted(self.dropped)}
        return {"documents": self.documents, "bytes": self.bytes, "dropped": dropped}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """The inverse of ``as_json``."""
        dropped = {reason: Dropped(**values) for reason, values in content["dropped"].items()}
        return cls(documents=content["documents"], bytes=content["bytes"], dropped=dropped)


def excerpt(text: str) -> str:
    """The beginning of a text, as an example in a report."""
    return text if len(text) <= _EXAMPLE_CHARACTERS else text[:_EXAMPLE_CHARACTERS] + "…"


def length_histogram(num_tokens: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """(NUM_LENGTHS,) numbers of the (n,) lengths with 1, 2 to 3, 4 to 7, … tokens; 0 counts as 1."""
    columns = np.frexp(np.maximum(num_tokens, 1))[1] - 1
    return np.bincount(np.minimum(columns, NUM_LENGTHS - 1), minlength=NUM_LENGTHS)
