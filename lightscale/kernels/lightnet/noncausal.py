"""Additive decay without causality: every token of a document reads one state, made by one scan (LightNet, equation 8).

    z = log Σ_i e^{k_i}     p_i = e^{k_i - z}     S = Σ_i φ(p_i) v_iᵀ     o_t = Sᵀ φ(q_t)

Two products forward, and backward four, with one sum over tokens:

    dS = Σ_t φ(q_t) do_tᵀ     dq_t = φᵀ(S do_t)     dv_i = dSᵀ φ(p_i)     dk_i = p_i ⊙ (φᵀ(dS v_i) - Σ_V S ⊙ dS)

A row may be one rank's part of a sequence. Then the state of its first document includes tokens before the row, the
state of its last document tokens behind it. The same holds for dS. ``bounds`` are document boundaries on the host,
every row start included: no wait for a GPU. None: every row is one document, or a part of one.
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.kernels.attention import to_device
from lightscale.kernels.common.angles import Angles, angles_of, theta_gradient
from lightscale.kernels.common.backends import AUTO, choose_backend, dispatch_passes, implementation
from lightscale.kernels.common.states import Arriving, arrived, without_autocast
from lightscale.kernels.lightnet import noncausal_chunked
from lightscale.kernels.lightnet.chunked import LightNetGradients
from lightscale.kernels.lightnet.noncausal_chunked import Bounds
from lightscale.kernels.lightnet.state import LightNetState, by_channel, merge

document_states, out_fwd, document_cotangents = dispatch_passes(
    "lightnet_noncausal",
    noncausal_chunked.document_states,
    noncausal_chunked.out_fwd,
    noncausal_chunked.document_cotangents,
)


def _passes(x: Tensor, backend: str) -> ModuleType:
    """The module for tensors like x: ``noncausal_chunked.py`` or ``triton/whole.py``."""
    found: ModuleType = implementation("lightnet_noncausal", choose_backend("lightnet_noncausal", x, backend))
    return found


class Sides(NamedTuple):
    """States of tokens outside the rows: before each row in its first document, behind the row in its last one."""

    before: LightNetState
    behind: LightNetState


def row_ends(bounds: Bounds, x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the first and the last document of each row of x (B, T, …), (B,) each."""
    if bounds is None:
        rows = torch.arange(x.shape[0], device=x.device)
        return rows, rows
    rows_of = torch.tensor(bounds[:-1]) // x.shape[1]
    first = torch.searchsorted(rows_of, torch.arange(x.shape[0]))
    last = torch.searchsorted(rows_of, torch.arange(x.shape[0]), right=True) - 1
    return to_device(first, x.device), to_device(last, x.device)


def state_fwd(k: Tensor, v: Tensor, angles: Angles | None, bounds: Bounds = None) -> tuple[Sides, Tensor]:
    """The states of each row's first and last document in the row, and (B,) 0 where the two differ."""
    states = document_states(k, v, angles, bounds)
    first, last = row_ends(bounds, k)
    sides = Sides(*(LightNetState(states.z[index], states.S[index]) for index in (first, last)))
    return sides, (first == last).to(states.z.dtype)


def total_states(own: LightNetState, sides: Sides | None, bounds: Bounds, x: Tensor) -> LightNetState:
    """``own`` states of documents merged with the states from both sides of the rows of x (B, T, …)."""
    z, S = own
    if sides is not None:
        for index, entering in zip(row_ends(bounds, x), sides, strict=True):
            both = merge(entering, LightNetState(z[index], S[index]))
            z, S = z.index_copy(0, index, both.z), S.index_copy(0, index, both.S)
    return LightNetState(z, S)


def state_bwd(q: Tensor, do: Tensor, angles: Angles | None, bounds: Bounds = None) -> tuple[Tensor, Tensor]:
    """The cotangents (B, H, R, V) of the states that enter each row from both sides, by the row's own outputs."""
    own = document_cotangents(q, do, angles, bounds)
    first, last = row_ends(bounds, q)
    return own[first], own[last]


@without_autocast
def grad_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    do: Tensor,
    states: LightNetState,
    dsides: Arriving[tuple[Tensor, Tensor] | None] = None,
    bounds: Bounds = None,
    backend: str = AUTO,
    *,
    with_theta: bool = False,
) -> LightNetGradients:
    """The gradients of q, k and v, in their dtypes, and on request of theta.

    Args:
        q, k, v, angles: as in the operator; a row may have 0 tokens.
        do: cotangents of the outputs (B, T, H, V).
        states: states of whole documents, see ``total_states``.
        dsides: the parts of dS (B, H, R, V) of tokens before each row's first document and behind its last one, or a
            function that waits for them; none when None.
        bounds: document boundaries on the host, or None.
        backend: as in the operator.
        with_theta: compute dtheta, which costs the gradients of q and k once more; needs angles.
    """
    dS = _passes(q, backend).document_cotangents(q, do, angles, bounds)
    from_sides = arrived(dsides)
    if from_sides is not None:
        for index, part in zip(row_ends(bounds, q), from_sides, strict=True):
            dS = dS.index_add(0, index, part.to(dS.dtype))
    # The loss of all weights of a document when one key rises, because their sum is constant.
    shared = by_channel((states.S * dS).sum(-1), states.z.shape[2])
    token_gradients = _passes(q, backend).token_gradients
    dq, dk, dv = token_gradients(k, v, angles, do, states, dS, shared, bounds)
    if not with_theta:
        return LightNetGradients(dq, dk, dv, None)
    assert angles is not None, "with_theta"
    # A quarter turn of φ is its derivative by the angle; a quarter turn back of the states is equivalent. No rounding
    # to half precision: the terms grow with the positions, and most of their sum cancels.
    back, of_z = LightNetState(states.z, _quarter_back(states.S)), torch.zeros_like(shared)
    of_q, of_k, _ = token_gradients(k, v, angles, do, back, _quarter_back(dS), of_z, bounds, shared.dtype)
    of_angles = q.double() * of_q.double() + of_k.double()
    return LightNetGradients(dq, dk, dv, theta_gradient(angles, of_angles))


def _quarter_back(S: Tensor) -> Tensor:
    """The halves (C, D) of a state's rows as (D, -C)."""
    cosines, sines = S.chunk(2, dim=2)
    return torch.cat([sines, -cosines], dim=2)


class NoncausalLightNet(torch.autograd.Function):
    """The operator of whole rows with its gradients; saves the inputs and the documents' states."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """The outputs of q, k, v, theta, positions, bounds, backend; see ``lightnet_noncausal``."""
        *tensors, ctx.bounds, ctx.backend = inputs
        q, k, v, theta, positions = tensors
        angles = angles_of(theta, positions)
        passes = _passes(q, ctx.backend)
        states: LightNetState = passes.document_states(k, v, angles, ctx.bounds)
        ctx.save_for_backward(*tensors, *states)
        o: Tensor = passes.out_fwd(q, v, angles, states, ctx.bounds)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        """The gradients of q, k, v and theta."""
        q, k, v, theta, positions, *states = ctx.saved_tensors
        angles, with_theta = angles_of(theta, positions), ctx.needs_input_grad[3]
        found = grad_bwd(
            q, k, v, angles, do, LightNetState(*states), None, ctx.bounds, ctx.backend, with_theta=with_theta
        )
        dtheta = None if found.theta is None else found.theta.to(theta.dtype)
        return found.q, found.k, found.v, dtheta, None, None, None
