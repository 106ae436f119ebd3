"""Activations of gates inside Triton kernels, with their derivatives, in fp32."""

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of x: x itself, 1 / (1 + e^-x), or x / (1 + e^-x)."""
    if ACTIVATION == "none":
        value = x
    elif ACTIVATION == "sigmoid":
        value = tl.sigmoid(x)
    else:
        value = x * tl.sigmoid(x)
    return value


@triton.jit
def slope(x, ACTIVATION: tl.constexpr):
    """The derivative of the activation at x."""
    s = tl.sigmoid(x)
    if ACTIVATION == "none":
        value = tl.full(x.shape, 1.0, tl.float32)
    elif ACTIVATION == "sigmoid":
        value = s * (1.0 - s)
    else:
        value = s * (1.0 + x * (1.0 - s))
    return value
