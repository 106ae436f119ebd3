"""Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682, algorithm 1): an average takes the place of a decay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from lightscale.config.schema import OptimizerConfig
from lightscale.config.section import Fraction, Small
from lightscale.parallel.optimizer_spec import AveragedSpec

if TYPE_CHECKING:
    from torch import Tensor


class ScheduleFreeConfig(OptimizerConfig):
    """[optimizer] with name = "schedulefree"."""

    name: Literal["schedulefree"] = "schedulefree"
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """Share of the average in the weights that gradients are taken at, and decay rate per step of the second moment."""
    eps: Small = 1e-8
    """Constant added to the root of the second moment."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule not in ("constant", "range_test"):
            raise ValueError(
                f'optimizer.schedule = "{self.schedule}": optimizer.name = "schedulefree" averages in the place of a '
                'decay; use "constant", with optimizer.warmup_steps'
            )
        if self.ema:
            raise ValueError(
                f'optimizer.ema: the weights of optimizer.name = "schedulefree" are an average already; remove '
                f"{', '.join(self.ema)}"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class ScheduleFree(AveragedSpec):
    """z ← z - lr (g / (√v̂ + eps) + weight_decay y), with g the gradient at y and v̂ the mean of g², corrected for bias.

    x ← (1 - c) x + c z with c = lr² / Σ lr², y = (1 - β₁) z + β₁ x.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    """β₁, and β₂ of v."""
    eps: float = 1e-8

    options: ClassVar[type[OptimizerConfig]] = ScheduleFreeConfig
    state: ClassVar[tuple[str, ...]] = ("z", "exp_avg_sq")
    step_counter: ClassVar[str] = "schedulefree_steps"
    weight_counter: ClassVar[str] = "schedulefree_lr_squares"
    state_description: ClassVar[str] = "the steps, their average and the second moment"

    @classmethod
    def from_config(cls, config: ScheduleFreeConfig, total_steps: int) -> Self:
        """The constants that section [optimizer] gives."""
        return cls(
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            grad_clip=config.grad_clip,
        )

    @property
    def interpolation(self) -> float:
        """See ``AveragedSpec``."""
        return self.betas[0]

    def direction(self, gradient: Tensor, state: Mapping[str, Tensor], step: int) -> Tensor:
        """See ``ElementwiseSpec``."""
        square = state["exp_avg_sq"].mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
        return gradient / (square / (1 - self.betas[1] ** step)).sqrt_().add_(self.eps)
