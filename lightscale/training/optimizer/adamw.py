"""Adam (arXiv 1412.6980), and AdamW: Adam with weight decay apart from the gradient (arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from lightscale.config.schema import MomentsDtype, OptimizerConfig
from lightscale.config.section import Fraction, Small
from lightscale.parallel.optimizer_spec import ElementwiseSpec, MegatronSpec, OptimizerSpec

if TYPE_CHECKING:
    from torch import Tensor


class _Moments(OptimizerConfig):
    """[optimizer] of both."""

    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """Decay rates per step of Adam's first and second moments."""
    eps: Small = 1e-8
    """Constant added to the root of Adam's second moment."""


class AdamWConfig(_Moments):
    """[optimizer] with name = "adamw"."""

    name: Literal["adamw"] = "adamw"
    moments_dtype: MomentsDtype = "fp32"
    """Number format of the moments between steps; fp32 weights and averages stay fp32."""


class AdamConfig(_Moments):
    """[optimizer] with name = "adam"."""

    name: Literal["adam"] = "adam"


@dataclass(frozen=True, kw_only=True)
class AdamW(MegatronSpec):
    """w ← w - lr (m̂ / (√v̂ + eps) + weight_decay w), with means m of g and v of g², and their corrections for bias."""

    # 0.95 as for GPT-3 (arXiv 2005.14165, appendix B): Adam's own 0.999 would remember a spike for a thousand steps.
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the means m and v, per step."""
    eps: float = 1e-8

    options: ClassVar[type[OptimizerConfig]] = AdamWConfig
    state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    step_counter: ClassVar[str] = "adam_steps"
    state_description: ClassVar[str] = "Adam's two moments"

    @classmethod
    def from_config(cls, config: _Moments, total_steps: int) -> OptimizerSpec:
        """The constants that section [optimizer] gives."""
        if isinstance(config, AdamWConfig) and config.moments_dtype == "bf16":
            return NarrowAdamW.from_config(config, total_steps)
        return cls(betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, grad_clip=config.grad_clip)

    def megatron_options(self) -> Mapping[str, Any]:
        """As Megatron names them."""
        return {
            "optimizer": "adam",
            "decoupled_weight_decay": self.is_decoupled,
            "adam_beta1": self.betas[0],
            "adam_beta2": self.betas[1],
            "adam_eps": self.eps,
        }


@dataclass(frozen=True, kw_only=True)
class NarrowAdamW(ElementwiseSpec):
    """AdamW with moments in bf16, which Megatron has on some GPUs alone; checkpoints have the names of ``AdamW``."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    options: ClassVar[type[OptimizerConfig]] = AdamWConfig
    state: ClassVar[tuple[str, ...]] = AdamW.state
    step_counter: ClassVar[str] = AdamW.step_counter
    state_description: ClassVar[str] = AdamW.state_description

    @classmethod
    def from_config(cls, config: AdamWConfig, total_steps: int) -> Self:
        """The constants that section [optimizer] gives."""
        return cls(
            betas=config.betas,
            eps=config.eps,
            moments_dtype=config.moments_dtype,
            weight_decay=config.weight_decay,
            grad_clip=config.grad_clip,
        )

    def direction(self, gradient: Tensor, state: Mapping[str, Tensor], step: int) -> Tensor:
        """See ``ElementwiseSpec``."""
        return adam_direction(gradient, state["exp_avg"], state["exp_avg_sq"], self.betas, self.eps, step)


def adam_direction(
    gradient: Tensor, mean: Tensor, square: Tensor, betas: tuple[float, float], eps: float, step: int
) -> Tensor:
    """m̂ / (√v̂ + eps) of the means, which change in place; all (n,)."""
    mean.lerp_(gradient, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    root = (square / (1 - betas[1] ** step)).sqrt_().add_(eps)
    return (mean / (1 - betas[0] ** step)).div_(root)


@dataclass(frozen=True, kw_only=True)
class Adam(AdamW):
    """The older Adam: weight_decay w is added to the gradient, where the moments rescale it."""

    options: ClassVar[type[OptimizerConfig]] = AdamConfig
    is_decoupled: ClassVar[bool] = False
