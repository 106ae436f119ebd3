"""Random numbers, rectangles, erasing, mixing and soft labels, by their distributions and written out."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from lightscale.config.augmentation import AugmentationConfig
from lightscale.data_pipeline.augmentation import boxes
from lightscale.data_pipeline.augmentation.augment import Augmentation, soft_labels
from lightscale.data_pipeline.augmentation.draws import Draws

SIZE = (16, 24)


def images(count: int = 2) -> dict[int, NDArray[np.uint8]]:
    generator = np.random.default_rng(0)
    return {turn: generator.integers(0, 256, (*SIZE, 3)).astype(np.uint8) for turn in range(count)}


def augmentation(**keys: object) -> Augmentation:
    config = AugmentationConfig.model_validate(keys)
    return Augmentation(config=config, size=SIZE, mean=[0.2, 0.4, 0.6], std=[0.05, 0.1, 0.02])


# ----- random numbers -----------------------------------------------------------------------------------------------


def test_numbers_are_those_of_their_key() -> None:
    def first(*key: int) -> list[float]:
        draws = Draws(*key)
        return [draws.uniform() for _ in range(100)]

    assert first(1, 2, 3) == first(1, 2, 3)
    keys = [(1, 2, 3), (1, 3, 2), (2, 2, 3), (0, 0, 0), (0, 0), (0,), (2**63 - 1, 2**40, 4)]
    all_numbers = {number for key in keys for number in first(*key)}
    assert len(all_numbers) == 100 * len(keys)


def test_distributions() -> None:
    count = 20_000
    uniform = np.sort([Draws(7, number).uniform() for number in range(count // 2)])
    one = Draws(8)
    chain = np.sort([one.uniform() for _ in range(count)])
    for found in (uniform, chain):
        # Kolmogorov and Smirnov's distance; 1.95 / √n is passed once in a thousand.
        assert np.abs(found - np.arange(len(found)) / len(found)).max() < 1.95 / math.sqrt(len(found))
    assert set(np.bincount([one.below(5) for _ in range(1000)]) > 150) == {True}
    for alpha in (0.05, 0.2, 0.8, 1.0, 2.0):
        found = np.array([one.beta(alpha) for _ in range(count)])
        variance = 1 / (4 * (2 * alpha + 1))
        fourth = variance**2 * 3 * (2 * alpha + 1) / (2 * alpha + 3)
        assert abs(found.mean() - 0.5) < 4 * math.sqrt(variance / count)
        spread = math.sqrt((fourth - variance**2) / count)
        assert abs(((found - 0.5) ** 2).mean() - variance) < 4 * spread, alpha
        assert abs(((found - 0.5) ** 4).mean() / fourth - 1) < 0.1, alpha
    normal = one.normal(200, 100)
    assert abs(normal.mean()) < 0.03
    assert abs(normal.std() - 1) < 0.03
    assert abs((normal**4).mean() - 3) < 0.2


# ----- rectangles ---------------------------------------------------------------------------------------------------


def test_crops_have_the_asked_area_and_ratio() -> None:
    height, width = 300, 400
    areas, ratios, places = [], [], []
    for number in range(4000):
        top, left, h, w = boxes.random_crop((height, width), Draws(number), scale=[0.1, 0.5], ratio=[0.5, 2])
        assert 0 <= top <= height - h
        assert 0 <= left <= width - w
        areas.append(h * w / (height * width))
        ratios.append(math.log(w / h))
        places.append((top / (height - h + 1), left / (width - w + 1)))
    assert min(areas) > 0.098 and max(areas) < 0.502
    assert abs(np.mean(areas) - 0.3) < 0.01
    assert abs(max(ratios) - math.log(2)) < 0.02 and abs(min(ratios) + math.log(2)) < 0.02
    assert np.abs(np.mean(places, axis=0) - 0.5).max() < 0.025
    # Nothing of these ratios fits: the largest in the middle.
    assert boxes.random_crop((100, 10), Draws(0), scale=[1.0, 1.0], ratio=[0.5, 2]) == (40, 0, 20, 10)
    assert boxes.random_crop((10, 100), Draws(0), scale=[1.0, 1.0], ratio=[0.5, 2]) == (0, 40, 10, 20)
    assert boxes.random_crop((7, 7), Draws(0), scale=[1.0, 1.0], ratio=[1.0, 1.0]) == (0, 0, 7, 7)
    assert boxes.random_crop((1, 1), Draws(0), scale=[0.08, 0.09], ratio=[0.75, 4 / 3]) == (0, 0, 1, 1)


def test_cut_rectangles_leave_the_share_but_at_edges() -> None:
    whole = 0
    for number in range(500):
        top, left, h, w = boxes.cut((100, 200), Draws(number), 0.75)
        assert 0 <= top <= top + h <= 100
        assert 0 <= left <= left + w <= 200
        whole += (h, w) == (50, 100)
        assert h * w <= 50 * 100
    # The middle is uniform, so that half of each extent keeps it whole.
    assert 80 < whole < 170
    assert boxes.cut((10, 10), Draws(0), 1.0)[2:] == (0, 0)


# ----- images -------------------------------------------------------------------------------------------------------


def test_flips_and_crops_of_larger_images() -> None:
    larger = np.random.default_rng(0).integers(0, 256, (20, 25, 3)).astype(np.uint8)
    middle = larger[2:18, 0:24]
    assert np.array_equal(augmentation(seed=1).image(larger, 0), middle)
    found = [augmentation(horizontal_flip=0.5).image(larger, turn) for turn in range(400)]
    flipped = [np.array_equal(one, middle[:, ::-1]) for one in found]
    kept = [np.array_equal(one, middle) for one in found]
    assert all(a != b for a, b in zip(flipped, kept, strict=True))
    assert 150 < sum(flipped) < 250


@pytest.mark.parametrize("value", ["noise", "mean"])
def test_a_rectangle_is_erased(value: str) -> None:
    made = augmentation(random_erasing=0.6, erasing_value=value, erasing_scale=[0.2, 0.4])
    white, erased, noise = np.full((*SIZE, 3), 255, dtype=np.uint8), 0, []
    for turn in range(300):
        found = made.image(white, turn)
        inside = (found != 255).any(axis=2)
        if not inside.any():
            continue
        erased += 1
        rows, columns = inside.any(axis=1), inside.any(axis=0)
        # A rectangle.
        assert np.array_equal(inside, rows[:, None] & columns[None])
        assert 0.15 < inside.mean() < 0.45
        noise.append(found[inside] / 255)
    assert 145 < erased < 215
    assert white.min() == 255, "the input is not written"
    of_all = np.concatenate(noise)
    assert np.abs(of_all.mean(axis=0) - [0.2, 0.4, 0.6]).max() < 0.003
    expected = [0.05, 0.1, 0.02] if value == "noise" else [0, 0, 0]
    assert np.abs(of_all.std(axis=0) - expected).max() < 0.002


def test_pairs_are_mixed_both_ways_by_one_share() -> None:
    read = images()
    seen = {"mixup": 0, "cutmix": 0, "none": 0}
    shares = []
    for pair in range(300):
        made = augmentation(seed=pair, mixup_alpha=0.8, cutmix_alpha=1.0, mix_probability=0.75)
        (one, share), (two, other_share) = made.mixed(read, 0), made.mixed(read, 1)
        assert share == other_share
        a, b = read[0].astype(float), read[1].astype(float)
        if share == 1.0 and np.array_equal(one, read[0]):
            assert np.array_equal(two, read[1])
            seen["none"] += 1
            continue
        shares.append(share)
        is_other = (one == read[1]).all(axis=2)
        if abs(is_other.mean() - (1 - share)) < 1e-9 and is_other.any():
            seen["cutmix"] += 1
            assert np.array_equal(one, np.where(is_other[..., None], read[1], read[0]))
            assert np.array_equal(two, np.where(is_other[..., None], read[0], read[1]))
        else:
            seen["mixup"] += 1
            assert np.abs(one - (share * a + (1 - share) * b)).max() <= 0.5
            assert np.abs(two - (share * b + (1 - share) * a)).max() <= 0.5
    # 75, and half of the rest each.
    assert 45 < seen["none"] < 110, seen
    assert 75 < seen["mixup"] < 150 and 75 < seen["cutmix"] < 150, seen
    assert min(shares) < 0.1


def test_one_kind_of_mixing_is_the_only_one() -> None:
    read = images()
    for key in ("mixup_alpha", "cutmix_alpha"):
        for seed in range(50):
            found, share = augmentation(seed=seed, **{key: 1.0}).mixed(read, 0)
            from_one = ((found == read[0]) | (found == read[1])).all()
            assert from_one == (key == "cutmix_alpha") or share > 0.999 or share < 0.001


def test_a_change_that_is_switched_on_leaves_the_others() -> None:
    read = images(40)
    flips = augmentation(horizontal_flip=0.5)
    both = augmentation(horizontal_flip=0.5, random_erasing=1.0, erasing_value="mean")
    for turn, pixels in read.items():
        one, two = flips.image(pixels, turn), both.image(pixels, turn)
        assert 0.6 < (one == two).mean() < 1


def test_soft_labels() -> None:
    found = soft_labels([(0, 2, 0.75), (1, 1, 0.4)], num_labels=4, smoothing=0.2)
    expected = [[0.65, 0.05, 0.25, 0.05], [0.05, 0.85, 0.05, 0.05]]
    assert np.allclose(found, expected, atol=1e-7)
    assert found.dtype == np.float32


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"crop_scale": [1.0, 0.08]}, r"crop_scale = \[1.0, 0.08\]: the least comes first; use \[0.08, 1.0\]"),
        ({"erasing_ratio": [3.3, 0.3]}, "task.augmentation.erasing_ratio"),
        ({"crop_scale": [0.0, 1.0]}, "greater than 0"),
        ({"rand_augment_magnitude": 31}, "less than or equal to 30"),
        ({"mixup_alpha": 3.0}, "less than or equal to 2"),
        ({"crop_ratio": [1.0]}, "at least 2 items"),
    ],
)
def test_bad_keys_are_named(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AugmentationConfig.model_validate(keys)
