"""A limit of the gradient norm that follows the norms of the steps so far (ZClip, arXiv 2504.02507)."""

import math
from collections.abc import Mapping

from lightscale.config.schema import AdaptiveClipConfig


class AdaptiveClip:
    """Running mean μ and deviation σ of a norm; what lies more than ``z_score`` deviations above the mean is a spike.

    A spike of z deviations is scaled down to μ + (z_score² / z) σ, the paper's reciprocal form: the larger it is, the
    less of it remains above the mean. The statistics take in the limit in its place, and not what remains, as the paper
    has it: norms that stay larger than before would shrink the deviation, and be clipped for ever. They are functions
    of the norms alone, which all ranks have, so that all ranks clip alike.
    """

    def __init__(self, config: AdaptiveClipConfig) -> None:
        self._config = config
        self.steps = 0
        """Number of norms in the statistics."""
        self.mean = 0.0
        self.variance = 0.0

    @property
    def limit(self) -> float:
        """Largest norm of the next step that is no spike; infinity while no limit is known.

        The first ``warmup_steps`` norms only begin the statistics. Norms that were all the same have no deviation, and
        a group without gradients would else be held at 0 for ever.
        """
        if self.steps < self._config.warmup_steps or self.variance == 0:
            return math.inf
        return self.mean + self._config.z_score * math.sqrt(self.variance)

    def clipped(self, norm: float) -> float:
        """What ``norm`` is scaled down to; the same where it is no spike."""
        if not norm > self.limit:
            return norm
        return self.mean + self._config.z_score**2 * self.variance / (norm - self.mean)

    def take_in(self, norm: float) -> None:
        """Add the norm of a step, at most the limit, to the statistics; one that is not finite is skipped.

        While they begin, all norms have the same weight; from then on an older one has ``decay`` of the next one's.
        """
        if not math.isfinite(norm):
            return
        norm = min(norm, self.limit)
        self.steps += 1
        weight = 1 / self.steps if self.steps <= self._config.warmup_steps else 1 - self._config.decay
        distance = norm - self.mean
        self.mean += weight * distance
        # About the mean of the same weights, so that both phases have one formula.
        self.variance = (1 - weight) * (self.variance + weight * distance**2)

    def state(self) -> dict[str, float]:
        """Number of norms, mean and variance, by the names in checkpoints."""
        return {"norm_steps": self.steps, "mean": self.mean, "variance": self.variance}

    def load(self, state: Mapping[str, float]) -> None:
        """Continue from such a state; from the beginning where it has none."""
        self.steps = int(state.get("norm_steps", 0))
        self.mean, self.variance = state.get("mean", 0.0), state.get("variance", 0.0)
