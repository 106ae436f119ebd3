"""The activations of relation networks inside Triton kernels, with their derivatives, in fp32."""

import triton
import triton.language as tl


@triton.jit
def activate(s, ACTIVATION: tl.constexpr):
    """ψ(s), of a name of ``relation.ACTIVATIONS``."""
    tl.static_assert(ACTIVATION == "exp" or ACTIVATION == "relu" or ACTIVATION == "elu" or ACTIVATION == "silu")
    if ACTIVATION == "exp":
        value = tl.exp(s)
    elif ACTIVATION == "relu":
        # Not tl.maximum, which would turn NaN into 0.
        value = tl.where(s < 0.0, 0.0, s)
    elif ACTIVATION == "elu":
        value = tl.where(s > 0.0, s, tl.exp(s) - 1.0)
    else:
        value = s / (1.0 + tl.exp(-s))
    return value


@triton.jit
def slope(s, ACTIVATION: tl.constexpr):
    """ψ'(s)."""
    tl.static_assert(ACTIVATION == "exp" or ACTIVATION == "relu" or ACTIVATION == "elu" or ACTIVATION == "silu")
    if ACTIVATION == "exp":
        value = tl.exp(s)
    elif ACTIVATION == "relu":
        value = tl.where(s > 0.0, 1.0, 0.0)
    elif ACTIVATION == "elu":
        value = tl.exp(tl.minimum(s, 0.0, propagate_nan=tl.PropagateNan.ALL))
    else:
        gate = tl.sigmoid(s)
        value = gate * (1.0 + s * (1.0 - gate))
    return value
