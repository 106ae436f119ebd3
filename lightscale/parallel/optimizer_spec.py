"""Facts about an optimizer before it is built: options, names and bytes of its state.

Imports neither torch nor Megatron: `lightscale plan` counts memory and time from this alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from lightscale.config.schema import OptimizerConfig

# Weights and state of a step are fp32 in every precision: bf16 has 8 bits, and a step smaller than 1/256 of a weight
# would be lost in it.
_FP32_BYTES = 4
_BF16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(ABC):
    """Constants of an optimizer. The learning rate is an argument of every step.

    ``state`` and ``step_counter`` are part of the checkpoint format; a checkpoint is found by these names.
    """

    weight_decay: float = 0.1
    """Share of a weight taken off per step, times the learning rate; none of vectors and of marked parameters."""
    grad_clip: float = 1.0
    """Largest global norm of the gradients; 0: no clipping."""

    state: ClassVar[tuple[str, ...]]
    """fp32 tensors in each parameter's shape, kept beside its fp32 weights; in checkpoints NAME.PARAMETER."""
    step_counter: ClassVar[str]
    """The name of the number of steps in a checkpoint's state.json."""
    state_description: ClassVar[str]
    """``state`` in words, for the assumptions of a plan."""
    implementation: ClassVar[str]
    """MODULE:CLASS of its ``Optimizer``. A name and no import, so that the spec is read without torch."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: OptimizerConfig) -> Self:
        """Constants from section [optimizer]."""

    @property
    def state_bytes(self) -> int:
        """Bytes of ``state`` per parameter, without the fp32 weights of bf16 training."""
        return _FP32_BYTES * len(self.state)

    @property
    def step_traffic_bytes(self) -> int:
        """Bytes that a step in bf16 reads and writes per parameter.

        fp32 weight and state are read and written, the fp32 gradient is read and the bf16 weight written.
        """
        return 2 * (_FP32_BYTES + self.state_bytes) + _FP32_BYTES + _BF16_BYTES


@dataclass(frozen=True, kw_only=True)
class MegatronSpec(OptimizerSpec):
    """An optimizer of Megatron core; a subclass only sets its options."""

    implementation: ClassVar[str] = "lightscale.parallel.megatron_optimizer:MegatronOptimizer"

    @abstractmethod
    def megatron_options(self) -> Mapping[str, Any]:
        """Arguments of Megatron's ``OptimizerConfig`` beside weight decay and clipping."""
