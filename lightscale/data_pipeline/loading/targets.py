"""Labels other than the next token: made of whole rows, before these are divided over ranks."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.store.token_store import TokenSource

PADDING = -1
"""In ``starts`` of documents: padding instead of a token of the source."""


class Predicted(NamedTuple):
    """Of rows of n tokens, (b, n) each."""

    inputs: NDArray[np.int32]
    """Inputs of the model."""
    labels: NDArray[np.int32]
    """Labels; any value where the loss mask is 0."""
    counted: NDArray[np.float32]
    """1 where something is predicted."""


class DocumentRanges(NamedTuple):
    """The content of a window: consecutive tokens of documents, one range after another."""

    slots: NDArray[np.int64]
    """(m,) ascending: where in the window each begins."""
    starts: NDArray[np.int64]
    """(m,): index in the source of the token there, or ``PADDING``."""


class RowDocuments(NamedTuple):
    """The documents that a row holds parts of."""

    source: TokenSource
    slots: NDArray[np.int64]
    """(m,) ascending: where in the row each begins."""
    starts: NDArray[np.int64]
    """(m,): index in the source of the token there, or ``PADDING``."""


class WholeRows(NamedTuple):
    """Rows of n tokens before they are cut over ranks."""

    tokens: NDArray[np.int32]
    """(b, n), the text."""
    counted: NDArray[np.float32]
    """(b, n), 1 where the text may be predicted: neither padding nor masked by the source."""
    places: NDArray[np.int64]
    """(b,), tokens of the run's data before each row: no two rows of a run have the same, in no epoch."""
    documents: Callable[[], Sequence[RowDocuments]]
    """Looks up those of each row."""


class Targets(Protocol):
    """A pure function of a row and its place: any layout, and a run that resumes, gets the same."""

    def __call__(self, rows: WholeRows) -> Predicted:
        """Inputs, labels and what counts of whole rows."""

    def description(self) -> str:
        """Inputs beside the store that decide its results; compared when a run is resumed."""
