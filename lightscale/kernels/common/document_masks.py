"""Masks of the tokens of a row that read the state that enters the row."""

import torch
from torch import Tensor

from lightscale.kernels.common.documents import document_numbers


def in_first_document(cu_seqlens: Tensor | None, *, num_rows: int, num_tokens: int) -> Tensor | None:
    """(B, T) bool: the tokens before the row's first document boundary; None: all tokens."""
    if cu_seqlens is None:
        return None
    return document_numbers(cu_seqlens, num_rows=num_rows, num_tokens=num_tokens) == 0


def masked(weights: Tensor, kept: Tensor | None) -> Tensor:
    """``weights`` (B, T, …), zero outside ``kept`` (B, T)."""
    if kept is None:
        return weights
    return torch.where(kept.view(*kept.shape, *[1] * (weights.dim() - 2)), weights, 0.0)
