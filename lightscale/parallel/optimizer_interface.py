"""What the engine asks of an optimizer, and how one is built from its spec."""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightscale.parallel.megatron import DistributedDataParallel, TransformerConfig
from lightscale.parallel.optimizer_spec import OptimizerSpec


@dataclass(frozen=True, kw_only=True)
class OwnedState:
    """What the optimizer of this rank keeps of one parameter: its elements first … last - 1, once flattened."""

    first: int
    last: int
    weights: Tensor
    """(last - first,) fp32, what the steps are added to."""
    state: Mapping[str, Tensor]
    """(last - first,) each, by the names in ``OptimizerSpec.state``."""


class Optimizer(ABC):
    """The optimizer of this rank, over the parameters of ``models``.

    The gradients are in ``parameter.main_grad``, reduced. Where data and sequence ranks share out an optimizer's work,
    each holds the state of a contiguous part of every bucket of the flattened parameters, and only there are its
    gradients reduced; a step gathers the weights again. Every method but ``owned`` and ``counters`` is called by all
    ranks together.
    """

    def __init__(
        self, spec: OptimizerSpec, models: Sequence[DistributedDataParallel], config: TransformerConfig, *, on_gpu: bool
    ) -> None:
        """``models``: one per virtual stage, as Megatron wraps them. The state must exist when this returns: a
        checkpoint may be read into it before the first step."""
        self.spec = spec

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop what earlier steps left of gradients, apart from the buffers of ``models``."""

    @abstractmethod
    def gradient_norm(self) -> float:
        """The global norm of the gradients before clipping, the same on every rank; changes no weight and no state.

        NaN or infinite where a gradient of any rank is.
        """

    @abstractmethod
    def apply(self, lr: float, grad_norm: float) -> None:
        """Clip the gradients, whose ``gradient_norm()`` was ``grad_norm``, and apply them at learning rate ``lr``."""

    @abstractmethod
    def reset(self) -> None:
        """Make the state what it was before the first step, for the weights that the model has now."""

    @abstractmethod
    def copy_from_model(self) -> None:
        """Make the fp32 weights those of the model."""

    @abstractmethod
    def copy_to_model(self) -> None:
        """Make this rank's part of the model's weights what the fp32 weights say; the engine gathers the others'."""

    @abstractmethod
    def owned(self, parameter: nn.Parameter) -> OwnedState | None:
        """What this rank keeps of ``parameter``, not a copy; None where it keeps nothing of it."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """State that is no tensor of a parameter's shape; the same on every rank."""

    @abstractmethod
    def set_counters(self, counters: Mapping[str, int]) -> None:
        """The inverse of ``counters``."""


def build_optimizer(
    spec: OptimizerSpec, models: Sequence[DistributedDataParallel], config: TransformerConfig, *, on_gpu: bool
) -> Optimizer:
    """The optimizer that ``spec`` names, over ``models``."""
    # By name, because a spec is read where torch must not be loaded, and imports none of this.
    implementation: Any = pkgutil.resolve_name(spec.implementation)
    optimizer: Optimizer = implementation(spec, models, config, on_gpu=on_gpu)
    return optimizer
