"""Noise of diffusion: its schedules, and noised images with what a model is to predict of them; without torch.

    x_t = sqrt(ᾱ_t) x + sqrt(1 - ᾱ_t) ε,   ᾱ_t = Π_{s <= t} (1 - β_s),   t = 0 … T - 1     (arXiv 2006.11239, eq. 4)
    predicted: ε, or v = sqrt(ᾱ_t) ε - sqrt(1 - ᾱ_t) x                                     (arXiv 2202.00512, app. D)

Timestep, noise and whether a label is dropped are a function of (seed, turn): see ``augment.py``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.augmentation.draws import Draws

ScheduleName = Literal["linear", "cosine"]
Prediction = Literal["epsilon", "v"]
# Keys of random numbers; the changes of images have those below.
_TIMESTEP, _NOISE, _DROP = 16, 17, 18


def betas(name: ScheduleName, timesteps: int) -> NDArray[np.float64]:
    """(T,) the variance β_t that each of ``timesteps`` adds.

    linear: evenly from 1e-4 to 0.02 at 1000 timesteps, scaled by 1000 / T for others, as ADM and DiT have it. cosine:
    ᾱ = cos² ((t / T + 0.008) / 1.008 · π / 2), β at most 0.999 (arXiv 2102.09672, eq. 17).
    """
    if name == "linear":
        scale = 1000 / timesteps
        # Of few timesteps the last ones would have more variance than there is.
        found = np.linspace(scale * 1e-4, scale * 0.02, timesteps)
    else:
        ends = np.cos((np.arange(timesteps + 1) / timesteps + 0.008) / 1.008 * math.pi / 2) ** 2
        found = 1 - ends[1:] / ends[:-1]
    return np.asarray(np.minimum(found, 0.999), dtype=np.float64)


def signal_shares(name: ScheduleName, timesteps: int) -> NDArray[np.float64]:
    """(T,) ᾱ_t."""
    return np.asarray(np.cumprod(1 - betas(name, timesteps)), dtype=np.float64)


class NoisedImages(NamedTuple):
    """Of rows of n tokens."""

    patches: NDArray[np.float32]
    """(b, n, p): noised pixels of each token's patch, scaled."""
    wanted: NDArray[np.float32]
    """(b, n, p): what the model is to predict of them."""
    conditions: NDArray[np.int32]
    """(b, 2): timestep, and class; its number is that of classes where it is dropped."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise of a run."""

    seed: int
    schedule: ScheduleName
    timesteps: int
    prediction: Prediction
    label_dropout: float
    """Probability that an image's class is dropped, for classifier-free guidance."""
    num_labels: int
    mean: Sequence[float]
    """Of the pixels of each channel, 0 to 1, or of latents, with their ``std``."""
    std: Sequence[float]

    def __call__(self, turns: Sequence[int], patches: NDArray[Any], labels: Sequence[int]) -> NoisedImages:
        """Of the images of ``turns`` with ``labels``; ``patches``: (b, n, p), channels last, bytes or latents."""
        shares = signal_shares(self.schedule, self.timesteps)
        noised, wanted, conditions = [], [], []
        for turn, patch, label in zip(turns, patches, labels, strict=True):
            image = scaled(patch, self.mean, self.std)
            timestep = Draws(self.seed, turn, _TIMESTEP).below(self.timesteps)
            noise = Draws(self.seed, turn, _NOISE).normal(*image.shape)
            is_dropped = Draws(self.seed, turn, _DROP).uniform() < self.label_dropout
            signal, spread = math.sqrt(shares[timestep]), math.sqrt(1 - shares[timestep])
            noised.append(signal * image + spread * noise)
            wanted.append(noise if self.prediction == "epsilon" else signal * noise - spread * image)
            conditions.append((timestep, self.num_labels if is_dropped else label))
        return NoisedImages(
            np.stack(noised).astype(np.float32),
            np.stack(wanted).astype(np.float32),
            np.array(conditions, dtype=np.int32),
        )

    def description(self) -> str:
        """All that decides its results; compared when a run is resumed."""
        return (
            f"seed {self.seed}, {self.schedule} schedule of {self.timesteps} timesteps, {self.prediction}, "
            f"label dropout {self.label_dropout}, {self.num_labels} labels, mean {list(self.mean)}, "
            f"std {list(self.std)}"
        )


def scaled(image: NDArray[Any], mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float64]:
    """(…, p) bytes of pixels, channels last -> (pixels / 255 - mean) / std; floats of latents -> (x - mean) / std."""
    shift, scale = (np.resize(values, image.shape[-1]) for values in (mean, std))
    values = image / 255 if image.dtype == np.uint8 else image.astype(np.float64)
    found: NDArray[np.float64] = (values - shift) / scale
    return found


def unscaled(values: NDArray[np.float64], mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float64]:
    """(…, p) -> values std + mean: ``scaled`` of latents backwards."""
    shift, scale = (np.resize(one, values.shape[-1]) for one in (mean, std))
    found: NDArray[np.float64] = values * scale + shift
    return found


def as_bytes(values: NDArray[np.float64], mean: Sequence[float], std: Sequence[float]) -> NDArray[np.uint8]:
    """(…, p) -> the nearest bytes: ``scaled`` of pixels backwards."""
    return np.rint(np.clip(unscaled(values, mean, std), 0, 1) * 255).astype(np.uint8)
