"""Tensors of 8 bits, of which lightscale makes none: what Megatron asks all others whether they are."""

from torch import Tensor


class QuantizedTensor(Tensor):
    """The base of all of them."""
