"""Samplers of diffusion models: DDPM and DDIM, on some of the timesteps, with classifier-free guidance; fp64, no torch.

    x̂ = (x_t - sqrt(1 - ᾱ_t) ε) / sqrt(ᾱ_t), cut off at the range of pixels, if it has any; ε follows it
    DDIM   x_s = sqrt(ᾱ_s) x̂ + sqrt(1 - ᾱ_s) ε
    DDPM   x_s ~ N(sqrt(ᾱ_s) β / (1 - ᾱ_t) x̂ + sqrt(α) (1 - ᾱ_s) / (1 - ᾱ_t) x_t, (1 - ᾱ_s) / (1 - ᾱ_t) β)

with s the timestep that follows t, α = ᾱ_t / ᾱ_s and β = 1 - α: arXiv 2010.02502, eq. 12 with η = 0, and arXiv
2006.11239, eq. 7, on some of the timesteps (arXiv 2102.09672). With guidance w the prediction is that without a class
plus w times the difference to that of the class (arXiv 2207.12598 with w - 1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.augmentation.draws import Draws
from lightscale.data_pipeline.augmentation.noise import Prediction, ScheduleName, signal_shares

SamplerName = Literal["ddim", "ddpm"]
Array = NDArray[np.float64]
Predict = Callable[[Array, int, NDArray[np.int64]], Array]
"""Noised images (b, n, p), their timestep, and classes (b,) -> predictions (b, n, p)."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A way to draw images by a model that was trained with ``schedule``, ``timesteps`` and ``prediction``."""

    name: SamplerName
    schedule: ScheduleName
    timesteps: int
    prediction: Prediction
    steps: int
    """Timesteps that are visited, at most all."""
    guidance: float
    """w; 1: predictions with the class alone."""
    no_class: int
    """The number that stands for no class."""
    low: Array
    high: Array
    """(p,) range of the scaled pixels of a patch."""
    seed: int

    def draw(self, predict: Predict, classes: Sequence[int], shape: tuple[int, int]) -> Array:
        """Images (b, n, p), scaled pixels, of ``classes`` (b,); ``shape``: (n, p)."""
        shares = signal_shares(self.schedule, self.timesteps)
        labels = np.array(classes, dtype=np.int64)
        numbers = range(len(labels))
        x = np.stack([Draws(self.seed, number, 0).normal(*shape) for number in numbers])
        visited = visited_timesteps(self.timesteps, self.steps)
        for step, timestep in enumerate(visited, start=1):
            share = shares[timestep]
            following = shares[visited[step]] if step < len(visited) else 1.0
            clean = self._clean(x, self._guided(predict, x, timestep, labels), share)
            noise = (x - np.sqrt(share) * clean) / np.sqrt(1 - share)
            if self.name == "ddim":
                x = np.sqrt(following) * clean + np.sqrt(1 - following) * noise
                continue
            alpha = share / following
            x = (np.sqrt(following) * (1 - alpha) * clean + np.sqrt(alpha) * (1 - following) * x) / (1 - share)
            if step < len(visited):
                spread = np.sqrt((1 - following) / (1 - share) * (1 - alpha))
                x = x + spread * np.stack([Draws(self.seed, number, step).normal(*shape) for number in numbers])
        return x

    def _guided(self, predict: Predict, x: Array, timestep: int, labels: NDArray[np.int64]) -> Array:
        if self.guidance == 1:
            return predict(x, timestep, labels)
        both = predict(np.concatenate([x, x]), timestep, np.concatenate([labels, np.full_like(labels, self.no_class)]))
        of_class, without = np.split(both, 2)
        found: Array = without + self.guidance * (of_class - without)
        return found

    def _clean(self, x: Array, predicted: Array, share: float) -> Array:
        """The image that the model sees in x."""
        if self.prediction == "epsilon":
            clean = (x - np.sqrt(1 - share) * predicted) / np.sqrt(share)
        else:
            clean = np.sqrt(share) * x - np.sqrt(1 - share) * predicted
        return np.clip(clean, self.low, self.high)


def visited_timesteps(timesteps: int, steps: int) -> list[int]:
    """``steps`` of the timesteps, evenly from the last one to the first."""
    if steps == 1:
        return [timesteps - 1]
    return [round(number * (timesteps - 1) / (steps - 1)) for number in reversed(range(steps))]
