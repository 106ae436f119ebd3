"""Additive decay without causality: every token of a document reads one state, made by one scan."""

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Angles, phases_of
from lightscale.kernels.common.states import state_dtype
from lightscale.kernels.lightnet.chunked import rotate


def noncausal(q: Tensor, k: Tensor, v: Tensor, angles: Angles | None, cu_seqlens: Tensor | None) -> Tensor:
    """o_t = Sᵀ φ(q_t) with S = Σ_i φ(softmax_i(k)_i) v_iᵀ per document; shapes as ``lightnet_noncausal``."""
    dtype = state_dtype(q.dtype)
    phases = () if angles is None else phases_of(angles, dtype)
    tensors = [q, k, v, *phases]
    with torch.autocast(q.device.type, enabled=False):
        tensors = [x.to(dtype) for x in tensors]
        if cu_seqlens is None:
            return _read_average(*tensors).to(v.dtype)
        lengths = cu_seqlens.diff().tolist()
        documents = zip(*(x.flatten(0, 1)[None].split(lengths, dim=1) for x in tensors), strict=True)
        o = torch.cat([_read_average(*document) for document in documents], dim=1)
        return o.view(v.shape).to(v.dtype)


def _read_average(q: Tensor, k: Tensor, v: Tensor, *phases: Tensor) -> Tensor:
    """Rows of one document each."""
    pair = (phases[0], phases[1]) if phases else None
    # A channel whose keys are all -inf writes nothing; softmax would make it NaN.
    empty = (k == -torch.inf).all(dim=1, keepdim=True)
    weights = torch.softmax(k.masked_fill(empty, 0.0), dim=1).masked_fill(empty, 0.0)
    S = rotate(weights, pair).permute(0, 2, 3, 1) @ v.transpose(1, 2)  # (B, H, R, V)
    return (rotate(q, pair).transpose(1, 2) @ S).transpose(1, 2)
