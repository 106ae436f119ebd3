"""What Pillow does of augmentation: sizes by bicubic interpolation. Pillow is optional."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]
"""(height, width, channels), 1 channel or 3."""
Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels."""


def as_image(pixels: Pixels) -> Image.Image:
    """A picture of Pillow's, grey or RGB."""
    return Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))


def as_pixels(image: Image.Image, channels: int) -> Pixels:
    """The inverse of ``as_image``."""
    return np.asarray(image, dtype=np.uint8).reshape(image.height, image.width, channels)


def resized(pixels: Pixels, box: Box, size: tuple[int, int]) -> Pixels:
    """The rectangle ``box`` scaled to ``size``, (height, width): bicubic, over all pixels where it shrinks."""
    top, left, height, width = box
    part = pixels[top : top + height, left : left + width]
    return as_pixels(as_image(part).resize(size[::-1], Image.Resampling.BICUBIC), pixels.shape[2])
