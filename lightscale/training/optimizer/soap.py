"""SOAP (Vyas et al. 2024, arXiv 2409.11321, algorithm 3): Adam in the eigenbasis of Shampoo's preconditioner."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from lightscale.config.schema import MOST_ENTRIES, MomentsDtype, OptimizerConfig
from lightscale.config.section import Fraction, Small, Steps
from lightscale.parallel.optimizer_spec import MatrixSpec
from lightscale.training.optimizer.adamw import adam_direction

if TYPE_CHECKING:
    from torch import Tensor

# Of the trace. fp32 has no digits of a smaller eigenvalue: without a floor, rounding alone would turn its directions,
# and layouts, which round gradients differently, would train apart.
_LEAST_EIGENVALUE = 1e-6


class SOAPConfig(OptimizerConfig):
    """[optimizer] with name = "soap"."""

    name: Literal["soap"] = "soap"
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.95, 0.95)
    """Decay rates per step of the first moment, and of the second moment and the preconditioner."""
    eps: Small = 1e-8
    """Constant added to the root of the second moment."""
    precondition_frequency: Steps = 10
    """Steps between refreshes of the eigenbasis."""
    max_precond_dim: Steps = 10_000
    """Longest side of a matrix that has an eigenbasis; longer sides keep their own."""
    adamw: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=MOST_ENTRIES)
    """Patterns of the names of matrices that AdamW steps, as it does all that is no matrix, such as ["*.gate_*"]."""
    moments_dtype: MomentsDtype = "fp32"
    """Number format of the moments between steps; preconditioner, fp32 weights and averages stay fp32."""


@dataclass(frozen=True, kw_only=True)
class SOAP(MatrixSpec):
    """W ← W - lr (Q_L N Q_Rᵀ + weight_decay W) for matrices, N = M̂' / (√V̂ + eps); AdamW's step for other parameters.

    M' = Q_Lᵀ M Q_R with the mean M of gradients G; V is the mean of (Q_Lᵀ G Q_R)². Q_L and Q_R are orthogonal and near
    the eigenvectors of L and R, the means of G Gᵀ and Gᵀ G. They are I at first; every ``precondition_frequency``
    steps, behind the step, Q ← QR((L + c I) Q), an orthogonal iteration with the eigenvectors of L, where c is 1e-6 of
    its trace. A step of an element is as large as one of Adam.
    """

    betas: tuple[float, float] = (0.95, 0.95)
    """Decay of M; and of V, L and R."""
    eps: float = 1e-8
    precondition_frequency: int = 10
    max_precond_dim: int = 10_000

    options: ClassVar[type[OptimizerConfig]] = SOAPConfig
    state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    matrix_state: ClassVar[tuple[str, ...]] = ()
    whole_moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    steps_like_adam: ClassVar[bool] = True
    step_counter: ClassVar[str] = "soap_steps"
    state_description: ClassVar[str] = "Adam's two moments"

    @classmethod
    def from_config(cls, config: SOAPConfig, total_steps: int) -> Self:
        """The constants that section [optimizer] gives."""
        return cls(
            betas=config.betas,
            eps=config.eps,
            precondition_frequency=config.precondition_frequency,
            max_precond_dim=config.max_precond_dim,
            # bf16 would not tell the directions of small eigenvalues apart.
            product_precision="fp32",
            elementwise=tuple(config.adamw),
            moments_dtype=config.moments_dtype,
            weight_decay=config.weight_decay,
            grad_clip=config.grad_clip,
        )

    def direction(self, gradient: Tensor, state: Mapping[str, Tensor], step: int) -> Tensor:
        """AdamW's; see ``ElementwiseSpec``."""
        return adam_direction(gradient, state["exp_avg"], state["exp_avg_sq"], self.betas, self.eps, step)

    def _sides(self, rows: int, columns: int) -> dict[str, int]:
        """Length of each side that has an eigenbasis."""
        sides = {"left": rows, "right": columns}
        return {side: length for side, length in sides.items() if length <= self.max_precond_dim}

    def whole_state(self, rows: int, columns: int) -> dict[str, tuple[int, int]]:
        """See ``MatrixSpec``."""
        found = dict.fromkeys(self.whole_moments, (rows, columns))
        for side, length in self._sides(rows, columns).items():
            found |= {side: (length, length), f"{side}_basis": (length, length)}
        return found

    def matrix_mean(self, gradient: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The gradient; see ``MatrixSpec``."""
        return gradient

    def matrix_direction(self, matrix: Tensor, state: Mapping[str, Tensor], step: int) -> Tensor:
        """See ``MatrixSpec``."""
        sides = self._sides(*matrix.shape)
        if step == 1:
            for side in sides:
                state[f"{side}_basis"].fill_diagonal_(1.0)
        left, right = (state.get(f"{side}_basis") for side in ("left", "right"))
        mean, square = (state[name] for name in self.whole_moments)
        mean.lerp_(matrix, 1 - self.betas[0])
        turned = _turned(matrix, left, right)
        square.mul_(self.betas[1]).addcmul_(turned, turned, value=1 - self.betas[1])
        root = (square / (1 - self.betas[1] ** step)).sqrt_().add_(self.eps)
        turned = (_turned(mean, left, right) / (1 - self.betas[0] ** step)).div_(root)
        # Behind the use of the bases, in which the gradient must not see itself.
        for side in sides:
            product = matrix @ matrix.mT if side == "left" else matrix.mT @ matrix
            state[side].lerp_(product, 1 - self.betas[1])
        direction = _turned(turned, *(basis if basis is None else basis.mT for basis in (left, right)))
        if step % self.precondition_frequency == 0:
            for side in sides:
                basis = state[f"{side}_basis"]
                basis.copy_(_refreshed(basis, state[side]))
        return direction

    def matrix_scale(self, rows: float, columns: float) -> float:
        """See ``MatrixSpec``."""
        return 1.0

    def matrix_flops(self, rows: int, columns: int) -> float:
        """Into the basis twice and back, the preconditioner, and a share of a refresh; see ``MatrixSpec``."""
        sides = self._sides(rows, columns).values()
        # Adam's own operations, so that matrices without an eigenbasis are shared out too.
        products = (8.0 * sum(sides) + 12.0) * rows * columns
        # A product, and QR with its factor Q.
        return products + (2.0 + 8.0 / 3.0) * sum(length**3 for length in sides) / self.precondition_frequency


def _turned(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """leftᵀ matrix right; None: no change of that side."""
    matrix = matrix if left is None else left.mT @ matrix
    return matrix if right is None else matrix @ right


def _refreshed(basis: Tensor, factor: Tensor) -> Tensor:
    """One orthogonal iteration: (n, n), nearer to the eigenvectors of ``factor`` (n, n)."""
    # By name, because a spec is read where torch must not be loaded; tensors have no method for it.
    qr: Any = pkgutil.resolve_name("torch.linalg:qr")
    return qr(factor @ basis + _LEAST_EIGENVALUE * factor.trace() * basis).Q
