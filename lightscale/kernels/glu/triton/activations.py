"""Activations of gates inside Triton kernels, with their derivatives, in fp32."""

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of x: x itself, 1 / (1 + e^-x), x / (1 + e^-x), or GELU, by erf or with tanh."""
    if ACTIVATION == "none":
        value = x
    elif ACTIVATION == "sigmoid":
        value = tl.sigmoid(x)
    elif ACTIVATION == "silu":
        value = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        value = 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
    else:
        # (1 + tanh u) / 2 is the sigmoid of 2 u, u = sqrt(2 / pi) (x + 0.044715 x^3).
        value = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return value


@triton.jit
def slope(x, ACTIVATION: tl.constexpr):
    """The derivative of the activation at x."""
    s = tl.sigmoid(x)
    if ACTIVATION == "none":
        value = tl.full(x.shape, 1.0, tl.float32)
    elif ACTIVATION == "sigmoid":
        value = s * (1.0 - s)
    elif ACTIVATION == "silu":
        value = s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "gelu":
        # The normal distribution, and x times its density.
        value = 0.5 * (1.0 + tl.erf(0.7071067811865476 * x)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        value = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 3 * 0.044715 * x * x)
    return value
