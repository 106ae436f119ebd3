"""What is predicted of a row, where that is not the next token: made of whole rows, before they are cut over ranks."""

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
    """What the model sees."""
    labels: NDArray[np.int32]
    """What it is to predict where that counts; elsewhere any label."""
    counted: NDArray[np.float32]
    """1 where something is predicted."""


class RowDocuments(NamedTuple):
    """The documents that a row holds parts of."""

    source: TokenSource
    slots: NDArray[np.int64]
    """(m,) ascending: where in the row each begins."""
    starts: NDArray[np.int64]
    """(m,): index in the source of the token there, or ``PADDING``."""


class Targets(Protocol):
    """A pure function of a row and its place: any layout, and a run that resumes, gets the same."""

    def __call__(
        self,
        tokens: NDArray[np.int32],
        counted: NDArray[np.float32],
        places: NDArray[np.int64],
        documents: Callable[[], Sequence[RowDocuments]],
    ) -> Predicted:
        """Inputs, labels and what counts of whole rows.

        Args:
            tokens: (b, n), the text.
            counted: (b, n), 1 where the text may be predicted: no padding, and what the source's loss mask says.
            places: (b,), tokens of the run's data before each row: no two rows of a run have the same, in no epoch.
            documents: looks up those of each row.
        """

    def description(self) -> str:
        """What decides its results beside the store; compared when a run is resumed."""
