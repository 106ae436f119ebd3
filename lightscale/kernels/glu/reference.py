"""The gated linear unit's activation, by autograd: the oracle of every other form."""

import math

import torch
from torch import Tensor
from torch.nn.functional import sigmoid, silu


def _gelu_tanh(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.erf(x / math.sqrt(2)))


_FUNCTIONS = {"none": lambda x: x, "sigmoid": sigmoid, "silu": silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}


def glu_reference(x: Tensor, activation: str) -> Tensor:
    """activation(gate) ⊙ up of x (..., 2 F) = [gate; up], in the dtype of x."""
    gate, up = x.chunk(2, dim=-1)
    return _FUNCTIONS[activation](gate) * up
