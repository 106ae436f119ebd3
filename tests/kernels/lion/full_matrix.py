"""LION by its full matrix, in plain PyTorch: the oracle of the tests; loaded by path."""

import torch
from torch import Tensor


def mask(log_decay: Tensor, gate: str, cu_seqlens: Tensor | None, queries: Tensor) -> Tensor:
    """M (B, H, Q, T) of tokens ``queries`` (Q,), by log decays (B, T, H): equation 12 for "leave", 8 for "enter"."""
    num_rows, num_tokens, _ = log_decay.shape
    sums = torch.cat([torch.zeros_like(log_decay[:, :1]), log_decay.cumsum(1)], 1).transpose(1, 2)
    # Products of the decays [start, end): sums at its end less those at its start.
    i, j = queries[:, None], torch.arange(num_tokens)[None]
    later = i > j
    left, right = torch.minimum(i, j).expand_as(later), torch.maximum(i, j).expand_as(later)
    shift = later == (gate == "enter")
    distance = sums[:, :, right + shift] - sums[:, :, left + shift]
    decays = torch.where(i == j, 0.0, distance).exp()
    if cu_seqlens is not None:
        begins = torch.zeros(num_rows * num_tokens + 1, dtype=torch.int64)
        begins[cu_seqlens] = 1
        number = begins[:-1].cumsum(0).view(num_rows, num_tokens)
        decays = torch.where((number[:, queries, None] == number[:, None])[:, None], decays, 0.0)
    return decays


def full_matrix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    gate: str = "leave",
    normalize: bool = True,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    queries: Tensor | None = None,
) -> Tensor:
    """SCALE(Q Kᵀ ⊙ M) V (equation 25) in the dtype of the inputs, or of the tokens ``queries`` only."""
    queries = torch.arange(q.shape[1]) if queries is None else queries
    log_decay = q.new_zeros(q.shape[2]) if log_decay is None else log_decay
    decays = mask(log_decay.expand(q.shape[:3]), gate, cu_seqlens, queries)
    scores = torch.einsum("bihk,bjhk->bhij", q[:, queries], k) * decays
    if normalize:
        scores = scores / (scores.sum(-1, keepdim=True) + eps)
    return torch.einsum("bhij,bjhv->bihv", scores, v)


def vector_matrix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    gate: str = "leave",
    normalize: bool = True,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    queries: Tensor | None = None,
) -> Tensor:
    """SCALE(Q Kᵀ ⊙ M) * V (equation 136): a matrix M for each value channel, by log decays (B, T, H, V)."""
    queries = torch.arange(q.shape[1]) if queries is None else queries
    decays = mask(log_decay.flatten(2), gate, cu_seqlens, queries).unflatten(1, v.shape[2:])
    # As the code beside the equation: n h k m, and d behind.
    scores = torch.einsum("bhij,bhvij->bhijv", torch.einsum("bihk,bjhk->bhij", q[:, queries], k), decays)
    if normalize:
        scores = scores / (scores.sum(3, keepdim=True) + eps)
    return torch.einsum("bhijv,bjhv->bihv", scores, v)
