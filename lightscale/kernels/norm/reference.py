"""The norm with weight and gate, by autograd: the oracle of every other form."""

from torch import Tensor
from torch.nn.functional import sigmoid, silu

_GATES = {"none": lambda x: x, "sigmoid": sigmoid, "silu": silu}


def norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    gate_activation: str = "none",
    eps: float = 1e-6,
) -> Tensor:
    """x / sqrt(mean(x²) + eps) ⊙ weight ⊙ activation(gate), over the last dimension, in the dtype of the inputs.

    Args:
        x: (..., D).
        weight: (D,) or None.
        gate: (..., D) or None.
        gate_activation: "none", "sigmoid" or "silu".
        eps: added to the mean square.
    """
    y = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        y = y * weight
    return y if gate is None else y * _GATES[gate_activation](gate)
