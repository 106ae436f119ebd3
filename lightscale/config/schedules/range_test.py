"""A learning rate that grows by one factor a step (arXiv 1506.01186, section 3.3, on a logarithmic scale)."""

from lightscale.config.schedules.interface import Schedule, Settings


class RangeTest(Schedule):
    """From ``min_lr_ratio`` at step 1 to the peak at the last step; ``lightscale lr-find`` trains with it."""

    def share(self, settings: Settings, step: int, total_steps: int) -> float:
        """See ``Schedule``."""
        done = (step - 1) / max(1, total_steps - 1)
        return float(settings.min_lr_ratio ** (1 - done))

    def fixed_until(self, settings: Settings, total_steps: int) -> int:
        """See ``Schedule``."""
        return 1

    def check(self, settings: Settings) -> None:
        """See ``Schedule``."""
        if settings.warmup_steps or not settings.min_lr_ratio:
            key = "warmup_steps" if settings.warmup_steps else "min_lr_ratio"
            right = "0" if settings.warmup_steps else "a share of lr above 0, such as 1e-5"
            raise ValueError(
                f'optimizer.schedule = "range_test" grows from min_lr_ratio at step 1; optimizer.{key} = '
                f"{getattr(settings, key)} must be {right}"
            )
