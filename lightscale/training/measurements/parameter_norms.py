"""Norms of gradients and of updates by group of parameters: which part of the model learns too fast, or not at all."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lightscale.parallel.engine import Engine

# The first that a parameter's global name contains; all others are the mixers', shared parts of the mixers too.
_GROUPS = {"embedding.": "embedding", "output_layer.": "embedding", "layernorm.": "norms", ".mlp.": "glu"}
_REST = "mixer"
GROUPS = (*dict.fromkeys(_GROUPS.values()), _REST)

Norms = dict[str, dict[str, float]]


class ParameterNorms:
    """Measures one step, of all ranks together, and changes nothing.

    Every element of the model is counted once, on any layout: a rank measures what its part of the optimizer owns, and
    the sums of the ranks are added up. Beside that the step needs memory for one more copy of this rank's part of the
    fp32 weights, when the activations are gone.
    """

    def __init__(self, engine: Engine) -> None:
        """Of the step between ``engine.gradient_norm()`` and ``engine.apply()``, before the gradients are clipped."""
        self._engine = engine
        self._parts = [(group_of(part.key), part.weights, part.weights.clone()) for part in engine.parameter_parts()]
        self._gradients = self._squares([(group_of(part.key), part.gradient) for part in engine.parameter_parts()])

    def result(self) -> Norms:
        """By group: ``gradient_norm``, and behind ``engine.apply()`` ``update_ratio``, |Δw| / |w|.

        Groups without parameters, and ratios to weights that are all zero, are missing.
        """
        weights = self._squares([(group, before) for group, _, before in self._parts])
        updates = self._squares([(group, now - before) for group, now, before in self._parts])
        sums = torch.stack([self._gradients, weights, updates]).cpu()
        # Small, and on the host: it need not queue behind the GPU's work, nor make a communicator of its own there.
        dist.all_reduce(sums, group=self._engine.mesh.control)
        gradients, weights, updates = sums.sqrt()
        return {
            "gradient_norm": _by_group(gradients, weights),
            "update_ratio": _by_group(updates / weights, weights),
        }

    def _squares(self, parts: list[tuple[int, Tensor]]) -> Tensor:
        """(groups,) fp64: sums of the squares of ``parts``, (number of the group, tensor) each."""
        sums = torch.zeros(len(GROUPS), dtype=torch.float64, device=self._engine.mesh.device)
        for group, tensor in parts:
            sums[group] += torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
        return sums


def group_of(key: str) -> int:
    """The number in ``GROUPS`` of the parameter with the global name ``key``."""
    return GROUPS.index(next((group for part, group in _GROUPS.items() if part in key), _REST))


def _by_group(values: Tensor, weights: Tensor) -> dict[str, float]:
    found: Mapping[str, tuple[float, float]] = dict(
        zip(GROUPS, zip(values.tolist(), weights.tolist(), strict=True), strict=True)
    )
    return {name: value for name, (value, weight) in found.items() if weight > 0 and not math.isnan(value)}
