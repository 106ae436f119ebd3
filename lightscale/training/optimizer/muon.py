"""Muon: momentum whose matrices are made orthogonal (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).

With weight decay, and steps as large as those of AdamW (Moonlight, arXiv 2502.16982, sections 2.2 and 2.3), so that
both have one learning rate. With ``optimizer.qk_clip`` it is MuonClip (arXiv 2507.20534).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field

from lightscale.config.schema import MOST_ENTRIES, MomentsDtype, OptimizerConfig
from lightscale.config.section import Fraction, Small
from lightscale.parallel.optimizer_spec import MatrixSpec
from lightscale.training.optimizer.adamw import adam_direction

if TYPE_CHECKING:
    from torch import Tensor

# Of the polynomial a x + b x³ + c x⁵: steep at 0, and it keeps singular values between 0.7 and 1.2 (Jordan et al.).
_A, _B, _C = 3.4445, -4.7750, 2.0315
# Root mean square of a step of AdamW, as seen in Moonlight's models.
_ADAMW_RMS = 0.2
# A matrix of zeros has no direction, and stays zeros.
_LEAST_NORM = 1e-7


class MuonConfig(OptimizerConfig):
    """[optimizer] with name = "muon"."""

    name: Literal["muon"] = "muon"
    momentum: Fraction = 0.95
    """Decay rate of the momentum of matrices, per step."""
    nesterov: bool = True
    """Whether a step looks ahead: the gradient is mixed into the momentum once more."""
    newton_schulz_steps: Annotated[int, Field(ge=1, le=20)] = 5
    """Iterations that make a matrix orthogonal."""
    newton_schulz_precision: Literal["bf16", "fp32"] = "bf16"
    """Number format of the iterations, and of the matrices that ranks exchange for them."""
    adamw: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=MOST_ENTRIES)
    """Patterns of the names of matrices that AdamW steps, as it does all that is no matrix, such as ["*.gate_*"]."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """Decay rates per step of AdamW's first and second moments, for what is no matrix."""
    eps: Small = 1e-8
    """Constant added to the root of AdamW's second moment."""
    moments_dtype: MomentsDtype = "fp32"
    """Number format of momentum and moments between steps; fp32 weights and averages stay fp32."""


@dataclass(frozen=True, kw_only=True)
class Muon(MatrixSpec):
    """W ← W - lr (0.2 √max(m, n) NS(M) + weight_decay W) for matrices (m, n); AdamW's step for other parameters.

    M ← μ M + (1 - μ) G; with Nesterov's look ahead NS takes μ M + (1 - μ) G instead. NS(M) has the singular vectors of
    M, and singular values near 1. An orthogonal matrix has elements of root mean square 1/√max(m, n): the factor makes
    it 0.2, which is AdamW's.
    """

    momentum: float = 0.95
    """μ."""
    nesterov: bool = True
    newton_schulz_steps: int = 5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    options: ClassVar[type[OptimizerConfig]] = MuonConfig
    state: ClassVar[tuple[str, ...]] = ("momentum", "exp_avg", "exp_avg_sq")
    matrix_state: ClassVar[tuple[str, ...]] = ("momentum",)
    step_counter: ClassVar[str] = "muon_steps"
    state_description: ClassVar[str] = "the momentum of matrices, and Adam's two moments of other parameters,"

    @classmethod
    def from_config(cls, config: MuonConfig, total_steps: int) -> Self:
        """The constants that section [optimizer] gives."""
        return cls(
            momentum=config.momentum,
            nesterov=config.nesterov,
            newton_schulz_steps=config.newton_schulz_steps,
            product_precision=config.newton_schulz_precision,
            elementwise=tuple(config.adamw),
            betas=config.betas,
            eps=config.eps,
            moments_dtype=config.moments_dtype,
            weight_decay=config.weight_decay,
            grad_clip=config.grad_clip,
        )

    def direction(self, gradient: Tensor, state: Mapping[str, Tensor], step: int) -> Tensor:
        """AdamW's; see ``ElementwiseSpec``."""
        return adam_direction(gradient, state["exp_avg"], state["exp_avg_sq"], self.betas, self.eps, step)

    def matrix_mean(self, gradient: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """See ``MatrixSpec``."""
        momentum = state["momentum"].lerp_(gradient, 1 - self.momentum)
        return gradient.lerp(momentum, self.momentum) if self.nesterov else momentum.clone()

    def matrix_direction(self, matrix: Tensor, state: Mapping[str, Tensor], step: int) -> Tensor:
        """Newton and Schulz's iteration X ← a X + (b A + c A²) X, A = X Xᵀ; see ``MatrixSpec``."""
        rows, columns = matrix.shape
        # A is square in the shorter side.
        x = matrix.mT if rows > columns else matrix
        # No singular value is larger than Frobenius' norm.
        x = x / x.norm().clamp(min=_LEAST_NORM)
        for _ in range(self.newton_schulz_steps):
            a = x @ x.mT
            x = x.addmm(a.addmm(a, a, beta=_B, alpha=_C), x, beta=_A)
        return x.mT if rows > columns else x

    def matrix_scale(self, rows: float, columns: float) -> float:
        """See ``MatrixSpec``."""
        return _ADAMW_RMS * math.sqrt(max(rows, columns))

    def matrix_flops(self, rows: int, columns: int) -> float:
        """Three products for each iteration; see ``MatrixSpec``."""
        short, long = sorted((rows, columns))
        return self.newton_schulz_steps * (4.0 * short**2 * long + 2.0 * short**3)
