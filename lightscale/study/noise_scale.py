"""The gradient noise scale of a run, from the estimates of its steps (``training/measurements/gradient_noise.py``)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightscale.errors import UserError
from lightscale.runs.run_directory import RunDirectory, read_lines
from lightscale.study.history import kept_lines

_DRAWS = 2000
_SHARES = (2.5, 97.5)
"""Percentiles of the interval."""
_LEAST_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """Means over the measured steps."""

    steps: tuple[int, int]
    """The first and the last one."""
    measured: int
    """Number of them."""
    signal: float
    """Squared norm of the true gradient."""
    noise: float
    """Trace of the covariance of a token's gradient."""
    tokens: float | None
    """Noise over signal; None: the signal is too small beside its error."""
    interval: tuple[float, float] | None
    """Of ``tokens``, 95 %, by steps drawn again; None: the signal can be 0."""


def read_noise_scale(run: RunDirectory, *, last: int | None = None) -> NoiseScale:
    """Of the ``last`` measured steps of a run; None: of all. UserError where fewer than 2 steps are measured."""
    lines = kept_lines(read_lines(run.events), read_lines(run.metrics))
    measured = [line for line in lines if "gradient_noise" in line and "skipped" not in line][-last if last else None :]
    if len(measured) < _LEAST_STEPS:
        raise UserError(
            f"{run.path}: {len(measured)} steps with a measurement of the gradient noise are too few; train with "
            "metrics.gradient_noise_every"
        )
    return noise_scale(measured)


def noise_scale(lines: Sequence[Mapping[str, Any]]) -> NoiseScale:
    """Of lines of metrics.jsonl that have ``gradient_noise``."""
    # Means first: the mean of ratios would be wrong, and each signal can be near 0.
    table = np.array([[line["gradient_noise"][key] for key in ("signal", "noise")] for line in lines])
    signal, noise = (float(mean) for mean in table.mean(axis=0))
    rows = np.random.default_rng(0).integers(0, len(table), (_DRAWS, len(table)))
    drawn = table[rows].mean(axis=1)
    low, high = (float(value) for value in np.percentile(drawn[:, 1] / drawn[:, 0], _SHARES))
    is_seen = signal > 0 and noise > 0 and np.percentile(drawn[:, 0], _SHARES[0]) > 0
    return NoiseScale(
        steps=(lines[0]["step"], lines[-1]["step"]),
        measured=len(lines),
        signal=signal,
        noise=noise,
        tokens=noise / signal if signal > 0 and noise > 0 else None,
        interval=(low, high) if is_seen else None,
    )
