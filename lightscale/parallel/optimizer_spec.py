"""Facts about an optimizer before it is built: options, names and bytes of its state.

Imports neither torch nor Megatron: `lightscale plan` counts memory and time from this alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from lightscale.config.schema import AdaptiveClipConfig, OptimizerConfig, ParameterGroup

if TYPE_CHECKING:
    from torch import Tensor

# Weights and state of a step are fp32 in every precision: bf16 has 8 bits, and a step smaller than 1/256 of a weight
# would be lost in it.
_FP32_BYTES = 4
_BF16_BYTES = 2


AVERAGE = "ema_"
"""Begins the name of each average in the state, and in checkpoints."""


def average_state(name: str) -> str:
    """The name of the average ``name`` in the state, and in checkpoints."""
    return f"{AVERAGE}{name}"


WHOLE = "whole_"
"""Begins the name, in checkpoints, of state of whole matrices: one row for a parameter, of no parameter's shape."""

CLIP = "grad_clip."
"""Begins the name of each number of ``adaptive_clip`` among the counters, and in checkpoints."""


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """Consecutive rows of a parameter that QK-clip scales by γ^power, of a head in a layer, both from 0."""

    layer: int
    head: int
    first: int
    last: int
    """Behind the last row."""
    power: float


@dataclass(frozen=True, kw_only=True)
class StepScale:
    """Factors of the constants of a parameter's steps; µP has some for each (``models/mup.py``)."""

    lr: float = 1.0
    """Of the learning rate. Of decoupled weight decay the inverse, so that a weight decays as fast as without it."""
    eps: float = 1.0
    """Of the constant beside the root of the second moment."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(ABC):
    """Constants of an optimizer. The learning rate is an argument of every step.

    ``state`` and ``step_counter`` are part of the checkpoint format; a checkpoint is found by these names.
    """

    weight_decay: float = 0.1
    """Share of a weight taken off per step, times the learning rate; none of vectors and of marked parameters."""
    grad_clip: float = 1.0
    """Largest global norm of the gradients; 0: no clipping."""
    adaptive_clip: AdaptiveClipConfig | None = None
    """A second limit of each norm that is clipped, by the norms of the steps so far; None: none."""

    scales: Mapping[str, StepScale] = field(default_factory=dict)
    """By global name of a parameter; others have 1."""
    groups: Mapping[str, ParameterGroup] = field(default_factory=dict)
    """By name; parameters of none have the constants above."""
    ema: Mapping[str, float] = field(default_factory=dict)
    """Name to decay rate per step of exponential moving averages of the weights, kept in fp32 beside the state."""

    qk_clip: float | None = None
    """Largest attention logit; None: not bounded. Each step divides what made a head exceed it (``clipped_rows``)."""
    clipped_rows: Mapping[str, tuple[HeadRows, ...]] = field(default_factory=dict)
    """By global name of a parameter, what is scaled of it behind a step."""

    is_decoupled: ClassVar[bool] = True
    """Whether weight decay is apart from the gradient."""
    options: ClassVar[type[OptimizerConfig]]
    """The type of section [optimizer] with this optimizer's name."""
    state: ClassVar[tuple[str, ...]]
    """Tensors in a parameter's shape, fp32 by default, kept beside its fp32 weights; in checkpoints NAME.PARAMETER."""
    scaled_state: ClassVar[tuple[str, ...]] = ()
    """Those that are weights too: what scales weights (QK-clip) scales them."""
    step_counter: ClassVar[str]
    """The name of the number of steps in a checkpoint's state.json."""
    state_description: ClassVar[str]
    """``state`` in words, for the assumptions of a plan."""
    implementation: ClassVar[str]
    """MODULE:CLASS of its ``Optimizer``. A name and no import, so that the spec is read without torch."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Any, total_steps: int) -> OptimizerSpec:
        """Constants from section [optimizer], of type ``options``, of a run of ``total_steps``."""

    def groups_of(self, parameter: str) -> list[str]:
        """The names of the groups of the parameter with this global name; more than one is a mistake."""
        # By the global name, which copies on several stages share: they are in one group, and stay equal.
        return [
            name
            for name, group in self.groups.items()
            if any(fnmatchcase(parameter, pattern) for pattern in group.parameters)
        ]

    def of_group(self, name: str | None) -> Self:
        """The constants of a group, which the parameters of no group (None) have without a change."""
        if name is None:
            return self
        group = self.groups[name]
        own: dict[str, Any] = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
        if group.betas is not None:
            own["betas"] = tuple(group.betas)
        return replace(self, **own)

    def scaled(self, scale: StepScale) -> Self:
        """The constants of parameters with this scale; the learning rate is an argument of the step."""
        # Dataclasses of optimizers from outside the package may have no eps.
        own: dict[str, Any] = {"eps": self.eps * scale.eps} if scale.eps != 1 and hasattr(self, "eps") else {}
        return replace(self, **own)

    def step_state_of(self, parameter: str) -> tuple[str, ...]:
        """Those names of ``state`` that the parameter with this global name has."""
        return self.state

    def state_of(self, parameter: str) -> tuple[str, ...]:
        """What is kept and saved of the parameter with this global name: ``step_state_of``, and the averages."""
        return (*self.step_state_of(parameter), *map(average_state, self.ema))

    def saved_bytes(self, parameter: str) -> int:
        """Bytes of the state of an element of ``parameter`` in a full checkpoint, beside its fp32 weight."""
        return self.moment_bytes * len(self.step_state_of(parameter)) + _FP32_BYTES * len(self.ema)

    def state_bytes(self, parameter: str) -> int:
        """Bytes of the state of an element of ``parameter``, without the fp32 weights of bf16 training."""
        return self.saved_bytes(parameter)

    def whole_bytes(self, parameter: str) -> int:
        """Bytes of the state of ``parameter`` beside that of its elements; one rank keeps it."""
        return 0

    @property
    def moment_bytes(self) -> int:
        """Bytes of an element of a tensor of ``state``."""
        return _FP32_BYTES

    def step_traffic_bytes(self, parameter: str) -> int:
        """Bytes that a step in bf16 reads and writes for an element of ``parameter``.

        fp32 weight and state are read and written, the fp32 gradient is read and the bf16 weight written.
        """
        return 2 * (_FP32_BYTES + self.state_bytes(parameter)) + _FP32_BYTES + _BF16_BYTES


@dataclass(frozen=True, kw_only=True)
class MegatronSpec(OptimizerSpec):
    """An optimizer of Megatron core; a subclass only sets its options."""

    implementation: ClassVar[str] = "lightscale.parallel.megatron_optimizer:MegatronOptimizer"

    @abstractmethod
    def megatron_options(self) -> Mapping[str, Any]:
        """Arguments of Megatron's ``OptimizerConfig`` beside weight decay and clipping."""


@dataclass(frozen=True, kw_only=True)
class ElementwiseSpec(OptimizerSpec):
    """w ← w - lr (direction + weight_decay w), where the direction of an element depends on no other element.

    Data and sequence ranks divide the elements as those of AdamW (Megatron's distributed optimizer), so that a
    subclass knows nothing of ranks, of main weights and of checkpoints.
    """

    moments_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format that ``state`` is kept in between steps; a step computes in fp32."""

    implementation: ClassVar[str] = "lightscale.parallel.megatron_optimizer:MegatronOptimizer"

    @property
    def moment_bytes(self) -> int:
        """See ``OptimizerSpec``."""
        return _BF16_BYTES if self.moments_dtype == "bf16" else _FP32_BYTES

    @abstractmethod
    def direction(self, gradient: Tensor, state: Mapping[str, Tensor], step: int) -> Tensor:
        """(n,), a new tensor; changes ``state`` in place. By methods of tensors alone, so that torch is not imported.

        Args:
            gradient: (n,) of one parameter, or of a part of it; clipped, in fp32.
            state: (n,) each, by the names in ``self.state``; zeros before step 1.
            step: from 1 on.
        """


@dataclass(frozen=True, kw_only=True)
class AveragedSpec(ElementwiseSpec):
    """Three sequences of weights: z takes the steps, x is their average, and gradients are taken at y between both.

        z ← z - lr (direction + weight_decay y),  x ← x + c (z - x),  y = x + (1 - interpolation) (z - x)

    c is the step's part of the sum of lr² so far. The direction is of gradients at y. What is read (checkpoints,
    validation, exports) is x.
    """

    scaled_state: ClassVar[tuple[str, ...]] = ("z",)
    weight_counter: ClassVar[str]
    """The name of the sum in a checkpoint's state.json."""

    implementation: ClassVar[str] = "lightscale.parallel.averaged_steps:AveragedOptimizer"

    @property
    @abstractmethod
    def interpolation(self) -> float:
        """Share of x in y."""

    def state_bytes(self, parameter: str) -> int:
        """See ``OptimizerSpec``; x is kept beside the weights of the step."""
        return super().state_bytes(parameter) + _FP32_BYTES


RowRanges = tuple[tuple[int, int], ...]
"""First and last + 1 of rows of a parameter that together are one matrix."""


@dataclass(frozen=True, kw_only=True)
class MatrixSpec(ElementwiseSpec):
    """An ``ElementwiseSpec`` but for ``matrices``, whose direction is a function of a whole matrix.

    A step has two parts there: ``matrix_mean`` of every element alone, then ``matrix_direction`` of what it gives. In
    between, each rank's elements are put together to matrices (``parallel/matrices``), each on one rank. That rank may
    keep state of the whole matrix (``whole_state``) from step to step.
    """

    matrices: Mapping[str, tuple[RowRanges, ...]] = field(default_factory=dict)
    """By the global name of a parameter, the rows of each matrix in it; every row belongs to one."""
    columns: Mapping[str, int] = field(default_factory=dict)
    """By the global name of a parameter, those of each matrix in it."""
    elementwise: tuple[str, ...] = ()
    """Patterns of names of matrices that are none of ``matrices``, and are stepped as all other parameters."""
    product_precision: Literal["bf16", "fp32"] = "bf16"
    """Number format of matrices and their directions, in which they are also sent."""

    matrix_state: ClassVar[tuple[str, ...]]
    """Those of ``state`` that ``matrices`` have; other parameters have the others."""
    whole_moments: ClassVar[tuple[str, ...]] = ()
    """Those names of ``whole_state`` that ``moments_dtype`` is of; others are fp32."""
    steps_like_adam: ClassVar[bool] = False
    """Whether matrices have Adam's constants: ``betas`` of a group, and µP's rates. Else singular values of directions
    are near ``matrix_scale``."""

    implementation: ClassVar[str] = "lightscale.parallel.matrices.optimizer:MatrixOptimizer"

    def step_state_of(self, parameter: str) -> tuple[str, ...]:
        """See ``OptimizerSpec``."""
        is_matrix = parameter in self.matrices
        return tuple(name for name in self.state if (name in self.matrix_state) == is_matrix)

    def matrix_shapes(self, parameter: str) -> list[tuple[int, int]]:
        """(rows, columns) of each matrix in ``parameter``; none of one that has no matrices."""
        return [
            (sum(last - first for first, last in one), self.columns[parameter])
            for one in self.matrices.get(parameter, ())
        ]

    def whole_state(self, rows: int, columns: int) -> dict[str, tuple[int, int]]:
        """Shapes of the state of a matrix (rows, columns) that the rank keeps that computes its directions, by name."""
        return {}

    def whole_bytes(self, parameter: str) -> int:
        """See ``OptimizerSpec``."""
        return sum(
            rows * columns * (self.moment_bytes if name in self.whole_moments else _FP32_BYTES)
            for matrix in self.matrix_shapes(parameter)
            for name, (rows, columns) in self.whole_state(*matrix).items()
        )

    def step_flops(self, parameter: str) -> float:
        """Operations of the directions of all matrices in ``parameter``."""
        return sum(self.matrix_flops(*one) for one in self.matrix_shapes(parameter))

    @property
    def product_bytes(self) -> int:
        """Bytes of an element of a matrix while it is whole."""
        return _BF16_BYTES if self.product_precision == "bf16" else _FP32_BYTES

    @abstractmethod
    def matrix_mean(self, gradient: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """(n,), the elements of what ``matrix_direction`` takes; changes ``state`` in place, and not the gradient.

        Args:
            gradient: (n,) of a part of a parameter; clipped, in fp32.
            state: (n,) each, by the names in ``matrix_state``; zeros before step 1.
        """

    @abstractmethod
    def matrix_direction(self, matrix: Tensor, state: Mapping[str, Tensor], step: int) -> Tensor:
        """(rows, columns), in any number format -> the same shape; by methods of tensors alone.

        Args:
            matrix: what ``matrix_mean`` gives.
            state: of ``whole_state``, in fp32, to be changed in place; zeros before step 1.
            step: from 1 on.
        """

    @abstractmethod
    def matrix_scale(self, rows: float, columns: float) -> float:
        """Factor of a direction of this shape, applied in fp32."""

    @abstractmethod
    def matrix_flops(self, rows: int, columns: int) -> float:
        """Operations of ``matrix_direction``."""
