"""Lion (arXiv 2302.06675, algorithm 2): steps of one size, by the sign of a mean of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field

from lightscale.config.schema import MomentsDtype, OptimizerConfig
from lightscale.config.section import Fraction
from lightscale.parallel.optimizer_spec import ElementwiseSpec

if TYPE_CHECKING:
    from torch import Tensor


class LionConfig(OptimizerConfig):
    """[optimizer] with name = "lion"."""

    name: Literal["lion"] = "lion"
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.99)
    """Share of the mean in a step's direction, and decay rate of the mean, per step."""
    moments_dtype: MomentsDtype = "fp32"
    """Number format of the mean between steps; fp32 weights and averages stay fp32."""


@dataclass(frozen=True, kw_only=True)
class Lion(ElementwiseSpec):
    """w ← w - lr (sign(β₁ m + (1 - β₁) g) + weight_decay w), then m ← β₂ m + (1 - β₂) g."""

    betas: tuple[float, float] = (0.9, 0.99)
    """β₁ and β₂."""

    options: ClassVar[type[OptimizerConfig]] = LionConfig
    state: ClassVar[tuple[str, ...]] = ("exp_avg",)
    step_counter: ClassVar[str] = "lion_steps"
    state_description: ClassVar[str] = "Lion's mean"

    @classmethod
    def from_config(cls, config: LionConfig, total_steps: int) -> Self:
        """The constants that section [optimizer] gives."""
        return cls(
            betas=config.betas,
            moments_dtype=config.moments_dtype,
            weight_decay=config.weight_decay,
            grad_clip=config.grad_clip,
        )

    def direction(self, gradient: Tensor, state: Mapping[str, Tensor], step: int) -> Tensor:
        """See ``ElementwiseSpec``."""
        mean = state["exp_avg"]
        direction = mean.lerp(gradient, 1 - self.betas[0]).sign_()
        mean.lerp_(gradient, 1 - self.betas[1])
        return direction
