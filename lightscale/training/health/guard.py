"""The guard against bad steps: it skips steps with NaN, infinity, or values far above the median.

The guard compares the loss and the gradient norm of a step with the medians of the good steps before it. These numbers
are the same on every rank, so that all ranks decide alike. They have no other input, so that a resumed or rolled-back
run decides as before.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from lightscale.config.schema import GuardConfig


class Guard:
    """Judges the steps of one run, in their order.

    ``skips_in_a_row`` counts the steps skipped since the last good one.
    """

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        # Of good steps only: a skipped one would raise the very median that later ones are compared with.
        self._losses: deque[float] = deque(maxlen=config.window)
        self._grad_norms: deque[float] = deque(maxlen=config.window)
        self.skips_in_a_row = 0

    def judge(self, loss: float, grad_norm: float) -> str | None:
        """Why the next step, of these numbers, must be skipped; None where it is good, and then remembered.

        None of any numbers where the guard is off, and none are remembered.
        """
        if not self._config.enabled:
            return None
        reason = self._reason(loss, grad_norm)
        if reason is None:
            self._losses.append(loss)
            self._grad_norms.append(grad_norm)
            # One good step ends the row: single bad batches cost a step each, and never a rollback.
            self.skips_in_a_row = 0
        else:
            self.skips_in_a_row += 1
        return reason

    def _reason(self, loss: float, grad_norm: float) -> str | None:
        # From the first step on: an optimizer step with a NaN destroys the weights for good.
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                return f"the {name} is {value}"
        # A median of few steps says little, and the loss falls fast at the beginning of a run.
        if len(self._losses) < self._config.window:
            return None
        rise, ratio = self._config.max_loss_rise, self._config.max_grad_norm_ratio
        # Medians: one large value that was accepted would raise a mean for a whole window.
        usual = statistics.median(self._losses)
        if rise is not None and loss >= usual + rise:
            return f"the loss is {loss:.4f}, at least {rise:g} above the median {usual:.4f}"
        # A ratio, as norms differ by orders of magnitude between models; "> 0" because a multiple of 0 says nothing.
        usual = statistics.median(self._grad_norms)
        if ratio is not None and grad_norm >= usual * ratio > 0:
            return f"the gradient norm is {grad_norm:.4g}, at least {ratio:g} times the median {usual:.4g}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """The recorded numbers: plain values, the same on every rank."""
        return {
            "losses": list(self._losses),
            "grad_norms": list(self._grad_norms),
            "skips_in_a_row": self.skips_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Judge from here on as the guard that gave ``state``."""
        # With the window of now: after it was made shorter, only the newest numbers are kept.
        self._losses = deque(state["losses"], maxlen=self._config.window)
        self._grad_norms = deque(state["grad_norms"], maxlen=self._config.window)
        self.skips_in_a_row = int(state["skips_in_a_row"])
