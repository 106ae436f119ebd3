"""RandAugment's operations and the scaling of crops, by Pillow, beside the same written out pixel by pixel."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

pytest.importorskip("PIL", reason="Pillow changes images")

from lightscale.data_pipeline.augmentation import rand_augment as module
from lightscale.data_pipeline.augmentation.draws import Draws
from lightscale.data_pipeline.augmentation.pillow import resized

Floats = NDArray[np.float64]
SHAPES = [(9, 12, 3), (8, 8, 1), (32, 20, 3)]
STRENGTHS = (0.0, 0.3, 1.0)


def picture(shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    return np.random.default_rng(sum(shape)).integers(20, 231, shape).astype(np.uint8)


def moved(x: Floats, source_of: object) -> Floats:
    """Each pixel is that where ``source_of`` of its middle lies; black outside."""
    found = np.zeros_like(x)
    for row, column in np.ndindex(x.shape[:2]):
        u, v = source_of(column + 0.5, row + 0.5)  # type: ignore[operator]
        if 0 <= u < x.shape[1] and 0 <= v < x.shape[0]:
            found[row, column] = x[math.floor(v), math.floor(u)]
    return found


def blended(x: Floats, other: Floats, strength: float) -> Floats:
    return np.clip(other + (1 + 0.9 * strength) * (x - other), 0, 255)


def grey(x: Floats) -> Floats:
    weights = np.array([0.299, 0.587, 0.114])
    return np.rint(x @ weights)[..., None] if x.shape[2] == 3 else x


def smooth(x: Floats) -> Floats:
    found = x.copy()
    for row, column in itertools.product(range(1, x.shape[0] - 1), range(1, x.shape[1] - 1)):
        window = x[row - 1 : row + 2, column - 1 : column + 2]
        found[row, column] = np.rint((window.sum(axis=(0, 1)) + 4 * x[row, column]) / 13)
    return found


def equalized(x: Floats) -> Floats:
    found = np.empty_like(x)
    for channel in range(x.shape[2]):
        counts = np.bincount(x[..., channel].astype(int).ravel(), minlength=256)
        used = counts[counts > 0]
        step = (used.sum() - used[-1]) // 255
        table = np.arange(256) if step == 0 else (np.cumsum(counts) - counts + step // 2) // step
        found[..., channel] = np.clip(table, 0, 255)[x[..., channel].astype(int)]
    return found


def stretched(x: Floats) -> Floats:
    low, high = x.min(axis=(0, 1)), x.max(axis=(0, 1))
    return (x - low) * 255 / (high - low)


def rotated(x: Floats, s: float) -> Floats:
    angle, (h, w, _) = math.radians(30 * s), x.shape
    cos, sin = math.cos(angle), math.sin(angle)
    return moved(
        x,
        lambda u, v: (
            cos * (u - w / 2) - sin * (v - h / 2) + w / 2,
            sin * (u - w / 2) + cos * (v - h / 2) + h / 2,
        ),
    )


PLAIN = {
    "identity": lambda x, s: x,
    "shear_x": lambda x, s: moved(x, lambda u, v: (u + 0.3 * s * v, v)),
    "shear_y": lambda x, s: moved(x, lambda u, v: (u, v + 0.3 * s * u)),
    "translate_x": lambda x, s: moved(x, lambda u, v: (u - int(150 / 331 * s * x.shape[1]), v)),
    "translate_y": lambda x, s: moved(x, lambda u, v: (u, v - int(150 / 331 * s * x.shape[0]))),
    "rotate": rotated,
    "brightness": lambda x, s: blended(x, np.zeros_like(x), s),
    "color": lambda x, s: blended(x, np.broadcast_to(grey(x), x.shape), s),
    "contrast": lambda x, s: blended(x, np.full_like(x, np.rint(grey(x).mean())), s),
    "sharpness": lambda x, s: blended(x, smooth(x), s),
    "posterize": lambda x, s: x - x % 2 ** round(4 * s),
    "solarize": lambda x, s: np.where(x >= 255 * (1 - s), 255 - x, x),
    "autocontrast": lambda x, s: stretched(x),
    "equalize": lambda x, s: equalized(x),
}


@pytest.mark.parametrize("name", PLAIN)
def test_operations_are_the_plain_ones(name: str) -> None:
    for shape, strength in itertools.product(SHAPES, STRENGTHS):
        for sign in (1, -1) if name in module.SIGNED else (1,):
            x = picture(shape)
            found = module.apply(name, x, sign * strength)
            assert (found.shape, found.dtype) == (x.shape, np.uint8)
            off = np.abs(found.astype(float) - PLAIN[name](x.astype(float), sign * strength))
            # Pillow cuts off or rounds; of geometry, a pixel's middle may lie on an edge.
            is_geometry = name.startswith(("shear", "rotate"))
            assert (off > 1.01).mean() <= (0.01 if is_geometry else 0), (shape, sign * strength, off.max())


def test_each_operation_comes_as_often_with_either_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(PLAIN) == module.NAMES
    seen: Counter[tuple[str, float]] = Counter()

    def apply(name: str, pixels: NDArray[np.uint8], strength: float) -> NDArray[np.uint8]:
        seen[name, strength] += 1
        return pixels

    monkeypatch.setattr(module, "apply", apply)
    for number in range(2000):
        module.rand_augment(picture((4, 4, 3)), Draws(number), ops=2, magnitude=9)
    assert seen.total() == 4000
    assert set(seen) == {(name, 0.3) for name in PLAIN} | {(name, -0.3) for name in module.SIGNED}
    names: Counter[str] = Counter()
    for (name, _), count in seen.items():
        names[name] += count
    # Five standard deviations of a binomial.
    assert all(abs(count - 4000 / 14) < 82 for count in names.values()), names
    assert all(abs(seen[name, 0.3] - seen[name, -0.3]) < 85 for name in module.SIGNED), seen


@pytest.mark.parametrize("size", [(5, 7), (16, 12), (40, 48)])
def test_crops_are_scaled_as_torch_scales_them(size: tuple[int, int]) -> None:
    x, box = picture((24, 30, 3)), (3, 5, 17, 20)
    found = resized(x, box, size)
    part = torch.tensor(x[3:20, 5:25]).double().permute(2, 0, 1)[None]
    expected = F.interpolate(part, size=size, mode="bicubic", antialias=True, align_corners=False)
    off = found - expected.clamp(0, 255)[0].permute(1, 2, 0).numpy()
    assert found.shape == (*size, 3)
    assert np.abs(off).max() < 1.6
    assert abs(off.mean()) < 0.1
