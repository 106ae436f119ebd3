"""RandAugment (Cubuk et al. 2020, arXiv 1909.13719) by Pillow, with torchvision's operations and strengths.

Each of some operations is drawn of 14, with replacement. Strength m of 0 to 30 is m / 30 of the most:

    shear 0.3; translation 150/331 of the extent; rotation 30°; brightness, colour, contrast, sharpness 1 ± 0.9;
    posterisation to 8 - 4 m / 30 bits, rounded; solarisation from 255 (1 - m / 30) on

Shears, translations, rotations and the four enhancements take either sign. Pixels from outside are black, and
geometry takes the nearest pixel.
"""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from lightscale.data_pipeline.augmentation.draws import Draws
from lightscale.data_pipeline.augmentation.pillow import Pixels, as_image, as_pixels

MOST = 30
"""The largest magnitude."""
_SHEAR, _TRANSLATE, _ROTATE, _ENHANCE, _BITS = 0.3, 150 / 331, 30.0, 0.9, 4

Operation = Callable[[Image.Image, float], Image.Image]
"""Of an image and its strength, from 0, or with a sign from -1, to 1."""


def _affine(image: Image.Image, *rows: float) -> Image.Image:
    """Pixel (x, y) of the result is that at (a x + b y + c, d x + e y + f), of ``rows`` a to f."""
    return image.transform(image.size, Image.Transform.AFFINE, rows, resample=Image.Resampling.NEAREST)


def _translation(extent: int, strength: float) -> int:
    return int(_TRANSLATE * extent * strength)


def _enhanced(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    return lambda image, strength: kind(image).enhance(1 + _ENHANCE * strength)


SIGNED: dict[str, Operation] = {
    "shear_x": lambda image, strength: _affine(image, 1, _SHEAR * strength, 0, 0, 1, 0),
    "shear_y": lambda image, strength: _affine(image, 1, 0, 0, _SHEAR * strength, 1, 0),
    "translate_x": lambda image, strength: _affine(image, 1, 0, -_translation(image.width, strength), 0, 1, 0),
    "translate_y": lambda image, strength: _affine(image, 1, 0, 0, 0, 1, -_translation(image.height, strength)),
    "rotate": lambda image, strength: image.rotate(_ROTATE * strength, resample=Image.Resampling.NEAREST),
    "brightness": _enhanced(ImageEnhance.Brightness),
    "color": _enhanced(ImageEnhance.Color),
    "contrast": _enhanced(ImageEnhance.Contrast),
    "sharpness": _enhanced(ImageEnhance.Sharpness),
}
UNSIGNED: dict[str, Operation] = {
    "identity": lambda image, strength: image,
    "posterize": lambda image, strength: ImageOps.posterize(image, 8 - round(_BITS * strength)),
    # 255 at strength 0: the brightest alone are inverted, as torchvision has it.
    "solarize": lambda image, strength: ImageOps.solarize(image, math.ceil(255 * (1 - strength))),
    "autocontrast": lambda image, strength: ImageOps.autocontrast(image),
    "equalize": lambda image, strength: ImageOps.equalize(image),
}
NAMES = sorted({**SIGNED, **UNSIGNED})


def apply(name: str, pixels: Pixels, strength: float) -> Pixels:
    """Operation ``name`` on (h, w, c) pixels; ``strength``: from 0, or of ``SIGNED`` from -1, to 1."""
    return as_pixels({**SIGNED, **UNSIGNED}[name](as_image(pixels), strength), pixels.shape[2])


def rand_augment(pixels: Pixels, draws: Draws, *, ops: int, magnitude: int) -> Pixels:
    """``ops`` operations of strength ``magnitude``, 0 to 30, on (h, w, c) pixels."""
    for _ in range(ops):
        name, sign = NAMES[draws.below(len(NAMES))], draws.uniform()
        is_negative = name in SIGNED and sign < 0.5
        pixels = apply(name, pixels, (-1 if is_negative else 1) * magnitude / MOST)
    return np.ascontiguousarray(pixels)
