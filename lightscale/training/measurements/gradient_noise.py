"""The gradient noise scale of a step, from the norms of its gradient and of that of a part of it.

arXiv 1812.06162, appendix A.1. With S the trace of the covariance of a token's gradient, and G the true gradient, the
gradient of B tokens has a squared norm of |G|² + S / B in the mean. Two sizes B give both. S / |G|² is the batch, in
tokens, from which more data per step saves few steps. Where only some labels count, or a row of tokens has one label, B
counts these at first; S is then taken to the tokens among which they are found.
"""

import math
from collections.abc import Sequence

from lightscale.parallel.engine import Engine
from lightscale.parallel.micro_batch import MicroBatch


class GradientNoise:
    """Measures one step, of all ranks together, and changes nothing of it.

    The part is the first micro-batch of every data rank (as many as stages, where these are interleaved). Its gradient
    is computed before that of the step, by the same sums over ranks, so every layout measures alike. It takes the time
    of one micro-batch.
    """

    def __init__(self, engine: Engine, batches: Sequence[MicroBatch]) -> None:
        """Before ``engine.forward_backward(batches)``, whose gradients replace these."""
        part = batches[: micro_batches_of_part(engine.mesh.pipeline, engine.mesh.virtual_stages)]
        # A captured graph is one of all micro-batches of a step; where logits are measured, none is used.
        self._counted = engine.forward_backward(part, measure_logits=True).tokens
        self._square = engine.gradient_norm() ** 2 if self._counted else math.nan

    def result(self, counted: int, grad_norm: float, *, tokens: int) -> dict[str, dict[str, float]]:
        """Estimates of |G|² and S; nothing where a norm is not finite, or both sizes are one.

        Both are right in the mean of many steps only: a single one can be negative.

        Args:
            counted: labels of the whole step that count.
            grad_norm: of the whole step, before clipping.
            tokens: of the whole step.
        """
        part, whole = self._square, grad_norm**2
        if not (math.isfinite(part) and math.isfinite(whole) and 0 < self._counted < counted):
            return {}
        signal = (counted * whole - self._counted * part) / (counted - self._counted)
        noise = (part - whole) / (1 / self._counted - 1 / counted)
        return {"gradient_noise": {"signal": signal, "noise": noise * tokens / counted}}


def micro_batches_of_part(pipeline: int, virtual_stages: int) -> int:
    """Number of micro-batches per data rank of the part."""
    return pipeline if virtual_stages > 1 else 1
