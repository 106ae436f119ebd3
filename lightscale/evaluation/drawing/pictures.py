"""Drawn images as pixels and PNG files, by Pillow, which is optional; latents as files of numpy."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.whole_files import whole_file

Pixels = NDArray[np.uint8]
Number = TypeVar("Number", bound=np.generic)


def as_pixels(patches: NDArray[Number], grid: Sequence[int], size: Sequence[int], channels: int) -> NDArray[Number]:
    """(b, n, p) patches -> (b, height, width, channels): ``loading.images.as_patches`` backwards."""
    (rows, columns), (height, width) = grid, size
    blocks = patches.reshape(len(patches), rows, columns, height, width, channels).swapaxes(2, 3)
    return blocks.reshape(len(patches), rows * height, columns * width, channels)


def as_grid(images: Pixels, columns: int, *, scale: int) -> Pixels:
    """(b, h, w, c) -> one picture, row by row with a line between images, each pixel ``scale`` x ``scale``."""
    larger = images.repeat(scale, axis=1).repeat(scale, axis=2)
    count, height, width, channels = larger.shape
    rows, gap = -(-count // columns), scale
    picture = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, channels), 128, dtype=np.uint8)
    for number, image in enumerate(larger):
        top, left = number // columns * (height + gap), number % columns * (width + gap)
        picture[top : top + height, left : left + width] = image
    return picture


def write_png(pixels: Pixels, path: Path) -> None:
    """Write (h, w, c) to the new file ``path``, whole or not at all."""
    # Late: Pillow is optional, and latents need none.
    from lightscale.data_pipeline.augmentation.pillow import as_image  # noqa: PLC0415

    with whole_file(path) as temporary:
        as_image(pixels).save(temporary, format="PNG")


def write_latents(latents: NDArray[np.float32], labels: Sequence[str], path: Path) -> None:
    """Write (b, h, w, c) and the names of their classes as `data prepare --latents` reads them, whole or not at all."""
    with whole_file(path) as temporary, temporary.open("wb") as file:
        np.savez(file, latents=latents, labels=np.array(labels))
