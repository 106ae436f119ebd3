"""What is predicted of a row, where that is not the next token: made of whole rows, before they are cut over ranks."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Predicted(NamedTuple):
    """Of rows of n tokens; the labels are the tokens of the text."""

    inputs: NDArray[np.int32]
    """(b, n): what the model sees."""
    counted: NDArray[np.float32]
    """(b, n): 1 where the token of the text is predicted."""


class Targets(Protocol):
    """A pure function of a row and its place: any layout, and a run that resumes, gets the same."""

    def __call__(self, tokens: NDArray[np.int32], counted: NDArray[np.float32], places: NDArray[np.int64]) -> Predicted:
        """Inputs and what counts of whole rows.

        Args:
            tokens: (b, n), the text.
            counted: (b, n), 1 where the text may be predicted: no padding, and what the source's loss mask says.
            places: (b,), tokens of the run's data before each row: no two rows of a run have the same, in no epoch.
        """

    def description(self) -> str:
        """What decides its results beside the text; compared when a run is resumed."""
