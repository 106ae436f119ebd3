"""The optimizer of an ``AveragedSpec``: gradients are taken at one sequence of weights, another one is read."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightscale.parallel.megatron_optimizer import GROUP, ElementwiseSteps, MegatronOptimizer
from lightscale.parallel.optimizer_interface import OwnedState
from lightscale.parallel.optimizer_spec import AveragedSpec


class AveragedSteps(ElementwiseSteps):
    """Steps z and their average x; Megatron's fp32 weights are y, between both."""

    spec: AveragedSpec

    def __init__(self, spec: AveragedSpec, param_groups: list[dict[str, Any]], names: Mapping[Tensor, str]) -> None:
        super().__init__(spec, param_groups, names)
        self.read = {weights: weights.detach().clone() for weights in self.state}
        """x, by y."""
        self.share = 0.0
        """c of the next step."""
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Let all three be the weights as they are."""
        for weights, state in self.state.items():
            state["z"].copy_(weights)
            self.read[weights].copy_(weights)

    @torch.no_grad()
    def mix(self) -> None:
        """Compute y."""
        for group in self.param_groups:
            share = 1 - self.spec.of_group(group.get(GROUP)).interpolation
            for y in group["params"]:
                torch.lerp(self.read[y], self.state[y]["z"], share, out=y.detach())

    def apply(self, weights: Tensor, direction: Tensor, *, lr: float, weight_decay: float) -> None:
        """See ``ElementwiseSteps``."""
        z = self.state[weights]["z"].sub_(direction.add_(weights, alpha=weight_decay), alpha=lr)
        self.read[weights].lerp_(z, self.share)

    @torch.no_grad()
    def step(self) -> None:
        """See ``ElementwiseSteps``."""
        super().step()
        self.mix()


class AveragedOptimizer(MegatronOptimizer):
    """``owned`` has x as the weights: checkpoints and what reads them have the average.

    The model has y between steps, and x between ``show_read`` and ``copy_to_model``.
    """

    spec: AveragedSpec
    steps_type = AveragedSteps
    _weight = 0.0

    def apply(self, lr: float) -> None:
        """See ``Optimizer``."""
        own = lr**2
        self._weight += own
        for part in self.megatron.chained_optimizers:
            part.optimizer.share = own / self._weight if own else 0.0
        super().apply(lr)

    def show_read(self) -> None:
        """See ``Optimizer``."""
        for part in self.megatron.chained_optimizers:
            for y, x in part.optimizer.read.items():
                y.detach().copy_(x)
        super().copy_to_model()

    def copy_from_model(self) -> None:
        """See ``Optimizer``."""
        super().copy_from_model()
        self._begin()

    def copy_to_model(self) -> None:
        """See ``Optimizer``. Before the first step x alone was read, and z is the same."""
        has_begun = self.counters()[self.spec.step_counter] > 0
        for part in self.megatron.chained_optimizers:
            if not has_begun:
                for y, x in part.optimizer.read.items():
                    part.optimizer.state[y]["z"].copy_(x)
            part.optimizer.mix()
        super().copy_to_model()

    def owned(self, parameter: nn.Parameter) -> OwnedState | None:
        """See ``Optimizer``."""
        found = super().owned(parameter)
        for part in self.megatron.chained_optimizers:
            if found is not None and parameter in part.model_param_group_index_map:
                group, place = part.model_param_group_index_map[parameter]
                x: Tensor = part.optimizer.read[part.optimizer.param_groups[group]["params"][place]]
                return replace(found, weights=x.view(-1))
        return None

    def counters(self) -> dict[str, float]:
        """See ``Optimizer``; and the sum of the squares of the done steps' rates."""
        return {**super().counters(), self.spec.weight_counter: self._weight}

    def set_counters(self, counters: Mapping[str, float]) -> None:
        """See ``Optimizer``."""
        super().set_counters(counters)
        self._weight = counters[self.spec.weight_counter]

    def _zero_state(self) -> None:
        super()._zero_state()
        self._weight = 0.0
        self._begin()

    def _begin(self) -> None:
        for part in self.megatron.chained_optimizers:
            part.optimizer.begin()
