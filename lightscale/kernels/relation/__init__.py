"""Relation networks of all pairs, o_i = Σ_j ψ(LN(a_i + b_j)): the quadratic form of CausalRN and BiRN.

(CausalRN, "Linear-Time Sequence Modeling with MLPs", equation 8, with the norm of section 3.4.) Time grows with the
square of the length, memory with the length. docs/reference/operators/relation.md has the mathematics.
"""

import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.common.backends import AUTO, choose_backend, implementation, preload_backends
from lightscale.kernels.common.checks import check_device
from lightscale.kernels.common.states import state_dtype
from lightscale.kernels.relation.activations import ACTIVATIONS, activation_of
from lightscale.kernels.relation.reference import relation_reference
from lightscale.kernels.relation.tiled import Form, TiledRelation

__all__ = ["ACTIVATIONS", "relation", "relation_reference"]


def relation(
    a: Tensor,
    b: Tensor,
    first: Tensor,
    end: Tensor,
    *,
    activation: str = "exp",
    norm: bool = True,
    eps: float = 0.0,
    backend: str = AUTO,
) -> Tensor:
    """o_i = Σ_j ψ(LN(a_i + b_j)) over first_i ≤ j < end_i: differentiable in a and b, memory linear in their tokens.

    Args:
        a: (B, T, D), of the tokens that read; fp16, bf16, fp32 or fp64.
        b: (B, S, D), of the tokens that are read, of a's dtype.
        first, end: (B, T) int64 on the host, between 0 and S, the range of tokens that each token reads. They give the
            list of tiles without a wait for a GPU.
        activation: ψ, a name of ``ACTIVATIONS``. exp without a norm overflows for large a + b; ``log_sum`` does not.
        norm: LayerNorm without weights over D before ψ; False: none.
        eps: added to its variance.
        backend: "auto", "triton", "chunked" (PyTorch in tiles), "reference" (all pairs at once).

    Returns:
        o (B, T, D), fp32 (fp64 for fp64 inputs). A normalised pair is at most sqrt(D - 1): exp does not overflow fp32
        with up to 6,000 channels.

    Raises:
        UserError: a shape, dtype, device, name or backend does not fit; the message names the argument.
    """
    if a.dim() != 3 or b.dim() != 3 or (a.shape[0], a.shape[2]) != (b.shape[0], b.shape[2]):
        raise UserError(f"a must be (B, T, D) and b (B, S, D), got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != b.dtype or not a.is_floating_point():
        raise UserError(f"a and b must have one dtype of floating point numbers, got {a.dtype} and {b.dtype}")
    check_device("b", b, a, like="a")
    activation_of(activation)
    for name, x in (("first", first), ("end", end)):
        if x.shape != a.shape[:2] or x.dtype != torch.int64 or x.device.type != "cpu":
            raise UserError(
                f"{name} must be (B, T) = {tuple(a.shape[:2])} int64 on the host, got {tuple(x.shape)} {x.dtype} on "
                f"{x.device}"
            )
        if x.numel() and (int(x.min()) < 0 or int(x.max()) > b.shape[1]):
            raise UserError(f"{name} must be between 0 and the {b.shape[1]} tokens of b")
    chosen, form = choose_backend("relation", a, backend), Form(activation, norm, eps)
    if chosen == "triton":
        found: Tensor = implementation("relation", chosen).triton_relation(a, b, first, end, form)
        return found
    if chosen == "reference":
        a, b = (x.to(state_dtype(x.dtype)) for x in (a, b))
        return relation_reference(a, b, first, end, activation=activation, norm=norm, eps=eps)
    o: Tensor = TiledRelation.apply(a, b, first, end, form)
    return o


preload_backends("relation")
