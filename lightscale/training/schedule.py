"""The learning rate as a pure function of the step."""

import math

from lightscale.config.schema import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of ``step`` (from 1) of ``total_steps``.

    Warm-up is linear from 0 and reaches ``lr`` at its last step. Then: ``constant``; ``cosine`` or ``linear`` down to
    ``lr * min_lr_ratio`` at the last step; ``wsd`` constant, then linear down to that over the last ``decay_steps``;
    ``inverse_sqrt`` lr·sqrt(warmup_steps / step), which does not depend on the length of the run.
    """
    warmup = optimizer.warmup_steps
    if step <= warmup:
        return optimizer.lr * step / warmup
    lowest = optimizer.lr * optimizer.min_lr_ratio
    if optimizer.schedule == "cosine":
        done = (step - warmup) / (total_steps - warmup)
        return lowest + (optimizer.lr - lowest) * 0.5 * (1 + math.cos(math.pi * done))
    if optimizer.schedule == "linear":
        return lowest + (optimizer.lr - lowest) * (total_steps - step) / (total_steps - warmup)
    if optimizer.schedule == "inverse_sqrt":
        return optimizer.lr * math.sqrt(warmup / step)
    if optimizer.schedule == "wsd":
        assert optimizer.decay_steps is not None
        left = total_steps - step
        return lowest + (optimizer.lr - lowest) * min(1.0, left / optimizer.decay_steps)
    return optimizer.lr
