"""Additive decay without causality: every token of a document reads one state, made by one scan (LightNet, equation 8).

    z = log Σ_i e^{k_i}     p_i = e^{k_i - z}     S = Σ_i φ(p_i) v_iᵀ     o_t = Sᵀ φ(q_t)

Two products forward, and backward four, with one sum over tokens:

    dS = Σ_t φ(q_t) do_tᵀ     dq_t = φᵀ(S do_t)     dv_i = dSᵀ φ(p_i)     dk_i = p_i ⊙ (φᵀ(dS v_i) - Σ_V S ⊙ dS)

A row may be one rank's part of a sequence. Then the state of its first document also has what comes from before, that
of its last one what comes from behind, and dS likewise. ``bounds`` are document boundaries on the host, every row start
included, so that a GPU need not be asked for them; None where every row is one document, or a part of one.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.kernels.attention import to_device
from lightscale.kernels.common.angles import Angles, angles_of, phases_of
from lightscale.kernels.common.states import Arriving, arrived, state_dtype, without_autocast
from lightscale.kernels.lightnet.chunked import rotate, rotate_back
from lightscale.kernels.lightnet.state import LightNetState, by_channel, merge

Bounds = tuple[int, ...] | None


class Sides(NamedTuple):
    """What comes from both sides: from before to each row's first document, from behind to its last one."""

    before: LightNetState
    behind: LightNetState


def _documents(bounds: Bounds, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Of tensors (B, T, …) the parts (1, n, …) of each document in turn; without bounds all rows at once."""
    if bounds is None:
        yield tensors
        return
    lengths = [end - start for start, end in pairwise(bounds)]
    yield from zip(*(x.flatten(0, 1)[None].split(lengths, dim=1) for x in tensors), strict=True)


def _rows_of(number: int, bounds: Bounds) -> slice:
    """Where the states of the documents that ``_documents`` gives ``number``-th stand among those of all."""
    return slice(None) if bounds is None else slice(number, number + 1)


def _wide(angles: Angles | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors and the phases, if any, in the states' dtype."""
    dtype = state_dtype(tensors[0].dtype)
    phases = () if angles is None else phases_of(angles, dtype)
    return *(x.to(dtype) for x in tensors), *phases


def _turned(x: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
    """φ(x), (B, n, H, K) -> (B, H, n, R)."""
    return rotate(x, (phases[0], phases[1]) if phases else None).transpose(1, 2)


def _turned_back(x: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
    """φᵀ(x), (B, H, n, R) -> (B, n, H, K)."""
    return rotate_back(x.transpose(1, 2), (phases[0], phases[1]) if phases else None)


def _log_weight(k: Tensor) -> Tensor:
    """log Σ_i e^{k_i} per channel, (B, n, H, K) -> (B, H, K); -inf where nothing is written."""
    return torch.logsumexp(k, dim=1) if k.shape[1] else k.new_full((k.shape[0], *k.shape[2:]), -torch.inf)


def _weights(k: Tensor, z: Tensor) -> Tensor:
    """e^{k - z}, 0 where nothing was written."""
    return torch.exp(k - z.masked_fill(z == -torch.inf, 0.0)[:, None])


@without_autocast
def document_states(k: Tensor, v: Tensor, angles: Angles | None, bounds: Bounds) -> LightNetState:
    """The state of each of N documents by itself: z (N, H, K), S (N, H, R, V); without bounds N is B."""
    found = []
    for k_d, v_d, *phases in _documents(bounds, *_wide(angles, k, v)):
        z = _log_weight(k_d)
        found.append((z, _turned(_weights(k_d, z), tuple(phases)).mT @ v_d.transpose(1, 2)))
    return LightNetState(*(torch.cat(parts) for parts in zip(*found, strict=True)))


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
    """The states of each row's first and last document by themselves, and (B,) 0 where these are two."""
    states = document_states(k, v, angles, bounds)
    first, last = row_ends(bounds, k)
    sides = Sides(*(LightNetState(states.z[index], states.S[index]) for index in (first, last)))
    return sides, (first == last).to(states.z.dtype)


def total_states(own: LightNetState, sides: Sides | None, bounds: Bounds, x: Tensor) -> LightNetState:
    """``own`` states of documents with what comes from both sides of the rows of x (B, T, …)."""
    z, S = own
    if sides is not None:
        for index, entering in zip(row_ends(bounds, x), sides, strict=True):
            both = merge(entering, LightNetState(z[index], S[index]))
            z, S = z.index_copy(0, index, both.z), S.index_copy(0, index, both.S)
    return LightNetState(z, S)


@without_autocast
def out_fwd(q: Tensor, v: Tensor, angles: Angles | None, states: LightNetState, bounds: Bounds = None) -> Tensor:
    """The outputs, as v (B, T, H, V), of queries (B, T, H, K) that read whole documents' states."""
    found = []
    for number, (q_d, *phases) in enumerate(_documents(bounds, *_wide(angles, q))):
        found.append((_turned(q_d, tuple(phases)) @ states.S[_rows_of(number, bounds)]).transpose(1, 2))
    return torch.cat(found, dim=1).reshape(v.shape).to(v.dtype)


@without_autocast
def document_cotangents(q: Tensor, do: Tensor, angles: Angles | None, bounds: Bounds) -> Tensor:
    """dS (N, H, R, V) of each document, as far as it comes from these tokens."""
    parts = _documents(bounds, *_wide(angles, q, do))
    found = [_turned(q_d, tuple(phases)).mT @ do_d.transpose(1, 2) for q_d, do_d, *phases in parts]
    return torch.cat(found)


def state_bwd(q: Tensor, do: Tensor, angles: Angles | None, bounds: Bounds = None) -> tuple[Tensor, Tensor]:
    """The cotangents (B, H, R, V) of what enters each row from before and from behind, by the row's own outputs."""
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v.

    Args:
        q, k, v, angles: as of the operator; a row may be without tokens.
        do: cotangents of the outputs (B, T, H, V).
        states: of whole documents, see ``total_states``.
        dsides: the parts of dS (B, H, R, V) of tokens before each row's first document and behind its last one, or a
            function that waits for them; none when None.
        bounds: of documents.
    """
    dS = document_cotangents(q, do, angles, bounds)
    from_sides = arrived(dsides)
    if from_sides is not None:
        for index, part in zip(row_ends(bounds, q), from_sides, strict=True):
            dS = dS.index_add(0, index, part.to(dS.dtype))
    # Where z is constant: what all of a document's weights lose when one of them rises.
    shared = by_channel((states.S * dS).sum(-1), states.z.shape[2])
    found = []
    for number, parts in enumerate(_documents(bounds, *_wide(angles, k, v, do))):
        k_d, v_d, do_d, *phases = parts
        turns, rows = tuple(phases), _rows_of(number, bounds)
        S_d, dS_d, p = states.S[rows], dS[rows], _weights(k_d, states.z[rows])
        dq = _turned_back(do_d.transpose(1, 2) @ S_d.mT, turns)
        dk = p * (_turned_back(v_d.transpose(1, 2) @ dS_d.mT, turns) - shared[rows][:, None])
        found.append((dq, dk, (_turned(p, turns) @ dS_d).transpose(1, 2)))
    dq, dk, dv = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return dq.reshape(q.shape).to(q.dtype), dk.reshape(k.shape).to(k.dtype), dv.reshape(v.shape).to(v.dtype)


class NoncausalLightNet(torch.autograd.Function):
    """The operator of whole rows; saved are its inputs and the documents' states."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, theta: Tensor | None, positions: Tensor | None, bounds: Bounds
    ) -> Tensor:
        """See ``lightnet_noncausal``."""
        angles = angles_of(theta, positions)
        states = document_states(k, v, angles, bounds)
        ctx.bounds = bounds
        ctx.save_for_backward(q, k, v, theta, positions, *states)
        return out_fwd(q, v, angles, states, bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        """Gradients of q, k and v."""
        q, k, v, theta, positions, *states = ctx.saved_tensors
        angles = angles_of(theta, positions)
        return *grad_bwd(q, k, v, angles, do, LightNetState(*states), None, ctx.bounds), None, None, None
