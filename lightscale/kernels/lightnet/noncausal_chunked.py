"""LightNet over whole documents by PyTorch's products, one document at a time; ``noncausal.py`` composes them.

``triton/whole.py`` has the same functions. States belong to documents: z (N, H, K), S (N, H, R, V). Without bounds
every row is one document, and N is B.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Angles, phases_of
from lightscale.kernels.common.states import state_dtype, without_autocast
from lightscale.kernels.lightnet.chunked import rotate, rotate_back
from lightscale.kernels.lightnet.state import LightNetState

Bounds = tuple[int, ...] | None
"""Document boundaries on the host, every row start included: reads of them do not wait for a GPU."""


def _documents(bounds: Bounds, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The parts (1, n, …) of tensors (B, T, …), document by document; without bounds all rows at once."""
    if bounds is None:
        yield tensors
        return
    lengths = [end - start for start, end in pairwise(bounds)]
    yield from zip(*(x.flatten(0, 1)[None].split(lengths, dim=1) for x in tensors), strict=True)


def _rows_of(number: int, bounds: Bounds) -> slice:
    """Index, among all documents' states, of the ``number``-th result of ``_documents``."""
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
    """log Σ_i e^{k_i} per channel, (B, n, H, K) -> (B, H, K); -inf if all keys are -inf."""
    return torch.logsumexp(k, dim=1) if k.shape[1] else k.new_full((k.shape[0], *k.shape[2:]), -torch.inf)


def _weights(k: Tensor, z: Tensor) -> Tensor:
    """e^{k - z}, 0 where z is -inf."""
    return torch.exp(k - z.masked_fill(z == -torch.inf, 0.0)[:, None])


@without_autocast
def document_states(k: Tensor, v: Tensor, angles: Angles | None, bounds: Bounds) -> LightNetState:
    """The state of the part here of each of N documents: z (N, H, K), S (N, H, R, V); without bounds N is B."""
    found = []
    for k_d, v_d, *phases in _documents(bounds, *_wide(angles, k, v)):
        z = _log_weight(k_d)
        found.append((z, _turned(_weights(k_d, z), tuple(phases)).mT @ v_d.transpose(1, 2)))
    return LightNetState(*(torch.cat(parts) for parts in zip(*found, strict=True)))


@without_autocast
def out_fwd(q: Tensor, v: Tensor, angles: Angles | None, states: LightNetState, bounds: Bounds = None) -> Tensor:
    """The outputs, as v (B, T, H, V), of queries (B, T, H, K) that read whole documents' states."""
    found = []
    for number, (q_d, *phases) in enumerate(_documents(bounds, *_wide(angles, q))):
        found.append((_turned(q_d, tuple(phases)) @ states.S[_rows_of(number, bounds)]).transpose(1, 2))
    return torch.cat(found, dim=1).reshape(v.shape).to(v.dtype)


@without_autocast
def document_cotangents(q: Tensor, do: Tensor, angles: Angles | None, bounds: Bounds) -> Tensor:
    """The part of dS (N, H, R, V) of each document by these tokens."""
    parts = _documents(bounds, *_wide(angles, q, do))
    found = [_turned(q_d, tuple(phases)).mT @ do_d.transpose(1, 2) for q_d, do_d, *phases in parts]
    return torch.cat(found)


@without_autocast
def token_gradients(
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    do: Tensor,
    states: LightNetState,
    dS: Tensor,
    shared: Tensor,
    bounds: Bounds,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v of whole documents' states (N, H, R, V), their cotangents, and c (N, H, K).

    ``dtype`` is the dtype of the first two gradients; None: k's dtype.
    """
    dtype = dtype or k.dtype
    found = []
    for number, parts in enumerate(_documents(bounds, *_wide(angles, k, v, do))):
        k_d, v_d, do_d, *phases = parts
        turns, rows = tuple(phases), _rows_of(number, bounds)
        S_d, dS_d, p = states.S[rows], dS[rows], _weights(k_d, states.z[rows])
        dq = _turned_back(do_d.transpose(1, 2) @ S_d.mT, turns)
        dk = p * (_turned_back(v_d.transpose(1, 2) @ dS_d.mT, turns) - shared[rows][:, None])
        found.append((dq, dk, (_turned(p, turns) @ dS_d).transpose(1, 2)))
    dq, dk, dv = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return dq.reshape(k.shape).to(dtype), dk.reshape(k.shape).to(dtype), dv.reshape(v.shape).to(v.dtype)
