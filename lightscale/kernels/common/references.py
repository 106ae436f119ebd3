"""Code that the recurrences, the oracles of tests, share with each other alone."""

import torch
from torch import Tensor


def beginnings(cu_seqlens: Tensor | None, x: Tensor) -> list[Tensor | None]:
    """For each token of x (B, T, …) the rows (B,) in which a document begins with the token; None: no row.

    A row's first token begins no document: the state that enters the row may belong to the same document.
    """
    num_rows, num_tokens = x.shape[:2]
    starts = set() if cu_seqlens is None else set(cu_seqlens.tolist())
    begins = [[t > 0 and row * num_tokens + t in starts for row in range(num_rows)] for t in range(num_tokens)]
    return [torch.tensor(rows, device=x.device) if any(rows) else None for rows in begins]


def cleared(state: Tensor, begins: Tensor | None, empty: float = 0.0) -> Tensor:
    """``state`` (B, …), but ``empty`` in the rows in which a document ``begins`` (B,)."""
    return state if begins is None else state.masked_fill(begins.view(-1, *[1] * (state.dim() - 1)), empty)
