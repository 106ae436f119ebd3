"""Images as rows: one document each, cut into patches; labels at the last token. Without torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lightscale.data_pipeline.augmentation.augment import Augmentation, centre_crop, neighbour, soft_labels
from lightscale.data_pipeline.augmentation.noise import Noise
from lightscale.data_pipeline.loading.targets import DocumentRanges
from lightscale.data_pipeline.store.format import IMAGE
from lightscale.data_pipeline.store.token_store import TokenSource

Number = TypeVar("Number", bound=np.generic)


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


class ImageAt(NamedTuple):
    """An image of a source."""

    source: TokenSource
    number: int


class ReadImages(NamedTuple):
    """Rows of n tokens."""

    patches: NDArray[np.uint8] | NDArray[np.float32]
    """(b, n, p): the bytes of each token's patch, 0 at leading tokens; or noised numbers."""
    labels: NDArray[np.int32]
    """(b, n): the label at the last token."""
    counted: NDArray[np.float32]
    """(b, n): 1 at the last token."""
    soft_labels: NDArray[np.float32] | None
    """(b, classes): see ``Batch``."""
    conditions: NDArray[np.int32] | None = None
    wanted: NDArray[np.float32] | None = None
    """Of noised images, whose ``patches`` are fp32; see ``Batch``."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """Reads images as rows of patches: a pure function of the image's number and turn."""

    shape: tuple[int, int, int]
    """(height, width, channels) of the model's images; those of the store are at least as large."""
    patch: tuple[int, int]
    """(height, width) of a patch; divides the image."""
    overlap: int = 0
    """Pixels around a patch that its token has too."""
    leading_tokens: int
    """Tokens of a row before its patches."""
    label: str
    """Name of the array with the labels."""
    num_labels: int
    label_smoothing: float = 0.0
    """Share of a label that all labels have alike."""
    augmentation: Augmentation | None = None
    """None: the middle of each image as it is."""
    noise: Noise | None = None
    """None: labels are predicted, and no noise."""

    def __call__(
        self, turns: Sequence[int], images: Mapping[int, ImageAt], image_at: Callable[[int], ImageAt]
    ) -> ReadImages:
        """The rows of ``turns``, whose ``images`` are given; ``image_at`` finds others that are mixed into them."""
        mixing = self.augmentation is not None and self.augmentation.config.mixes
        others = {neighbour(turn) for turn in turns} - images.keys() if mixing else ()
        needed = {**images, **{turn: image_at(turn) for turn in sorted(others)}}
        read = {turn: self._pixels(*image) for turn, image in needed.items()}
        labels = {
            turn: int(image.source.document_values(self.label, image.number, image.number + 1)[0])
            for turn, image in needed.items()
        }
        pairs = [(labels[turn], labels[turn], 1.0) for turn in turns]
        if self.augmentation is None:
            rows = [centre_crop(read[turn], self.shape[:2]) for turn in turns]
        else:
            read = self.augmentation.images(read)
            rows = [read[turn] for turn in turns]
            if mixing:
                mixed = [self.augmentation.mixed(read, turn) for turn in turns]
                rows = [pixels for pixels, _ in mixed]
                pairs = [
                    (labels[turn], labels[neighbour(turn)], share)
                    for turn, (_, share) in zip(turns, mixed, strict=True)
                ]
        found = as_patches(np.stack(rows), self.patch, self.leading_tokens, self.overlap)
        of_rows = np.zeros(found.shape[:2], dtype=np.int32)
        of_rows[:, -1] = [labels[turn] for turn in turns]
        counted = np.zeros(found.shape[:2], dtype=np.float32)
        if self.noise is not None:
            noised = self.noise(turns, found, [labels[turn] for turn in turns])
            counted[:] = 1
            return ReadImages(noised.patches, of_rows, counted, None, noised.conditions, noised.wanted)
        counted[:, -1] = 1
        soft = None
        if mixing or self.label_smoothing:
            soft = soft_labels(pairs, num_labels=self.num_labels, smoothing=self.label_smoothing)
        return ReadImages(found, of_rows, counted, soft)

    def description(self) -> str:
        """Inputs beside the store that decide its results; compared when a run is resumed."""
        size = " x ".join(map(str, self.patch)) + (f" that overlap by {self.overlap}" if self.overlap else "")
        changes = "" if self.augmentation is None else f", augmentation {self.augmentation.config.description()}"
        smoothing = f", label smoothing {self.label_smoothing}" if self.label_smoothing else ""
        task = "classify-image" if self.noise is None else "diffusion"
        noise = "" if self.noise is None else f", noise {self.noise.description()}"
        return (
            f"{task} {self.label}, patches of {size}, {self.leading_tokens} leading tokens{smoothing}{changes}{noise}"
        )

    @staticmethod
    def _pixels(source: TokenSource, number: int) -> NDArray[Any]:
        """(h, w, c) of an image as it is stored: pixels, or latents."""
        assert source.image_shape is not None, "a source of images"
        pixels: NDArray[Any] = source.document_values(IMAGE, number, number + 1)[0]
        return pixels.reshape(source.image_shape)


def as_patches(
    pixels: NDArray[Number], patch: tuple[int, int], leading_tokens: int, overlap: int = 0
) -> NDArray[Number]:
    """(b, height, width, channels) -> (b, n, p), the tokens of images: ``leading_tokens`` of zeros, then patches.

    Patches of (height, width) ``patch`` come row by row, in each its pixels row by row, channels last. Each has
    ``overlap`` pixels more on all four sides; beyond the image its edge is repeated.
    """
    b, height, width, _ = pixels.shape
    h, w = patch
    around = ((overlap, overlap), (overlap, overlap))
    padded = np.pad(pixels, ((0, 0), *around, (0, 0)), mode="edge")
    # (b, rows, columns, channels, h, w)
    blocks = sliding_window_view(padded, (h + 2 * overlap, w + 2 * overlap), axis=(1, 2))[:, ::h, ::w]
    tokens = np.moveaxis(blocks, 3, -1).reshape(b, height // h * (width // w), -1)
    return np.concatenate([np.zeros_like(tokens[:, :1]).repeat(leading_tokens, axis=1), tokens], axis=1)
