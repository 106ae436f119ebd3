"""Interface between engine and optimizers, and construction from a spec."""

import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightscale.parallel.megatron import DistributedDataParallel, TransformerConfig
from lightscale.parallel.optimizer_spec import OptimizerSpec
from lightscale.parallel.shards import TensorShard


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """What a step did with a norm of gradients."""

    limit: float
    """The largest norm that was not scaled; infinity: any."""
    is_clipped: bool

    @property
    def known_limit(self) -> float | None:
        """The limit; None while there is none."""
        return self.limit if math.isfinite(self.limit) else None


@dataclass(frozen=True, kw_only=True)
class OwnedState:
    """Optimizer state of one parameter on this rank: its elements first … last - 1, flattened."""

    first: int
    last: int
    weights: Tensor
    """(last - first,) fp32, the weights that the steps are added to."""
    state: Mapping[str, Tensor]
    """(last - first,) each, by the names in ``OptimizerSpec.state``."""

    def bytes_beside(self, parameter: nn.Parameter) -> int:
        """Bytes that are not those of ``parameter``: of the state, and of weights in memory of their own."""
        is_own = self.weights.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr()
        return sum(tensor.nbytes for tensor in self.state.values()) + self.weights.nbytes * is_own


class Optimizer(ABC):
    """The optimizer of this rank, over the parameters of ``models``.

    The gradients are in ``parameter.main_grad``, reduced. If data and sequence ranks divide an optimizer's work, each
    holds the state of a contiguous part of every bucket of the flattened parameters. Its gradients are reduced only
    there, and a step gathers the weights again. Every method but ``owned``, ``whole_shards`` and ``counters`` is called
    by all ranks together.
    """

    def __init__(
        self, spec: OptimizerSpec, models: Sequence[DistributedDataParallel], config: TransformerConfig, *, on_gpu: bool
    ) -> None:
        """``models``: one per virtual stage, as Megatron wraps them. The state must exist when this returns: a
        checkpoint may be read into it before the first step."""
        self.spec = spec
        self.head_shares: Tensor | None = None
        """(layers, heads) fp64 on the host: γ of ``OptimizerSpec.qk_clip`` in the next ``apply``; None: none."""
        self.clippings: dict[str | None, Clipping] = {}
        """Of the last ``apply``, by group with a limit of its own; None: of all other parameters."""
        self.mixes_dtypes = False
        """Whether one of this rank's parameter groups has parameters in fp32 and in half precision."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop gradients of earlier steps, except the buffers of ``models``."""

    @abstractmethod
    def gradient_norm(self) -> float:
        """The global norm of the gradients before clipping, the same on every rank; changes no weight and no state.

        NaN or infinite where a gradient of any rank is.
        """

    @abstractmethod
    def apply(self, lr: float) -> None:
        """Clip the gradients by the norms that ``gradient_norm`` found, and apply them at learning rate ``lr``."""

    @abstractmethod
    def reset(self) -> None:
        """Reset the state to the start of training, for the current weights of the model."""

    @abstractmethod
    def copy_from_model(self) -> None:
        """Copy the model's weights to the fp32 weights."""

    @abstractmethod
    def copy_to_model(self) -> None:
        """Copy the fp32 weights to this rank's part of the model's weights; the engine gathers the other parts."""

    def show_read(self) -> None:  # noqa: B027 - most optimizers step the weights that are read
        """Set this rank's part of the model's weights to those that are read, where gradients are taken at others.

        ``copy_to_model`` sets them back.
        """

    @abstractmethod
    def owned(self, parameter: nn.Parameter) -> OwnedState | None:
        """State of ``parameter`` on this rank, not a copy; None if this rank has none."""

    def whole_shards(self) -> Iterator[TensorShard]:
        """State on this rank that is no part of a parameter's elements, whole and not copies, by names in checkpoints.

        The numbers do not depend on the layout; which rank has a tensor may.
        """
        return iter(())

    @abstractmethod
    def counters(self) -> dict[str, float]:
        """State outside tensors of a parameter's shape; equal on every rank."""

    @abstractmethod
    def set_counters(self, counters: Mapping[str, float]) -> None:
        """The inverse of ``counters``."""


def build_optimizer(
    spec: OptimizerSpec, models: Sequence[DistributedDataParallel], config: TransformerConfig, *, on_gpu: bool
) -> Optimizer:
    """Build the optimizer of ``spec`` over ``models``."""
    # By name, because a spec is read where torch must not be loaded, and imports none of this.
    implementation: Any = pkgutil.resolve_name(spec.implementation)
    optimizer: Optimizer = implementation(spec, models, config, on_gpu=on_gpu)
    return optimizer
