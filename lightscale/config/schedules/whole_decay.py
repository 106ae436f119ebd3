"""A decay from the end of the warm-up to the end of the run."""

from lightscale.config.schedules.decays import DECAYS
from lightscale.config.schedules.interface import Schedule, Settings


class WholeDecay(Schedule):
    """A decay of one shape from the peak, at the end of the warm-up, to ``min_lr_ratio`` at the last step."""

    def __init__(self, shape: str) -> None:
        """``shape``: its name in ``DECAYS``, and that of the schedule."""
        self._name, self._shape = shape, DECAYS[shape]

    def share(self, settings: Settings, step: int, total_steps: int) -> float:
        """See ``Schedule``."""
        done = (step - settings.warmup_steps) / (total_steps - settings.warmup_steps)
        lowest = settings.min_lr_ratio
        return lowest + (1 - lowest) * self._shape(done, settings.decay_power)

    def fixed_until(self, settings: Settings, total_steps: int) -> int:
        """See ``Schedule``."""
        return settings.warmup_steps

    def check_length(self, settings: Settings, total_steps: int) -> None:
        """See ``Schedule``."""
        if settings.warmup_steps >= total_steps:
            raise ValueError(
                f"optimizer.warmup_steps = {settings.warmup_steps} leaves none of the run's {total_steps} steps "
                f"(train.steps or train.tokens) for the {self._name} schedule; use {total_steps // 10}"
            )
