"""scheduler_config.json: a run's noise in the terms of diffusers' DDIMScheduler."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightscale.data_pipeline.augmentation.noise import Prediction, ScheduleName, betas

NAME = "scheduler_config.json"
_PREDICTIONS: dict[Prediction, str] = {"epsilon": "epsilon", "v": "v_prediction"}


def scheduler_config(
    schedule: ScheduleName,
    timesteps: int,
    prediction: Prediction,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    latents: bool = False,
) -> dict[str, Any]:
    """The values of ``DDIMScheduler``.

    It visits every T / steps-th timestep from the last one on ("trailing", for which its steps fit one another). Its
    clipping is one range around 0 for all channels; of other ranges there is none.

    Args:
        schedule, timesteps, prediction: of the run.
        mean, std: of its pixels, for all channels or each.
        latents: whether these have no range.
    """
    # Where pixels of 0 and 1 are scaled to.
    of_channels = zip(*(one.tolist() for one in np.broadcast_arrays(mean, std)), strict=True)
    ends = {(round(-m / s, 12), round((1 - m) / s, 12)) for m, s in of_channels}
    low, high = next(iter(ends))
    is_symmetric = len(ends) == 1 and low == -high and not latents
    return {
        "_class_name": "DDIMScheduler",
        "num_train_timesteps": timesteps,
        **_betas(schedule, timesteps),
        "prediction_type": _PREDICTIONS[prediction],
        "clip_sample": is_symmetric,
        "clip_sample_range": high if is_symmetric else 1.0,
        "set_alpha_to_one": True,
        "steps_offset": 0,
        "timestep_spacing": "trailing",
        "thresholding": False,
        "rescale_betas_zero_snr": False,
    }


def _betas(schedule: ScheduleName, timesteps: int) -> dict[str, Any]:
    """A schedule that DDIMScheduler has under a name, or the variances themselves."""
    found = betas(schedule, timesteps)
    if schedule == "cosine":
        # The same formula and the same largest variance.
        return {"beta_schedule": "squaredcos_cap_v2", "trained_betas": None}
    first, last = float(found[0]), float(found[-1])
    is_even = np.allclose(found, np.linspace(first, last, timesteps), rtol=1e-12, atol=0)
    return {
        "beta_schedule": "linear",
        "beta_start": first,
        "beta_end": last,
        # Of few timesteps the largest are cut off.
        "trained_betas": None if is_even else found.tolist(),
    }
