"""AdEMAMix (arXiv 2409.03137): AdamW with a second, slow mean of the gradients, which remembers thousands of steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field

from lightscale.config.schema import OptimizerConfig
from lightscale.config.section import Fraction, PositiveOrZero, Small, Steps
from lightscale.parallel.optimizer_spec import ElementwiseSpec

if TYPE_CHECKING:
    from torch import Tensor

# The warm-up of the slow mean takes logarithms of both means' rates.
_Rate = Annotated[float, Field(gt=0, lt=1)]


class AdEMAMixConfig(OptimizerConfig):
    """[optimizer] with name = "ademamix"."""

    name: Literal["ademamix"] = "ademamix"
    betas: Annotated[tuple[_Rate, Fraction, _Rate], Field(strict=False)] = (0.9, 0.999, 0.9999)
    """Decay rates per step of the fast mean, of the second moment and of the slow mean."""
    alpha: PositiveOrZero = 5.0
    """Factor of the slow mean in a step."""
    slow_warmup_steps: Steps | None = None
    """Length of the rise of alpha from 0 and of the slow rate from the fast one, in steps; none: the whole run."""
    eps: Small = 1e-8
    """Constant added to the root of the second moment."""


@dataclass(frozen=True, kw_only=True)
class AdEMAMix(ElementwiseSpec):
    """w ← w - lr ((m̂₁ + α m₂) / (√v̂ + eps) + weight_decay w).

    m₁ and m₂ are means of g, v of g²; m₁ and v are corrected for bias. α and the rate β₃ of m₂ rise over
    ``slow_warmup_steps`` (section 3 of the paper): from the start, a mean of 10,000 steps would diverge.
    """

    betas: tuple[float, float, float] = (0.9, 0.999, 0.9999)
    """β₁ of m₁, β₂ of v, β₃ of m₂."""
    alpha: float = 5.0
    slow_warmup_steps: int = 1
    """1: α and β₃ are constant."""
    eps: float = 1e-8

    options: ClassVar[type[OptimizerConfig]] = AdEMAMixConfig
    state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_slow", "exp_avg_sq")
    step_counter: ClassVar[str] = "ademamix_steps"
    state_description: ClassVar[str] = "AdEMAMix's two means and second moment"

    @classmethod
    def from_config(cls, config: AdEMAMixConfig, total_steps: int) -> Self:
        """The constants that section [optimizer] gives; ``slow_warmup_steps`` is the run's length by default."""
        return cls(
            betas=config.betas,
            alpha=config.alpha,
            slow_warmup_steps=config.slow_warmup_steps or total_steps,
            eps=config.eps,
            weight_decay=config.weight_decay,
            grad_clip=config.grad_clip,
        )

    def slow(self, step: int) -> tuple[float, float]:
        """α and β₃ of ``step``: α linear in the step, β₃ so that its half-life is."""
        done = min(1.0, step / self.slow_warmup_steps)
        begin, end = math.log(self.betas[0]), math.log(self.betas[2])
        rate = math.exp(begin * end / ((1 - done) * end + done * begin))
        return done * self.alpha, min(rate, self.betas[2])

    def direction(self, gradient: Tensor, state: Mapping[str, Tensor], step: int) -> Tensor:
        """See ``ElementwiseSpec``."""
        alpha, slow_rate = self.slow(step)
        fast, slow, square = (state[name] for name in self.state)
        fast.lerp_(gradient, 1 - self.betas[0])
        slow.lerp_(gradient, 1 - slow_rate)
        square.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
        root = (square / (1 - self.betas[1] ** step)).sqrt_().add_(self.eps)
        return (fast / (1 - self.betas[0] ** step)).add_(slow, alpha=alpha).div_(root)
