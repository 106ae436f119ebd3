"""Inverse square root of the step (arXiv 1706.03762, section 5.3)."""

import math

from lightscale.config.schedules.interface import Schedule, Settings


class InverseSqrt(Schedule):
    """√(warmup_steps / step)."""

    def share(self, settings: Settings, step: int, total_steps: int) -> float:
        """See ``Schedule``."""
        return math.sqrt(settings.warmup_steps / step)

    def fixed_until(self, settings: Settings, total_steps: int) -> int:
        """See ``Schedule``."""
        return total_steps

    def check(self, settings: Settings) -> None:
        """See ``Schedule``."""
        if not settings.warmup_steps:
            raise ValueError(
                'optimizer.schedule = "inverse_sqrt" falls from lr at the end of the warm-up: it needs '
                "optimizer.warmup_steps, a number of steps"
            )
