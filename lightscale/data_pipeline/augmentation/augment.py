"""All changes of images, in their order, and the labels of mixed ones.

    image    random resized crop ─▶ flip ─▶ RandAugment ─▶ random erasing      a function of (seed, turn)
    pair     mixup or CutMix of turns 2 m and 2 m + 1, both ways               a function of (seed, m)

A turn is the number of an image in the data of a run, counted through the epochs: it is another one in each. Images
remain bytes: a mixed pixel is rounded. Each change has random numbers of its own, so that switching one
on leaves those of the others.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.config.augmentation import AugmentationConfig
from lightscale.data_pipeline.augmentation import boxes
from lightscale.data_pipeline.augmentation.draws import Draws

Pixels = NDArray[Any]
"""uint8; latents, floats, are flipped alone."""
# Keys of random numbers.
_CROP, _FLIP, _RAND_AUGMENT, _ERASE, _MIX = range(5)


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """The changes of a run's training images."""

    config: AugmentationConfig
    size: tuple[int, int]
    """(height, width) of the results."""
    mean: Sequence[float]
    """Of the pixels of each channel, 0 to 1, with their ``std``; for erased rectangles."""
    std: Sequence[float]

    def images(self, read: Mapping[int, Pixels]) -> dict[int, Pixels]:
        """``read``, (h, w, c) pixels by their turns, changed one by one."""
        workers = min(self.config.workers, len(read))
        if workers < 2:
            return {turn: self.image(pixels, turn) for turn, pixels in read.items()}
        # Threads of a pool that is kept would be missing in a process that was forked after it.
        with ThreadPoolExecutor(workers) as pool:
            return dict(zip(read, pool.map(self.image, read.values(), read), strict=True))

    def image(self, pixels: Pixels, turn: int) -> Pixels:
        """The image of ``turn``, (h, w, c) of any size, at ``size``."""
        config = self.config
        if config.crop_scale is not None:
            # Late: Pillow is optional.
            from lightscale.data_pipeline.augmentation.pillow import resized  # noqa: PLC0415

            draws = self._draws(turn, _CROP)
            box = boxes.random_crop(pixels.shape[:2], draws, scale=config.crop_scale, ratio=config.crop_ratio)
            pixels = resized(pixels, box, self.size)
        else:
            pixels = centre_crop(pixels, self.size)
        if self._draws(turn, _FLIP).uniform() < config.horizontal_flip:
            pixels = pixels[:, ::-1]
        if config.rand_augment_ops:
            from lightscale.data_pipeline.augmentation.rand_augment import rand_augment  # noqa: PLC0415

            draws = self._draws(turn, _RAND_AUGMENT)
            pixels = rand_augment(pixels, draws, ops=config.rand_augment_ops, magnitude=config.rand_augment_magnitude)
        return self._erased(pixels, self._draws(turn, _ERASE))

    def mixed(self, images: Mapping[int, Pixels], turn: int) -> tuple[Pixels, float]:
        """The image of ``turn`` mixed with its neighbour's, and its own share; of the pair both are in ``images``."""
        config, own, other = self.config, images[turn], images[neighbour(turn)]
        draws = self._draws(turn // 2, _MIX)
        if draws.uniform() >= config.mix_probability:
            return own, 1.0
        # Drawn in any case: what it decides leaves the numbers behind it.
        takes_cutmix = draws.uniform() < config.cutmix_probability
        if not (config.mixup_alpha and config.cutmix_alpha):
            takes_cutmix = config.cutmix_alpha > 0
        if not takes_cutmix:
            share = draws.beta(config.mixup_alpha)
            return np.rint(share * own + (1 - share) * other.astype(np.float64)).astype(np.uint8), share
        top, left, height, width = boxes.cut(self.size, draws, draws.beta(config.cutmix_alpha))
        found = own.copy()
        found[top : top + height, left : left + width] = other[top : top + height, left : left + width]
        return found, 1 - height * width / (self.size[0] * self.size[1])

    def _erased(self, pixels: Pixels, draws: Draws) -> Pixels:
        config = self.config
        if draws.uniform() >= config.random_erasing:
            return pixels
        box = boxes.erased(self.size, draws, scale=config.erasing_scale, ratio=config.erasing_ratio)
        if box is None:
            return pixels
        top, left, height, width = box
        channels = pixels.shape[2]
        values = np.broadcast_to(self.mean, (height, width, channels))
        if config.erasing_value == "noise":
            values = values + draws.normal(height, width, channels) * np.asarray(self.std)
        pixels = pixels.copy()
        pixels[top : top + height, left : left + width] = np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8)
        return pixels

    def _draws(self, turn: int, change: int) -> Draws:
        return Draws(self.config.seed, turn, change)


def neighbour(turn: int) -> int:
    """The turn that is mixed with ``turn``: pairs of neighbours, of any batch size and layout the same."""
    return turn ^ 1


def centre_crop(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """The middle of (h, w, c) pixels, at least ``size``."""
    top, left, height, width = boxes.centre(*size, (pixels.shape[0], pixels.shape[1]))
    return pixels[top : top + height, left : left + width]


def soft_labels(pairs: Sequence[tuple[int, int, float]], *, num_labels: int, smoothing: float) -> NDArray[np.float32]:
    """(b, num_labels): of (own label, other label, own share) each, with ``smoothing`` of it on all labels alike."""
    found = np.zeros((len(pairs), num_labels))
    for row, (own, other, share) in zip(found, pairs, strict=True):
        row[own] += share
        row[other] += 1 - share
    return ((1 - smoothing) * found + smoothing / num_labels).astype(np.float32)
