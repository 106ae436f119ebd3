"""The schedules by name. A new one is one file and one line here, and its name in ``OptimizerConfig.schedule``."""

from lightscale.config.schedules.constant import Constant
from lightscale.config.schedules.decays import DECAYS
from lightscale.config.schedules.interface import Schedule, Settings
from lightscale.config.schedules.inverse_sqrt import InverseSqrt
from lightscale.config.schedules.range_test import RangeTest
from lightscale.config.schedules.whole_decay import WholeDecay
from lightscale.config.schedules.wsd import WarmupStableDecay

SCHEDULES: dict[str, Schedule] = {
    "constant": Constant(),
    **{shape: WholeDecay(shape) for shape in DECAYS},
    "inverse_sqrt": InverseSqrt(),
    "wsd": WarmupStableDecay(),
    "range_test": RangeTest(),
}


def schedule_of(settings: Settings) -> Schedule:
    """The schedule that section [optimizer] names."""
    return SCHEDULES[settings.schedule]


def learning_rate(settings: Settings, step: int, total_steps: int) -> float:
    """The learning rate of ``step`` (from 1) of ``total_steps``.

    The warm-up is linear from 0 and reaches ``settings.lr`` at its last step; the schedule decides the rest.
    """
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    return settings.lr * schedule_of(settings).share(settings, step, total_steps)
