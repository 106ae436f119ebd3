"""Rectangles of images: crops, erased ones, and CutMix's. Without Pillow and torch."""

import math
from collections.abc import Sequence

from lightscale.data_pipeline.augmentation.draws import Draws

Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels."""

_ATTEMPTS = 10


def centre(height: int, width: int, of: tuple[int, int]) -> Box:
    """The middle ``height`` x ``width`` pixels of an image of that (height, width)."""
    return (of[0] - height) // 2, (of[1] - width) // 2, height, width


def random_crop(size: tuple[int, int], draws: Draws, *, scale: Sequence[float], ratio: Sequence[float]) -> Box:
    """A rectangle of an image of ``size``, (height, width), as Inception's (Szegedy et al. 2015, arXiv 1409.4842).

    Its area is uniform in ``scale`` of the image's, its width / height log-uniform in ``ratio``. Where ten of them do
    not fit, it is the largest one in the middle whose ratio is allowed.
    """
    height, width = size
    for _ in range(_ATTEMPTS):
        area = height * width * draws.uniform(scale[0], scale[1])
        aspect = draws.log_uniform(ratio[0], ratio[1])
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return draws.below(height - h + 1), draws.below(width - w + 1), h, w
    aspect = min(max(width / height, ratio[0]), ratio[1])
    # One of both is the image's.
    h, w = min(height, max(1, round(width / aspect))), min(width, max(1, round(height * aspect)))
    return centre(h, w, size)


def erased(size: tuple[int, int], draws: Draws, *, scale: Sequence[float], ratio: Sequence[float]) -> Box | None:
    """A rectangle to erase (Zhong et al. 2020, arXiv 1708.04896); its height / width is log-uniform in ``ratio``.

    None: none of ten fits.
    """
    height, width = size
    for _ in range(_ATTEMPTS):
        area = height * width * draws.uniform(scale[0], scale[1])
        aspect = draws.log_uniform(ratio[0], ratio[1])
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < h < height and 0 < w < width:
            return draws.below(height - h + 1), draws.below(width - w + 1), h, w
    return None


def cut(size: tuple[int, int], draws: Draws, share: float) -> Box:
    """A rectangle of 1 - ``share`` of the area around a uniform middle, less what lies outside (arXiv 1905.04899)."""
    root = math.sqrt(1 - share)
    box: list[tuple[int, int]] = []
    for extent in size:
        half, middle = int(extent * root) // 2, draws.below(extent)
        box.append((max(0, middle - half), min(extent, middle + half)))
    (top, bottom), (left, right) = box
    return top, left, bottom - top, right - left
