"""The peak until the end."""

from lightscale.config.schedules.interface import Schedule, Settings


class Constant(Schedule):
    """The peak until the end."""

    def share(self, settings: Settings, step: int, total_steps: int) -> float:
        """See ``Schedule``."""
        return 1.0

    def fixed_until(self, settings: Settings, total_steps: int) -> int:
        """See ``Schedule``."""
        return total_steps

    def stable_steps(self, settings: Settings, total_steps: int) -> range | None:
        """See ``Schedule``."""
        return range(settings.warmup_steps, total_steps + 1)
