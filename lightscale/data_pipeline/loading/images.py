"""Images as rows: one document each, cut into patches; labels at the last token. Without torch."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.loading.targets import DocumentRanges
from lightscale.data_pipeline.store.format import IMAGE
from lightscale.data_pipeline.store.token_store import TokenSource


class ImageWindows:
    """Windows of one image each, in the order of the source."""

    is_contiguous: ClassVar[bool] = False
    is_one_document: ClassVar[bool] = True

    def __init__(self, source: TokenSource, sequence_length: int) -> None:
        self.source, self.sequence_length = source, sequence_length
        self.num_windows = source.num_documents

    def document_ranges(self, window: int, first: int, last: int) -> DocumentRanges:
        """See ``Windows``. In the source, an image is one token: that of its number."""
        return DocumentRanges(np.zeros(1, dtype=np.int64), np.array([window]))

    def description(self) -> str:
        """See ``Windows``."""
        return f"{self.num_windows:,} images of {self.sequence_length:,} tokens"


class ReadImages(NamedTuple):
    """Rows of n tokens."""

    patches: NDArray[np.uint8]
    """(b, n, p): the bytes of each token's patch, 0 at leading tokens."""
    labels: NDArray[np.int32]
    """(b, n): the label at the last token."""
    counted: NDArray[np.float32]
    """(b, n): 1 at the last token."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """Reads images as rows of patches: a pure function of the image's number."""

    shape: tuple[int, int, int]
    """(height, width, channels) of an image."""
    patch: tuple[int, int]
    """(height, width) of a patch; divides the image."""
    leading_tokens: int
    """Tokens of a row before its patches."""
    label: str
    """Name of the array with the labels."""

    def __call__(self, images: list[tuple[TokenSource, int]]) -> ReadImages:
        """The rows of ``images``, (source, number) each."""
        pixels = np.stack([source.document_values(IMAGE, number, number + 1)[0] for source, number in images])
        found = self.patches(pixels.reshape(len(images), *self.shape))
        labels = np.zeros(found.shape[:2], dtype=np.int32)
        labels[:, -1] = [source.document_values(self.label, number, number + 1)[0] for source, number in images]
        counted = np.zeros(found.shape[:2], dtype=np.float32)
        counted[:, -1] = 1
        return ReadImages(found, labels, counted)

    def patches(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """(b, height, width, channels) -> (b, n, p): patches row by row, in each pixels row by row, channels last."""
        (height, width, channels), (h, w) = self.shape, self.patch
        blocks = pixels.reshape(-1, height // h, h, width // w, w, channels).swapaxes(2, 3)
        tokens = blocks.reshape(len(pixels), -1, h * w * channels)
        return np.concatenate([np.zeros_like(tokens[:, :1]).repeat(self.leading_tokens, axis=1), tokens], axis=1)

    def description(self) -> str:
        """Inputs beside the store that decide its results; compared when a run is resumed."""
        size = " x ".join(map(str, self.patch))
        return f"classify-image {self.label}, patches of {size}, {self.leading_tokens} leading tokens"
