"""The gated linear unit's activation, by autograd: the oracle of every other form."""

from torch import Tensor
from torch.nn.functional import sigmoid, silu

_FUNCTIONS = {"none": lambda x: x, "sigmoid": sigmoid, "silu": silu}


def glu_reference(x: Tensor, activation: str) -> Tensor:
    """activation(gate) ⊙ up of x (..., 2 F) = [gate; up], in the dtype of x."""
    gate, up = x.chunk(2, dim=-1)
    return _FUNCTIONS[activation](gate) * up
