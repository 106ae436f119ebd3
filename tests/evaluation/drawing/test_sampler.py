"""Samplers against the papers' formulas, written out number by number; measures of images against closed forms."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightscale.data_pipeline.augmentation.draws import Draws
from lightscale.data_pipeline.augmentation.noise import signal_shares
from lightscale.data_pipeline.loading.images import as_patches
from lightscale.evaluation.drawing.measures import classifier_score, coverage, frechet_distance, spatial_channels
from lightscale.evaluation.drawing.pictures import as_grid, as_pixels
from lightscale.evaluation.drawing.sampler import Sampler, visited_timesteps

Array = NDArray[np.float64]
SHAPE, CLASSES = (3, 2), [1, 0, 1]
WIDE = np.full(2, 1e9)


def sampler(**more: Any) -> Sampler:
    fields: dict[str, Any] = {
        "name": "ddim",
        "schedule": "cosine",
        "timesteps": 40,
        "prediction": "epsilon",
        "steps": 7,
        "guidance": 1.0,
        "no_class": 2,
        "low": -WIDE,
        "high": WIDE,
        "seed": 5,
    }
    return Sampler(**{**fields, **more})


def epsilon(x: float, timestep: int, label: int) -> float:
    """What stands for a model: of each number by itself, and of its class."""
    return math.tanh(0.7 * x + 0.3 * label) + 0.01 * timestep


def model(prediction: str, schedule: str = "cosine", timesteps: int = 40) -> Any:
    shares = signal_shares(schedule, timesteps)  # type: ignore[arg-type]

    def predict(x: Array, timestep: int, classes: NDArray[np.int64]) -> Array:
        found = np.empty_like(x)
        for place in np.ndindex(*x.shape):
            noise = epsilon(x[place], timestep, int(classes[place[0]]))
            if prediction == "v":
                # Of x = sqrt(ᾱ) x̂ + sqrt(1 - ᾱ) ε, v = sqrt(ᾱ) ε - sqrt(1 - ᾱ) x̂.
                share = shares[timestep]
                clean = (x[place] - math.sqrt(1 - share) * noise) / math.sqrt(share)
                noise = math.sqrt(share) * noise - math.sqrt(1 - share) * clean
            found[place] = noise
        return found

    return predict


def by_hand(made: Sampler) -> Array:
    """DDIM's equation 12 and DDPM's algorithm 2, with the variances of the visited timesteps; nothing is cut off."""
    shares = signal_shares(made.schedule, made.timesteps)
    visited = [round(i * (made.timesteps - 1) / (made.steps - 1)) for i in range(made.steps)][::-1]
    found = np.empty((len(CLASSES), *SHAPE))
    for number, label in enumerate(CLASSES):
        noises = [Draws(made.seed, number, step).normal(*SHAPE) for step in range(made.steps + 1)]
        for place in np.ndindex(*SHAPE):
            x = noises[0][place]
            for step, t in enumerate(visited, start=1):
                a, b = shares[t], shares[visited[step]] if step < made.steps else 1.0
                w = made.guidance
                noise = (
                    w * epsilon(x, t, label) + (1 - w) * epsilon(x, t, made.no_class)
                    if w != 1
                    else epsilon(x, t, label)
                )
                if made.name == "ddim":
                    x = math.sqrt(b) * (x - math.sqrt(1 - a) * noise) / math.sqrt(a) + math.sqrt(1 - b) * noise
                    continue
                beta = 1 - a / b
                x = (x - beta / math.sqrt(1 - a) * noise) / math.sqrt(1 - beta)
                if step < made.steps:
                    x += math.sqrt(beta * (1 - b) / (1 - a)) * noises[step][place]
            found[(number, *place)] = x
    return found


@pytest.mark.parametrize("name", ["ddim", "ddpm"])
@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("guidance", [0.0, 1.0, 3.5])
def test_samplers_are_those_of_the_papers(name: str, prediction: str, guidance: float) -> None:
    for schedule in ("linear", "cosine"):
        made = sampler(name=name, prediction=prediction, guidance=guidance, schedule=schedule)
        found = made.draw(model(prediction, schedule), CLASSES, SHAPE)
        np.testing.assert_allclose(found, by_hand(made), rtol=1e-8, atol=1e-8)


def test_an_image_does_not_depend_on_the_others() -> None:
    for name in ("ddim", "ddpm"):
        made = sampler(name=name, guidance=2.0)
        whole = made.draw(model("epsilon"), CLASSES, SHAPE)
        assert np.array_equal(made.draw(model("epsilon"), CLASSES[:2], SHAPE), whole[:2])
        assert not np.array_equal(whole[0], whole[2])
        assert not np.array_equal(
            sampler(name=name, guidance=2.0, seed=6).draw(model("epsilon"), CLASSES, SHAPE), whole
        )


def test_an_exact_model_draws_its_image() -> None:
    """Of data that are one image the best prediction is known: every sampler ends there, whatever the noise."""
    image, shares = np.array([[0.5, -0.25], [1.0, 0.0], [-1.0, 0.75]]), signal_shares("linear", 1000)

    def predict(x: Array, timestep: int, classes: NDArray[np.int64]) -> Array:
        noise: Array = (x - math.sqrt(shares[timestep]) * image) / math.sqrt(1 - shares[timestep])
        return noise

    for name, steps in (("ddim", 1), ("ddim", 50), ("ddpm", 50), ("ddpm", 1000)):
        made = sampler(name=name, steps=steps, schedule="linear", timesteps=1000)
        np.testing.assert_allclose(made.draw(predict, [0], SHAPE)[0], image, atol=1e-9)


def test_pixels_stay_in_their_range() -> None:
    made = sampler(low=np.array([-0.5, -1.0]), high=np.array([0.5, 1.0]))
    found = made.draw(model("epsilon"), CLASSES, SHAPE)
    assert found[..., 0].min() >= -0.5 and found[..., 0].max() <= 0.5
    assert np.abs(found).max() > 0.5


def test_timesteps_are_visited_from_last_to_first() -> None:
    assert visited_timesteps(1000, 1000) == list(range(999, -1, -1))
    assert visited_timesteps(1000, 4) == [999, 666, 333, 0]
    assert visited_timesteps(1000, 1) == [999]
    assert len(set(visited_timesteps(50, 37))) == 37


# ----- measures -----------------------------------------------------------------------------------------------------


def test_the_frechet_distance_of_normal_distributions() -> None:
    """Of commuting covariances: |m_1 - m_2|² + Σ (s_1 - s_2)²; and by the root of a product that is not symmetric."""
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=(400, 5)), generator.normal(size=(300, 5)) @ generator.normal(size=(5, 5)) + 1
    moments = [(one.mean(0), np.cov(one, rowvar=False)) for one in (first, second)]
    (m1, c1), (m2, c2) = moments
    values = np.linalg.eigvals(c1 @ c2)
    expected = np.square(m1 - m2).sum() + np.trace(c1) + np.trace(c2) - 2 * np.sqrt(values).real.sum()
    assert frechet_distance(first, second) == pytest.approx(expected, rel=1e-10)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(first, first + 2) == pytest.approx(20, rel=1e-9)
    assert frechet_distance(first, 3 * first) == pytest.approx(np.square(2 * m1).sum() + 4 * np.trace(c1), rel=1e-9)
    # Fewer images than features, so that covariances are singular.
    assert frechet_distance(first[:3], first[:3]) == pytest.approx(0, abs=1e-6)


def test_precision_and_recall_of_points_on_a_line() -> None:
    real, drawn = np.arange(10.0)[:, None], np.array([[0.0], [0.5], [4.2], [20.0]])
    # Every real point has its third neighbour 2 or 3 away; of the drawn ones 20 is alone.
    assert coverage(real, drawn).precision == 0.75
    # The third neighbour of the drawn ones is at least 15.5 away: they cover all.
    assert coverage(real, drawn).recall == 1.0
    assert coverage(real, real[:4]) == (1.0, 0.7)


def test_the_classifier_score_counts_the_classes_that_are_told_apart() -> None:
    for count in (2, 7):
        sure = np.log(np.maximum(np.eye(count).repeat(3, axis=0), 1e-300))
        assert classifier_score(sure) == pytest.approx(count, rel=1e-12)
        with np.errstate(divide="ignore"):
            assert classifier_score(np.log(np.eye(count))) == pytest.approx(count, rel=1e-12)
        # The same answer for all, however sure; nothing but one class, among others.
        assert classifier_score(sure[:3]) == pytest.approx(1, rel=1e-12)
        assert classifier_score(np.log(np.full((5, count), 1 / count))) == pytest.approx(1, rel=1e-12)
    # Of two images with the probabilities (p, 1 - p) and (1 - p, p): log 2 less the entropy of p.
    p = 0.9
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert classifier_score(np.log([[p, 1 - p], [1 - p, p]])) == pytest.approx(2 / math.exp(entropy), rel=1e-12)
    # Three of four images are of the first class: the exponential of the entropy of (3/4, 1/4).
    uneven = np.log(np.maximum(np.eye(2)[[0, 0, 0, 1]], 1e-300))
    assert classifier_score(uneven) == pytest.approx(4 / 3**0.75, rel=1e-12)


def test_classifier_scores_are_the_sum_written_out() -> None:
    rows = np.random.default_rng(1).dirichlet(np.full(6, 0.3), size=50)
    marginal = [math.fsum(rows[:, k]) / 50 for k in range(6)]
    terms = [p * math.log(p / marginal[k]) for row in rows.tolist() for k, p in enumerate(row)]
    assert classifier_score(np.log(rows)) == pytest.approx(math.exp(math.fsum(terms) / 50), rel=1e-12)


def test_spatial_features_see_what_a_mean_over_places_does_not() -> None:
    """Normal features that are moved from place to place: their means over places have one distribution."""
    generator = np.random.default_rng(2)
    first = generator.normal(size=(500, 6, 2)) + np.array([3.0, 0, 0, 0, 0, 0])[:, None]
    turned = np.roll(first, 1, axis=1)
    assert frechet_distance(first.mean(1), turned.mean(1)) == pytest.approx(0, abs=1e-9)
    # Two means of 3 at other places, in two channels; estimated means and covariances are those of 500 samples.
    expected = 2 * 2 * 3**2
    assert frechet_distance(first.reshape(500, -1), turned.reshape(500, -1)) == pytest.approx(expected, rel=0.1)


def test_spatial_features_are_as_many_as_a_mean_has() -> None:
    assert [spatial_channels(16, 64), spatial_channels(196, 768), spatial_channels(256, 192)] == [4, 3, 1]
    assert spatial_channels(17 * 17, 2048) == 7


# ----- pictures -----------------------------------------------------------------------------------------------------


def test_patches_become_the_image_they_are_of() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 6, 8, 3), dtype=np.uint8)
    assert np.array_equal(as_pixels(as_patches(images, (3, 2), 0), (2, 4), (3, 2), 3), images)
    picture = as_grid(images, 2, scale=2)
    assert picture.shape == (2 * 12 + 2, 2 * 16 + 2, 3)
    assert np.array_equal(picture[14:26:2, 0:16:2], images[2])
    assert (picture[12:14] == 128).all() and (picture[14:, 16:] == 128).all()
