"""Warm-up, stable phase, decay (arXiv 2404.06395, section 4)."""

from typing import ClassVar

from lightscale.config.schedules.decays import DECAYS
from lightscale.config.schedules.interface import Schedule, Settings


class WarmupStableDecay(Schedule):
    """The peak, then a decay of the shape ``decay`` to ``min_lr_ratio`` over the last ``decay_steps``."""

    uses: ClassVar[frozenset[str]] = frozenset({"decay_steps", "decay"})

    def share(self, settings: Settings, step: int, total_steps: int) -> float:
        """See ``Schedule``."""
        assert settings.decay_steps is not None
        done = step - self.fixed_until(settings, total_steps)
        lowest = settings.min_lr_ratio
        left = DECAYS[settings.decay](max(0, done) / settings.decay_steps, settings.decay_power)
        return lowest + (1 - lowest) * left

    def fixed_until(self, settings: Settings, total_steps: int) -> int:
        """See ``Schedule``."""
        return total_steps - (settings.decay_steps or 0)

    def stable_steps(self, settings: Settings, total_steps: int) -> range | None:
        """See ``Schedule``."""
        return range(settings.warmup_steps, self.fixed_until(settings, total_steps) + 1)

    def check(self, settings: Settings) -> None:
        """See ``Schedule``."""
        if settings.decay_steps is None:
            raise ValueError('optimizer.schedule = "wsd" needs optimizer.decay_steps, a number of steps')

    def check_length(self, settings: Settings, total_steps: int) -> None:
        """See ``Schedule``."""
        if settings.warmup_steps > self.fixed_until(settings, total_steps):
            raise ValueError(
                f"optimizer.warmup_steps = {settings.warmup_steps} and optimizer.decay_steps = "
                f"{settings.decay_steps} together exceed the run's {total_steps} steps (train.steps or "
                f"train.tokens); use {total_steps // 10} and {max(1, total_steps // 5)}"
            )
