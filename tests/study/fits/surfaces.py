"""Simulated studies: runs on a loss surface whose constants are known."""

from collections.abc import Sequence

import numpy as np

from lightscale.study.fits.curves import PFLOP_DAY, Curve, Points
from lightscale.study.fits.parametric import LossSurface

HOFFMANN = LossSurface(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
SIZES = np.geomspace(2e7, 7e9, 8)


def curves(
    surface: LossSurface = HOFFMANN,
    *,
    sizes: Sequence[float] = tuple(SIZES),
    tokens: float = 3e11,
    seeds: int = 1,
    noise: float = 0.0,
    rng: np.random.Generator | None = None,
) -> list[Curve]:
    """Runs at a constant learning rate, C = 6·N·D; each run is off by a factor of its own, as seeds are."""
    steps = np.geomspace(tokens / 1000, tokens, num=400)
    rng = rng or np.random.default_rng(0)
    return [
        Curve(
            name=f"n{size:.0f}-s{seed}",
            parameters=float(size),
            tokens=steps,
            compute=6 * size * steps / PFLOP_DAY,
            loss=surface(np.full_like(steps, size), steps) * np.exp(rng.normal(0, noise) if noise else 0.0),
        )
        for size in sizes
        for seed in range(seeds)
    ]


def points(surface: LossSurface, rng: np.random.Generator, *, noise: float) -> Points:
    """64 runs, eight sizes by eight numbers of tokens, each with an error of its own."""
    parameters, tokens = np.repeat(SIZES, 8), np.tile(np.geomspace(1e9, 3e11, 8), 8)
    return Points(
        parameters=parameters,
        tokens=tokens,
        loss=surface(parameters, tokens) * np.exp(rng.normal(0, noise, size=64)),
        runs=np.arange(64),
    )
